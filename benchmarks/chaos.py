"""Random faults on a real run, for minutes or hours, and a count of what was lost.

    python benchmarks/chaos.py --minutes 30 --seed 0 --out runs/chaos
    python benchmarks/chaos.py --config mine.yaml --minutes 5 generators.replicas=2
    python benchmarks/chaos.py --each --only "Ray's head killed" "controller killed"

``asyncrl train`` runs with a checkpoint every few steps. Every few seconds something is done to it, drawn
from ``--seed`` (with ``--each``, every one once, in the order given): a generator, a reward worker, the
learner or the controller is killed or stopped for a while, a generator gets no more memory, all of the run
stands still for a minute, Ray's node or head is killed, or a signal asks the run to end. Whenever the run has
ended, it is started again. After the time is over it is left alone until it has come to its end.

Then every ordinal has to be retired exactly once, every step to have one line, no lag to be beyond the bound,
and no process to be left. ``<out>/chaos.json`` holds each fault with what came of it and the seconds until
the next step was done, and the controller's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl.bench.machine import describe_machine
from asyncrl.config_load import load_config

ROOT = Path(__file__).parent.parent
MARK = "ASYNCRL_CHAOS_RUN"
SETTINGS = (
    "generators.replicas=2",
    "generators.health_every_s=1",
    "checkpoint.every=3",
    "log.trackers=[]",
    "log.rollouts_every=0",
    "log.display=lines",
    "run.steps=1000000",
    "learner.lr_schedule=constant",
)
NAME = "chaos"
RECOVERY_TIMEOUT_S = 600.0
LAST_STEPS = 3
log = logging.getLogger("chaos")


class Run:
    """One run, over all of its lives."""

    def __init__(self, config: Path, out: Path, overrides: Sequence[str]) -> None:
        self.folder = out / NAME
        self.lives = 0
        self._mark = uuid.uuid4().hex
        self._log = out / "chaos.log"
        self._command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(config), *SETTINGS]
        self._command += [*overrides, f"run.dir={out}", f"run.name={NAME}"]
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []

    def start(self, *overrides: str) -> None:
        self.lives += 1
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self._command, *overrides],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark},
            )
        self._pids.append(self._process.pid)

    @property
    def controller(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def step(self) -> int:
        """The last one that is on disk; -1 before the first line."""
        path = self.folder / "metrics.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return int(json.loads(whole.rpartition(b"\n")[2])["step"]) if whole else -1

    def processes(self, title: str = "") -> list[psutil.Process]:
        """All that this run started and that lives, with ``title`` in its command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
                if alive and self._started(process) and title in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def _started(self, process: psutil.Process) -> bool:
        """By the mark; or by a log of its Ray session, for one that wrote a title over that."""
        if process.environ().get(MARK) == self._mark:
            return True
        session = re.compile(rf"/session_[^/]*_({'|'.join(map(str, self._pids))})/logs/")
        return any(session.search(file.path) for file in process.open_files())

    def tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


# ---------------------------------------------------------------- faults


Victims = Callable[["Run"], list[psutil.Process]]
Strike = Callable[["Run", random.Random], str | None]
"""Does it, and says to whom; None where there is nobody."""


def titled(title: str) -> Victims:
    return lambda run: run.processes(title)


def controller(run: Run) -> list[psutil.Process]:
    return [run.controller]


def reward_workers(run: Run) -> list[psutil.Process]:
    """Children of the generators' processes."""
    return [
        child
        for generator in run.processes("GeneratorActor")
        for child in generator.children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


def send(number: signal.Signals, victims: Victims) -> Strike:
    def strike(run: Run, chance: random.Random) -> str | None:
        if not (found := victims(run)):
            return None
        victim = chance.choice(found)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
            return f"process {victim.pid}"
        return None

    return strike


def stop(victims: Victims, *, most_s: float = 30.0, everyone: bool = False) -> Strike:
    """SIGSTOP, and SIGCONT after a while: the process may be gone by then."""

    def strike(run: Run, chance: random.Random) -> str | None:
        if not (found := victims(run)):
            return None
        struck = found if everyone else [chance.choice(found)]
        seconds = most_s if everyone else chance.uniform(1.0, most_s)
        for victim in struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.suspend()
        time.sleep(seconds)
        for victim in struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()
        who = f"{len(struck)} processes" if everyone else f"process {struck[0].pid}"
        return f"{who} for {seconds:.0f} s"

    return strike


def run_out_of_memory(run: Run, chance: random.Random) -> str | None:
    """A generator may take no more memory than it has: what it allocates next fails."""
    if not (found := run.processes("GeneratorActor")):
        return None
    victim = chance.choice(found)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
        return f"process {victim.pid}"
    return None


FAULTS: dict[str, Strike] = {
    "generator killed": send(signal.SIGKILL, titled("GeneratorActor")),
    "generator stopped": stop(titled("GeneratorActor")),
    "generator out of memory": run_out_of_memory,
    "reward worker killed": send(signal.SIGKILL, reward_workers),
    "reward worker stopped": stop(reward_workers),
    "learner killed": send(signal.SIGKILL, titled("LearnerActor")),
    "learner stopped": stop(titled("LearnerActor")),
    "controller killed": send(signal.SIGKILL, controller),
    "controller stopped": stop(controller),
    "asked to end (SIGTERM)": send(signal.SIGTERM, controller),
    "all of it stopped for a minute": stop(titled(""), most_s=60.0, everyone=True),
    "Ray's node killed": send(signal.SIGKILL, titled("raylet/raylet")),
    "Ray's head killed": send(signal.SIGKILL, titled("gcs_server")),
}


ENDS_THE_RUN = frozenset(
    {
        "learner killed",
        "controller killed",
        "asked to end (SIGTERM)",
        "Ray's node killed",
        "Ray's head killed",
    }
)
"""Steps that are done meanwhile are no recovery."""


# ---------------------------------------------------------------- the run


def recover(run: Run, *, ended: bool = False) -> tuple[float, int]:
    """Until two steps are done that were not, the run started again where it ended: seconds, and starts.

    Two, because the first may have been all but done. ``ended``: after the run's end, which is awaited.
    """
    began, starts = time.monotonic(), 0
    if ended:
        run.wait(RECOVERY_TIMEOUT_S)
    before = run.step()
    while run.step() <= before + 1:
        if run.exit_code is not None:
            log.info("the run ended with exit code %s: started again", run.exit_code)
            run.start()
            starts += 1
            before = -1 if run.step() < 0 else before
        if time.monotonic() - began > RECOVERY_TIMEOUT_S:
            raise SystemExit(f"no step within {RECOVERY_TIMEOUT_S:.0f} s, after:\n{run.tail()}")
        if starts and run.step() < before:
            before = run.step()  # rolled back to the checkpoint
        time.sleep(0.1)
    return time.monotonic() - began, starts


def verify(run: Run, config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What the run came to. AssertionError where something was lost, or there twice, or too old."""
    bound = load_config(config, [*SETTINGS, *overrides]).schedule.max_staleness
    ends, lines = run.lines("ledger.jsonl"), run.lines("metrics.jsonl")
    ordinals = sorted(end["ordinal"] for end in ends)
    assert ordinals == list(range(len(ordinals))), "an ordinal was lost, or retired twice"
    steps = [line["step"] for line in lines]
    assert steps == list(range(len(steps))), f"steps {steps}"
    largest = max(line.get("staleness/max", 0) for line in lines)
    assert largest <= bound, f"lag {largest}, max_staleness {bound}"
    failed = lines[-1]["ledger/failed"]
    deadline = time.monotonic() + 30
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.5)
    left = [" ".join(process.cmdline())[:100] for process in run.processes()]
    assert not left, f"left behind: {left}"
    return {
        "steps": steps[-1],
        "ordinals": len(ordinals),
        "lost": 0,
        "repeated": 0,
        "failed": failed,
        "lag_max": largest,
        "bound": bound,
        "processes_left": 0,
    }


def controller_memory(run: Run) -> list[dict[str, float]]:
    """Resident memory of the controller now; nothing where it is gone."""
    try:
        rss = run.controller.memory_info().rss / 1e6
    except psutil.NoSuchProcess:
        return []
    return [{"life": run.lives, "step": run.step(), "controller_mb": round(rss, 1)}]


def perform(
    run: Run, minutes: float, chance: random.Random, most_s: float, names: Sequence[str], each: bool
) -> dict[str, Any]:
    """Faults of ``names``, from the first steps on; each with its seconds until the next steps.

    ``each``: every one once, in their order; else at random, for so many minutes.
    """
    faults: list[dict[str, Any]] = []
    memory: list[dict[str, float]] = []
    run.start()
    recover(run)
    began = time.monotonic()
    while len(faults) < len(names) if each else not faults or time.monotonic() - began < 60 * minutes:
        time.sleep(chance.uniform(1.0, most_s))
        if run.exit_code is not None:  # of the last fault, after the steps that were waited for
            recover(run)
        name = names[len(faults)] if each else chance.choice(names)
        step = run.step()
        memory += controller_memory(run)
        found = FAULTS[name](run, chance) if run.exit_code is None else None
        if found is None:
            if each:
                raise SystemExit(f"{name}: there is nobody to do it to")
            continue
        log.info("%.0f s, step %d: %s (%s)", time.monotonic() - began, step, name, found)
        seconds, starts = recover(run, ended=name in ENDS_THE_RUN)
        faults.append({"fault": name, "step": step, "recovered_s": round(seconds, 1), "starts": starts})
    memory += controller_memory(run)
    # To its end: asked to stop where it stands, it goes on from there for a few steps.
    with contextlib.suppress(psutil.NoSuchProcess):
        run.controller.send_signal(signal.SIGINT)
    run.wait(RECOVERY_TIMEOUT_S)
    run.start(f"run.steps={run.step() + LAST_STEPS}")
    if (code := run.wait(RECOVERY_TIMEOUT_S)) != 0:
        raise SystemExit(f"left alone, the run ended with exit code {code}, after:\n{run.tail()}")
    return {"faults": faults, "controller_memory": memory}


def table(faults: Sequence[dict[str, Any]]) -> str:
    by_name: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for fault in faults:
        by_name[fault["fault"]].append(fault)
    lines = [
        "| fault | times | started again | seconds: median | most |",
        "| --- " * 5 + "|",
    ]
    for name, found in sorted(by_name.items()):
        seconds = sorted(fault["recovered_s"] for fault in found)
        restarted = sum(fault["starts"] > 0 for fault in found)
        lines.append(
            f"| {name} | {len(found)} | {restarted} | {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f} |"
        )
    return "\n".join(lines)


def memory_over_the_longest_life(entries: Sequence[dict[str, Any]]) -> str:
    """Of the controller: each of its processes starts anew."""
    lives: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        lives[entry["life"]].append(entry)
    longest = max(lives.values(), key=lambda life: life[-1]["step"] - life[0]["step"])
    first, last = longest[0], longest[-1]
    return (
        f"Memory of the controller in its longest life: {first['controller_mb']:.0f} MB at step "
        f"{first['step']}, {last['controller_mb']:.0f} MB at step {last['step']}."
    )


def page(report: dict[str, Any], config: str) -> str:
    machine = report["machine"]
    return "\n".join(
        [
            "# Random faults on a real run",
            "",
            f"`python benchmarks/chaos.py {report['asked']}`, over",
            f"`configs/{config}`, {machine['processor']}, {machine['cores']} cores.",
            "",
            f"{len(report['faults'])} faults, {report['lives']} starts, {report['steps']} steps, "
            f"{report['ordinals']} prompts: {report['lost']} lost, {report['repeated']} repeated, "
            f"{report['failed']:g} failed; largest lag {report['lag_max']:g} of at most {report['bound']}; "
            f"{report['processes_left']} processes left.",
            memory_over_the_longest_life(report["controller_memory"]),
            "",
            "Seconds are from the fault (for what is stopped, from when it goes on) until two more steps",
            "were done; where the run ended, a new start is in them, with all its imports.",
            "",
            table(report["faults"]),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=20.0, help="longest time between two faults")
    parser.add_argument("--only", nargs="+", choices=tuple(FAULTS), default=tuple(FAULTS), metavar="FAULT")
    parser.add_argument("--each", action="store_true", help="each of them once, and none after that")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--page", type=Path, help="write what came of it here, as Markdown")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    out = asked.out.resolve()
    if (out / NAME).exists():
        raise SystemExit(f"{out / NAME} exists: remove it, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    run = Run(asked.config, out, asked.overrides)
    try:
        report = perform(run, asked.minutes, random.Random(asked.seed), asked.most_s, asked.only, asked.each)
        report |= {
            "machine": describe_machine(),
            "minutes": asked.minutes,
            "seed": asked.seed,
            "asked": "--each" if asked.each else f"--minutes {asked.minutes:g} --seed {asked.seed}",
            "lives": run.lives,
        }
        report |= verify(run, asked.config, asked.overrides)
    finally:
        for process in run.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    (out / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")
    text = page(report, asked.config.name)
    sys.stdout.write(text)
    if asked.page is not None:
        asked.page.write_text(text)


if __name__ == "__main__":
    main()
