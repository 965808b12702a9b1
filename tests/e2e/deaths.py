"""Striking the generators of a real run: what a test of deaths needs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from .runs import Run, assert_sound, start

NOTICED_WITHIN_S = 5.0
BACK_WITHIN_S = 120.0 * (2 if "PYTEST_XDIST_WORKER" in os.environ else 1)
"""Beside another test there is half the machine for an engine's start."""
LOOK_EVERY_S = 0.05


@contextmanager
def run_to_strike(
    folder: Path,
    *overrides: str,
    name: str,
    first_steps: int = 3,
    more_steps: int,
    gone_within_s: float,
    killed: bool = False,
) -> Iterator[Run]:
    """A run without end of two replicas, handed over after some steps for its generators to be struck.

    It has to go on after that, to stop when asked to, and to blame no prompt for what was done to it.
    ``killed``: it is not asked, and has to take all of its processes with it all the same.
    """
    endless = ("run.steps=100000", "generators.replicas=2", "data.eval=null", "eval.every=0")
    run = start(folder, *endless, *overrides, name=name)
    try:
        run.wait_for_steps(first_steps)
        assert len(generators(run)) == 2
        yield run
        lines = len(run.metrics)
        wait_until(run, f"{more_steps} more steps", 60, lambda: len(run.metrics) >= lines + more_steps)
        if killed:
            # Ray's agents are known to outlive it: one that is stopped does for sure.
            slow = [process for process in run.processes() if "Agent" in " ".join(process.cmdline())]
            assert slow
            for agent in slow:
                agent.suspend()
        run.interrupt(signal.SIGKILL if killed else signal.SIGINT)
        assert run.wait(60) == (-signal.SIGKILL if killed else 130), run.text
        run.assert_nothing_left(within_s=gone_within_s)
    finally:
        for process in run.processes():
            process.kill()
    if not killed:
        assert "SIGINT" in run.text
        assert_sound(run, max_staleness=2, capacity=4)
    assert run.metrics[-1]["ledger/failed"] == 0, "a prompt was blamed for a death that we caused"


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


def kill(victim: psutil.Process) -> None:
    victim.send_signal(signal.SIGKILL)


def stop(victim: psutil.Process) -> None:
    victim.send_signal(signal.SIGSTOP)


def run_out_of_memory(victim: psutil.Process) -> None:
    """It gets no more: what it allocates next fails."""
    victim.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))


def strike(
    run: Run,
    victims: list[psutil.Process],
    blow: Callable[[psutil.Process], None],
    expected: int,
    *,
    busy_s: float = 0.0,
) -> None:
    """Do ``blow`` to the victims, once each has computed for ``busy_s`` after a step.

    It has to be noticed in time, and all replicas have to be live again in time.
    """
    lines = len(run.metrics)
    wait_until(run, "another step", 60, lambda: len(run.metrics) > lines)
    before = [computed_s(victim) for victim in victims]
    wait_until(
        run,
        "the victims in the middle of something",
        60,
        lambda: all(computed_s(v) - b >= busy_s for v, b in zip(victims, before, strict=True)),
    )
    for victim in victims:
        blow(victim)
    wait_until(run, f"{blow.__name__} noticed", NOTICED_WITHIN_S, lambda: deaths(run) >= expected)

    def whole_again() -> bool:
        last = run.metrics[-1]
        return last["generator/restarts"] >= expected and last["generator/replicas_live"] == 2

    took = wait_until(run, f"all live again after {blow.__name__}", BACK_WITHIN_S, whole_again)
    assert took < BACK_WITHIN_S
    assert not any(victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE for victim in victims)


def stand_still(run: Run, seconds: float) -> None:
    """Stop every process of the run for a while, and see it go on with nobody given up."""
    before, lines = deaths(run), len(run.metrics)
    stopped = run.processes()
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(seconds)
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    wait_until(run, "two more steps", 60, lambda: len(run.metrics) >= lines + 2)
    assert deaths(run) == before, run.text
