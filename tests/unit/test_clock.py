"""The virtual clock: asyncio works on it unchanged, time jumps, and a hang is an error."""

import asyncio
import threading
import time

import pytest

from asyncrl.errors import DeadlockError
from asyncrl.simulate.clock import VirtualClockLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_passes_at_once_and_exactly():
    async def main() -> list[float]:
        times = [now()]
        for delay in (0.25, 86_400.0, 0.5):
            await asyncio.sleep(delay)
            times.append(now())
        return times

    begin = time.monotonic()
    assert run_virtual(main()) == [0.0, 0.25, 86_400.25, 86_400.75]
    assert time.monotonic() - begin < 5.0


def test_timers_fire_in_order_of_time_and_see_their_own():
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def wait(name: str, delay: float) -> None:
            await asyncio.sleep(delay)
            seen.append((name, now()))

        async with asyncio.TaskGroup() as tasks:
            for name, delay in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("zero", 0.0)):
                tasks.create_task(wait(name, delay))
        return seen

    assert run_virtual(main()) == [("zero", 0.0), ("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_timeouts_take_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100.0), 7.0)
        assert await asyncio.wait_for(asyncio.sleep(1.0, "done"), 7.0) == "done"
        async with asyncio.timeout_at(now() + 1.0):
            await asyncio.sleep(0.5)
        return now()

    assert run_virtual(main()) == 13.5


def test_a_cancelled_timer_does_not_hold_time_up():
    async def main() -> float:
        handle = asyncio.get_running_loop().call_later(1.0, lambda: None)
        handle.cancel()
        await asyncio.sleep(2.0)
        return now()

    assert run_virtual(main()) == 2.0


def test_a_failing_task_cancels_its_group():
    async def main() -> None:
        async def fail() -> None:
            await asyncio.sleep(3.0)
            raise ValueError("at 3")

        sleepers = []

        async def both() -> None:
            async with asyncio.TaskGroup() as tasks:
                sleepers.append(tasks.create_task(asyncio.sleep(1e9)))
                tasks.create_task(fail())

        with pytest.raises(BaseExceptionGroup) as caught:
            await both()
        assert [str(error) for error in caught.value.exceptions] == ["at 3"]
        assert sleepers[0].cancelled()
        assert now() == 3.0

    run_virtual(main())


def test_late_in_time_timers_still_come_due():
    """Where one float apart is more than asyncio's clock resolution of a nanosecond."""

    async def main() -> float:
        await asyncio.sleep(1e12)
        for _ in range(10):
            await asyncio.sleep(0.3)
        return now()

    assert run_virtual(main()) == pytest.approx(1e12 + 3.0, abs=0.01)


async def wait_for_ever(event: asyncio.Event) -> None:
    await event.wait()


def test_a_deadlock_names_every_pending_task():
    async def main() -> None:
        await asyncio.sleep(2.5)
        async with asyncio.TaskGroup() as tasks:
            for name in ("learner", "pump"):
                tasks.create_task(wait_for_ever(asyncio.Event()), name=name)

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main())
    message = str(caught.value)
    assert "at virtual time 2.5 s" in message
    assert "3 tasks are pending" in message
    for part in ("learner (wait_for_ever at test_clock.py:", "pump (wait_for_ever", "main at test_clock.py:"):
        assert part in message


def test_after_a_deadlock_the_tasks_are_cancelled_and_cleaned_up():
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(now())

    with pytest.raises(DeadlockError):
        run_virtual(main())
    assert cleaned == [0.0]


def test_two_tasks_that_wait_for_each_other_are_a_deadlock():
    async def main() -> None:
        left, right = asyncio.Lock(), asyncio.Lock()

        async def lock(first: asyncio.Lock, second: asyncio.Lock) -> None:
            async with first:
                await asyncio.sleep(1.0)
                async with second:
                    pass

        await asyncio.gather(lock(left, right), lock(right, left))

    with pytest.raises(DeadlockError, match="at virtual time 1 s"):
        run_virtual(main())


def test_threads_work_and_time_stands_still_meanwhile():
    release = threading.Event()

    async def main() -> tuple[float, int]:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(asyncio.to_thread(lambda: release.wait(30.0) and threading.get_ident()))
            sleeper = tasks.create_task(asyncio.sleep(10.0))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(release.set)
            ident = await work
            before = now()
            assert not sleeper.done()
        return before, ident

    before, ident = run_virtual(main())
    assert before == 0.0
    assert ident != threading.get_ident()


def test_sockets_work_where_no_timer_is_set():
    async def main() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.readline()).upper())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            answered = await reader.readline()
            writer.close()
            return answered

    assert run_virtual(main()) == b"HELLO\n"


def test_equal_programs_see_equal_orders():
    async def main() -> list[int]:
        order: list[int] = []

        async def worker(index: int) -> None:
            for turn in range(20):
                await asyncio.sleep(((index * 7919 + turn * 104729) % 13) / 8)
                order.append(index)

        async with asyncio.TaskGroup() as tasks:
            for index in range(20):
                tasks.create_task(worker(index))
        return order

    assert run_virtual(main()) == run_virtual(main())


def test_many_timers_are_cheap():
    """A real clock would take 1,500 s; the bound is generous because machines are shared."""

    async def main() -> float:
        async def worker(index: int) -> None:
            for _ in range(500):
                await asyncio.sleep(3.0 + index / 1024)

        async with asyncio.TaskGroup() as tasks:
            for index in range(100):
                tasks.create_task(worker(index))
        return now()

    begin = time.process_time()
    assert run_virtual(main()) == pytest.approx(500 * (3.0 + 99 / 1024))
    assert time.process_time() - begin < 10.0


def test_the_loop_fits_a_runner():
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        assert runner.run(asyncio.sleep(5.0, "first")) == "first"
        assert runner.run(asyncio.sleep(5.0, "second")) == "second"
        assert runner.get_loop().time() == 10.0
