"""The scripted generator keeps the Protocol's promises, in virtual time."""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import GeneratorError
from asyncrl.generators.base import Generator
from asyncrl.generators.scripted import (
    Failure,
    ScriptedGenerator,
    constant_length,
    log_normal_length,
    scripted_length,
)
from asyncrl.types import Completion, DrawKey, GenerationRequest, SamplingParams
from asyncrl.weight_sync.base import PushGroupSpec

SPEC = PushGroupSpec("127.0.0.1", 1, "push0", 1, 2, "gloo", 1 << 20, 5.0, ())


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of waiting for it; counts the timers that fired."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now = 0.0
        self.fired = 0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
            self.fired += 1
        super()._run_once()


def virtually(scenario: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def main() -> Any:
            return await scenario()

        return runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def request(i: int, new: int = 1000, attempt: int = 0) -> GenerationRequest:
    return GenerationRequest(f"r{i}.{attempt}", (1, 2, 3), SamplingParams(new), DrawKey(0, i, 0, attempt))


async def timed(generator: Generator, asked: GenerationRequest) -> tuple[Completion, float]:
    return await generator.generate(asked), now()


def test_slots_are_filled_in_order_of_arrival_and_each_token_takes_its_time():
    async def scenario():
        generator = ScriptedGenerator(
            slots=2, length=scripted_length({(0, 0): 5, (1, 0): 10}, default=4), token_s=0.5, start_s=1.0
        )
        await generator.start()
        results = await asyncio.gather(*(timed(generator, request(i)) for i in range(4)))
        assert [end for _, end in results] == pytest.approx([3.5, 6.0, 5.5, 7.5])
        assert [len(got.token_ids) for got, _ in results] == [5, 10, 4, 4]
        assert all(len(got.logprobs) == len(got.versions) == len(got.token_ids) for got, _ in results)
        statistics = generator.statistics()
        assert (statistics.tokens, statistics.running, statistics.waiting) == (23, 0, 0)
        assert statistics.busy_s == pytest.approx(6.5)
        assert statistics.slot_s == pytest.approx(23 * 0.5)

    virtually(scenario)


def test_prefill_and_scripted_durations():
    async def scenario():
        generator = ScriptedGenerator(
            length=constant_length(10),
            first_token_s=2.0,
            token_s=0.1,
            duration_s=lambda asked: 5.0 + asked.key.ordinal,
        )
        await generator.start()
        results = await asyncio.gather(*(timed(generator, request(i)) for i in range(2)))
        assert [end for _, end in results] == pytest.approx([7.0, 8.0])

    virtually(scenario)


def test_speed_can_depend_on_how_many_run():
    async def scenario():
        generator = ScriptedGenerator(
            length=scripted_length({(0, 0): 10}, default=20), token_s=1.0, slowdown=lambda running: running
        )
        await generator.start()
        first, second = await asyncio.gather(*(timed(generator, request(i)) for i in range(2)))
        # Both at half speed for 10 tokens, then the longer one alone.
        assert (first[1], second[1]) == pytest.approx((20.0, 30.0))

    virtually(scenario)


def test_a_prompt_stops_all_sequences_for_as_long_as_it_takes():
    async def scenario():
        generator = ScriptedGenerator(
            slots=2,
            length=scripted_length({(0, 0): 10}, default=4),
            token_s=0.5,
            prefill_s=lambda asked: 0.1 * len(asked.prompt_ids),
        )
        await generator.start()
        results = await asyncio.gather(*(timed(generator, request(i)) for i in range(3)))
        # Two prompts of 0.3 s first, and the third's when the second answer has made room for it.
        assert [end for _, end in results] == pytest.approx(
            [0.6 + 0.3 + 10 * 0.5, 0.6 + 2.0, 2.6 + 0.3 + 2.0]
        )
        assert generator.statistics().busy_s == pytest.approx(5.9)

    virtually(scenario)


def test_the_time_with_all_slots_taken_and_its_tokens_are_counted_apart():
    async def scenario():
        generator = ScriptedGenerator(
            slots=2, length=scripted_length({(0, 0): 10}, default=4), token_s=0.5, start_s=1.0
        )
        await generator.start()
        results = await asyncio.gather(*(generator.generate(request(i)) for i in range(2)))
        statistics = generator.statistics()
        assert (statistics.full_s, statistics.full_tokens) == pytest.approx((2.0, 8))
        assert (statistics.busy_s, statistics.tokens) == pytest.approx((5.0, 14))
        assert [got.stay for got in results] == [pytest.approx((1.0, 6.0)), pytest.approx((1.0, 3.0))]

    virtually(scenario)


def test_max_new_tokens_cuts_an_answer():
    async def scenario():
        generator = ScriptedGenerator(length=constant_length(10))
        await generator.start()
        cut, whole = await asyncio.gather(
            generator.generate(request(0, new=9)), generator.generate(request(1, new=10))
        )
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 9)
        assert (whole.finish_reason, len(whole.token_ids)) == ("stop", 10)

    virtually(scenario)


def test_log_normal_lengths_follow_the_key():
    length = log_normal_length(median=50, sigma=1.0)
    lengths = [length(request(i)) for i in range(4000)]
    assert lengths == [length(request(i)) for i in range(4000)]
    assert np.median(lengths) == pytest.approx(50, rel=0.07)
    assert np.std(np.log(lengths)) == pytest.approx(1.0, rel=0.07)
    assert min(lengths) >= 1
    assert length(request(0, attempt=1)) != length(request(0))


def test_a_swap_in_flight_splits_versions_where_it_happened():
    async def scenario():
        generator = ScriptedGenerator(
            length=constant_length(10), token_s=1.0, receive_s=2.25, swap_s=0.5, join_s=0.25
        )
        await generator.start()
        task = asyncio.create_task(timed(generator, request(0)))
        await generator.join(SPEC)
        await generator.receive(3)
        assert generator.live_version == 0
        echo = await generator.swap(3, in_flight=True, kv="keep")  # after 2 tokens, at work 2.5
        assert (echo.version, echo.pause_s, echo.receive_s) == (3, 0.5, 2.25)
        assert echo.checksum == "scripted-3"
        await asyncio.sleep(3.0)  # until work 5.5
        await generator.receive(4)
        await generator.swap(4, in_flight=True, kv="keep")  # at work 7.75
        got, end = await task
        assert got.versions.tolist() == [0, 0, 3, 3, 3, 3, 3, 4, 4, 4]
        assert end == pytest.approx(11.0)
        statistics = generator.statistics()
        assert statistics.paused_s == pytest.approx(1.0)
        assert (statistics.swaps, statistics.live_version) == (2, 4)

    virtually(scenario)


def test_a_token_sampled_at_the_instant_of_a_swap_is_of_the_old_version():
    async def scenario():
        generator = ScriptedGenerator(length=constant_length(4), token_s=1.0, receive_s=2.0)
        await generator.start()
        task = asyncio.create_task(generator.generate(request(0)))
        await generator.receive(1)
        await generator.swap(1, in_flight=True, kv="keep")
        assert (await task).versions.tolist() == [0, 0, 1, 1]

    virtually(scenario)


def test_a_swap_that_is_not_in_flight_waits_for_the_running_and_admits_none():
    async def scenario():
        generator = ScriptedGenerator(
            slots=2, length=scripted_length({(0, 0): 3, (1, 0): 8}, default=5), token_s=1.0, swap_s=1.0
        )
        await generator.start()
        tasks = [asyncio.create_task(timed(generator, request(i))) for i in range(3)]
        await generator.receive(1)
        await generator.swap(1, in_flight=False, kv="keep")
        assert now() == pytest.approx(9.0)
        results = await asyncio.gather(*tasks)
        assert [end for _, end in results] == pytest.approx([3.0, 8.0, 14.0])
        assert [set(got.versions.tolist()) for got, _ in results] == [{0}, {0}, {1}]

    virtually(scenario)


def test_recomputing_pauses_longer_when_something_runs():
    async def scenario():
        generator = ScriptedGenerator(length=constant_length(4), swap_s=0.5, recompute_s=2.0)
        await generator.start()
        await generator.receive(1)
        assert (await generator.swap(1, in_flight=True, kv="recompute")).pause_s == 0.5
        task = asyncio.create_task(generator.generate(request(0)))
        await generator.receive(2)
        assert (await generator.swap(2, in_flight=True, kv="recompute")).pause_s == 2.5
        await task

    virtually(scenario)


def test_pause_stops_the_clock_of_tokens():
    async def scenario():
        generator = ScriptedGenerator(length=constant_length(4), token_s=1.0)
        await generator.start()
        task = asyncio.create_task(timed(generator, request(0)))
        await asyncio.sleep(1.5)
        await generator.pause()
        await generator.pause()
        late = asyncio.create_task(timed(generator, request(1)))
        await asyncio.sleep(10.0)
        assert (generator.statistics().tokens, generator.statistics().waiting) == (1, 1)
        await generator.resume()
        assert [end for _, end in await asyncio.gather(task, late)] == pytest.approx([14.0, 15.5])

    virtually(scenario)


def test_abort_and_cancellation_give_the_slot_back():
    async def scenario():
        generator = ScriptedGenerator(slots=1, length=constant_length(100), token_s=1.0)
        await generator.start()
        tasks = [asyncio.create_task(timed(generator, request(i))) for i in range(4)]
        await asyncio.sleep(5.5)
        await generator.abort(request(2).uid)  # waiting
        await generator.abort(request(0).uid)  # running
        await generator.abort("unknown")
        await asyncio.sleep(10.0)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [(got.finish_reason, len(got.token_ids)) for got, _ in (results[0], results[2])] == [
            ("abort", 5),
            ("abort", 0),
        ]
        assert isinstance(results[1], asyncio.CancelledError)
        assert results[3][1] == pytest.approx(5.5 + 10.0 + 100.0)
        statistics = generator.statistics()
        assert (statistics.running, statistics.waiting, statistics.outstanding_tokens) == (0, 0, 0)

    virtually(scenario)


def test_scripted_failures():
    async def scenario():
        failures = {
            0: Failure("raise", after_tokens=2),
            1: Failure("hang"),
            3: Failure("die", after_tokens=8),
        }
        generator = ScriptedGenerator(
            slots=4,
            length=constant_length(5),
            token_s=1.0,
            failure=lambda asked: failures.get(asked.key.ordinal),
        )
        await generator.start()
        raised = asyncio.create_task(timed(generator, request(0)))
        hung = asyncio.create_task(timed(generator, request(1)))
        good = asyncio.create_task(timed(generator, request(2)))
        with pytest.raises(GeneratorError, match=r"r0\.0 was scripted to fail"):
            await raised
        assert now() == pytest.approx(2.0)
        assert (await good)[1] == pytest.approx(5.0)
        await asyncio.sleep(1000.0)
        assert not hung.done()
        with pytest.raises(GeneratorError, match=r"died in request r3\.0"):
            await generator.generate(request(3))
        with pytest.raises(GeneratorError, match="died"):
            await hung
        for call in (generator.generate(request(9)), generator.pause(), generator.receive(1)):
            with pytest.raises(GeneratorError, match="died"):
                await call
        assert generator.statistics().running == 0

    virtually(scenario)


def test_misuse_is_an_error():
    async def scenario():
        generator = ScriptedGenerator()
        with pytest.raises(GeneratorError, match="not started"):
            await generator.generate(request(0))
        await generator.start()
        task = asyncio.create_task(generator.generate(request(0)))
        await asyncio.sleep(0)
        with pytest.raises(GeneratorError, match="already running"):
            await generator.generate(request(0))
        with pytest.raises(GeneratorError, match="swap to version 1, but None was received"):
            await generator.swap(1, in_flight=True, kv="keep")
        await task
        await generator.close()
        with pytest.raises(GeneratorError, match="closed"):
            await generator.generate(request(1))

    virtually(scenario)


def test_a_request_costs_a_constant_number_of_events():
    async def scenario():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        generator: Generator = ScriptedGenerator(slots=16, length=log_normal_length(2000, 1.0), token_s=0.01)
        await generator.start()
        before = loop.fired
        answers = await asyncio.gather(*(generator.generate(request(i, new=10**6)) for i in range(200)))
        assert sum(len(got.token_ids) for got in answers) > 200_000
        assert loop.fired - before <= 2 * 200

    virtually(scenario)
