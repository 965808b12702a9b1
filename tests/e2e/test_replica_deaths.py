"""Generator processes that are killed and stopped under a real run: it goes on, and gets them back."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from .runs import Run, assert_sound, start

NOTICED_WITHIN_S = 5.0
BACK_WITHIN_S = 120.0
LOOK_EVERY_S = 0.05


def wait_until(run: Run, what: str, limit_s: float, condition: Callable[[], bool]) -> float:
    """Seconds until ``condition`` held."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert run.process.poll() is None, f"the run ended before {what}:\n{run.text}"
        assert waited < limit_s, f"not within {limit_s} s: {what}\n{run.text}"
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


def generators(run: Run) -> list[psutil.Process]:
    """The generator actors, oldest first; Ray names a process after its actor."""
    actors = [p for p in run.processes() if "GeneratorActor" in " ".join(p.cmdline())]
    return sorted(actors, key=lambda process: process.create_time())


def deaths(run: Run) -> int:
    return len(re.findall(r"generator \d is out with", run.text))


def computed_s(process: psutil.Process) -> float:
    """CPU seconds of the process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def strike(run: Run, victims: list[psutil.Process], number: signal.Signals, expected: int) -> None:
    """Send the signal to the victims: noticed in time, and all replicas live again in time."""
    lines = len(run.metrics)
    wait_until(run, "another step", 60, lambda: len(run.metrics) > lines)
    before = [computed_s(victim) for victim in victims]
    wait_until(
        run,
        "the victims in the middle of something",
        60,
        lambda: all(computed_s(v) - b > 0.3 for v, b in zip(victims, before, strict=True)),
    )
    for victim in victims:
        victim.send_signal(number)
    wait_until(run, f"{number.name} noticed", NOTICED_WITHIN_S, lambda: deaths(run) >= expected)

    def whole_again() -> bool:
        last = run.metrics[-1]
        return last["generator/restarts"] >= expected and last["generator/replicas_live"] == 2

    took = wait_until(run, f"all live again after {number.name}", BACK_WITHIN_S, whole_again)
    assert took < BACK_WITHIN_S
    assert not any(victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE for victim in victims)


def test_killed_and_stopped_generators_are_noticed_and_come_back_at_the_live_version(tmp_path: Path) -> None:
    run = start(
        tmp_path,
        "run.steps=100000",
        "generators.replicas=2",
        "data.eval=null",
        "eval.every=0",
        # Groups that run for many snapshots, so that there is something to go on from at each death.
        "rollout.max_new_tokens=200",
        "learner.micro_batch_tokens=512",
        "generators.health_every_s=0.1",
        name="deaths",
    )
    try:
        run.wait_for_steps(3)
        assert len(generators(run)) == 2
        strike(run, generators(run)[:1], signal.SIGKILL, expected=1)
        strike(run, generators(run)[:1], signal.SIGSTOP, expected=2)
        # None is left then, and no update will come to be pushed: the learner has to push in between.
        strike(run, generators(run), signal.SIGKILL, expected=4)
        lines = len(run.metrics)
        wait_until(run, "three more steps", 60, lambda: len(run.metrics) >= lines + 3)
        run.interrupt(signal.SIGINT)
        assert run.wait(60) == 130, run.text
        run.assert_nothing_left(within_s=15)
    finally:
        for process in run.processes():
            process.kill()
    assert_sound(run, max_staleness=2, capacity=4)
    last = run.metrics[-1]
    assert last["generator/restarts"] == 4
    assert last["ledger/failed"] == 0, "a prompt was blamed for a death that we caused"
    assert last["generator/continued_tokens"] > 0, "all that the dead had sampled was sampled again"
    back = [int(version) for version in re.findall(r"generator \d is back, at version (\d+)", run.text)]
    assert len(back) == 4
    assert back == sorted(back)
    assert back[0] >= 3, f"let in at versions {back}, not at the live one"
