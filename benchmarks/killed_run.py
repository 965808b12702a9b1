"""``asyncrl`` in a process that kills itself at a chosen moment; ``benchmarks/kills.py`` starts it.

    python benchmarks/killed_run.py REPORT update:3:0.25 train --config configs/quickstart.yaml

sends SIGKILL to itself 0.25 s into the third update, or into the first after it that lasts so long. ``none``
in place of that lets the run go to its end. REPORT gets a line of JSON for each thing that happened: the end
of the start-up, the kill, and at a good end how long each phase usually was.

The phases are the calls that they are made of, counted where the controller makes them: from outside, nobody
can tell what a process does at a given moment.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("start-up", "rollout", "update", "push", "checkpoint")


@dataclass(frozen=True)
class Moment:
    """``after_s`` seconds into the ``occurrence``-th time (from 1) that ``phase`` is under way."""

    phase: str
    occurrence: int
    after_s: float

    @staticmethod
    def parse(text: str) -> Moment | None:
        """``phase:occurrence:seconds``, or ``none``. Raises ValueError."""
        if text == "none":
            return None
        phase, occurrence, after_s = text.rsplit(":", 2)
        if phase not in PHASES:
            raise ValueError(f"found the phase {phase!r}; expected one of {', '.join(PHASES)}")
        return Moment(phase, int(occurrence), float(after_s))

    def __str__(self) -> str:
        return f"{self.phase}:{self.occurrence}:{self.after_s:.4f}"


class Killer:
    """Hears of phases from any thread, and ends the process at ``moment``."""

    def __init__(self, moment: Moment | None, report: Path) -> None:
        self._moment = moment
        self._report = report
        self._born = time.monotonic()
        self._lock = threading.Lock()
        self._begun: defaultdict[str, int] = defaultdict(int)
        self._lasted: defaultdict[str, list[float]] = defaultdict(list)
        self._armed: object | None = None
        """The occurrence that will be killed if it lasts long enough."""

    def begin(self, phase: str) -> Callable[[], None]:
        """``phase`` is under way from now until what is returned is called."""
        began, this = time.monotonic(), object()
        with self._lock:
            self._begun[phase] += 1
            if self._moment is not None and self._armed is None and self._is_reached(self._moment, phase):
                self._armed = this
                timer = threading.Timer(self._moment.after_s, self._kill, (phase, this))
                timer.daemon = True
                timer.start()

        def end() -> None:
            with self._lock:
                self._lasted[phase].append(time.monotonic() - began)
                if self._armed is this:
                    self._armed = None

        return end

    @contextmanager
    def under_way(self, phase: str) -> Iterator[None]:
        end = self.begin(phase)
        try:
            yield
        finally:
            end()

    def say(self, event: str, **facts: Any) -> None:
        """A line of the report, which outlives this process once this returns."""
        line = {"event": event, "after_s": round(time.monotonic() - self._born, 3), **facts}
        with self._report.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def say_durations(self) -> None:
        self.say("ended", seconds={phase: statistics.median(of) for phase, of in self._lasted.items()})

    def _is_reached(self, moment: Moment, phase: str) -> bool:
        return moment.phase == phase and self._begun[phase] >= moment.occurrence

    def _kill(self, phase: str, this: object) -> None:
        with self._lock:  # no phase begins or ends from here on
            if self._armed is not this:
                return  # it was over before
            self.say("killed", phase=phase, occurrence=self._begun[phase])
            os.kill(os.getpid(), signal.SIGKILL)


def watch(killer: Killer, start_up_ended: Callable[[], None]) -> None:
    """Have ``killer`` hear of the phases of whatever run this process makes."""
    from asyncrl.checkpoint.store import CheckpointStore
    from asyncrl.generators.pool import GeneratorPool
    from asyncrl.learners.group import RayLearner
    from asyncrl.run import RunObserver
    from asyncrl.weight_sync.publish import WeightPublisher
    from asyncrl.weight_sync.relabel import RelabelPublisher

    around(RayLearner, "step", lambda _: killer.under_way("update"))
    for publisher in (WeightPublisher, RelabelPublisher):
        around(publisher, "publish", lambda _: killer.under_way("push"))
    # An evaluation asks for a version of its own, and counts as none of these.
    around(GeneratorPool, "run_group", lambda asked: killer.under_way("ignored" if asked else "rollout"))
    watch_checkpoints(killer, CheckpointStore)
    phase = RunObserver.phase

    def observed(self: RunObserver, name: str) -> None:
        if name == "training":
            start_up_ended()
            killer.say("training")
        phase(self, name)

    RunObserver.phase = observed  # type: ignore[method-assign]


def around(kind: type, name: str, block: Callable[[bool], Any]) -> None:
    """Make calls of an asynchronous method inside ``block``, which hears whether a version was asked for."""
    method = getattr(kind, name)

    @functools.wraps(method)
    async def inside(*args: Any, **options: Any) -> Any:
        with block(options.get("version") is not None):
            return await method(*args, **options)

    setattr(kind, name, inside)


def watch_checkpoints(killer: Killer, kind: Any) -> None:
    """From the new folder to the removal of what it replaces: each in a thread, one after the other."""
    begin, prune = kind.begin, kind.prune
    ends: list[Callable[[], None]] = []

    def begun(self: Any, step: int) -> Path:
        ends.append(killer.begin("checkpoint"))
        part: Path = begin(self, step)
        return part

    def pruned(self: Any, *args: Any) -> None:
        prune(self, *args)
        while ends:
            ends.pop()()

    kind.begin, kind.prune = begun, pruned


def main() -> None:
    report, moment, *command = sys.argv[1:]
    killer = Killer(Moment.parse(moment), Path(report))
    start_up_ended = killer.begin("start-up")
    from asyncrl.cli import app

    watch(killer, start_up_ended)
    code = app(command, standalone_mode=False)
    if not code:
        killer.say_durations()
    sys.exit(code)


if __name__ == "__main__":
    main()
