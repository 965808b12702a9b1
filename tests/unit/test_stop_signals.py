"""The two signals, whoever listens: a good end at the first, an end at the second."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import psutil
import pytest

from asyncrl.stop_signals import Interrupted, StopSignals

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_a_signal_that_nobody_listens_to_interrupts_what_is_under_way(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(number)
        with pytest.raises(Interrupted):
            signals.check()
    assert caught.value.exit_code == 128 + number
    assert signals.received is number
    assert signal.getsignal(number) is before


@BOTH
def test_it_gets_out_of_an_event_loop_that_does_not_listen(number: signal.Signals) -> None:
    """That of rewards that are tried before a run. Loops keep other exceptions of callbacks to themselves."""

    async def busy() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        await asyncio.sleep(60)

    with pytest.raises(Interrupted), StopSignals():
        asyncio.run(busy())


@BOTH
def test_who_listens_is_told_in_the_loop_and_goes_on(number: signal.Signals) -> None:
    told: list[str] = []

    async def listen(signals: StopSignals) -> str:
        done = asyncio.Event()

        def stop(name: str) -> None:
            told.append(name)
            done.set()

        with signals.listened_to(stop):
            signal.raise_signal(number)
            await asyncio.wait_for(done.wait(), 60)
        return "a good end"

    with StopSignals() as signals:
        assert asyncio.run(listen(signals)) == "a good end"
        signals.received = None
        with pytest.raises(Interrupted):  # afterwards nobody listens again
            signal.raise_signal(number)
    assert told == [number.name]


def test_a_library_that_takes_a_signal_for_itself_gives_it_back() -> None:
    """As ``ray.init`` does, whose handler of SIGTERM exits with 15."""

    def library() -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    with StopSignals() as signals:
        with pytest.raises(Interrupted) as caught, signals.kept():
            library()
        assert caught.value.exit_code == 143
        assert signals.received is signal.SIGTERM
        signals.received = None
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="1"), signals.kept():
            sys.exit(1)


def test_who_listens_too_late_is_told_at_once() -> None:
    told: list[str] = []

    async def listen(signals: StopSignals) -> None:
        with signals.listened_to(told.append):
            assert told == ["SIGTERM"]

    with StopSignals() as signals:
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        asyncio.run(listen(signals))


TWICE = """
import signal, subprocess
from asyncrl.stop_signals import Interrupted, StopSignals
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
with StopSignals():
    try:
        signal.raise_signal(signal.SIGTERM)
    except Interrupted:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("put away", flush=True)
"""


def test_the_second_ends_the_process_now_and_what_it_started() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGINT
    child, *rest = done.stdout.split("\n")
    assert rest == [""], "what was under way was not ended in good order"
    deadline = time.monotonic() + 10  # a killed process takes a moment to be gone
    while is_alive(int(child)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
