"""With fixed shapes, a trajectory's bits depend on its request and the weights alone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.types import Completion, GenerationRequest

from .tiny_models import request, tiny_gpt2, tiny_llama

DEADLINE_S = 120.0
SLOTS = 64

TARGETS = {
    "short prompt": request("target", [4, 7, 1], new=30, ordinal=1000, temperature=0.9),
    "one token": request("target", [4], new=20, ordinal=1001),
    "long prompt": request("target", [i * 5 % 48 for i in range(35)], new=12, ordinal=1002, top_p=0.9),
}


def others(count: int, seed: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8},
    ]
    return [
        request(
            f"other{seed}.{i}",
            rng.integers(0, 48, rng.integers(1, 40)).tolist(),
            new=int(rng.integers(1, 24)),
            ordinal=i,
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


def bits(completion: Completion) -> tuple[bytes, bytes]:
    return completion.token_ids.tobytes(), completion.logprobs.tobytes()


async def run(
    model: Any, target: GenerationRequest, before: list[GenerationRequest], after: list[GenerationRequest]
) -> tuple[bytes, bytes]:
    """The target's bits when it is submitted behind ``before`` and while ``after`` arrive one by one."""
    engine = TorchEngine(model, slots=SLOTS, max_sequence=64, device="cpu", deterministic=True)
    await engine.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            loop, ticks = asyncio.get_running_loop(), asyncio.Queue[None]()

            def tick(*_: object) -> None:
                loop.call_soon_threadsafe(ticks.put_nowait, None)

            hook = engine.model.register_forward_hook(tick)
            tasks = [asyncio.create_task(engine.generate(each)) for each in (*before, target)]
            for number, each in enumerate(after):
                if number % 3 == 0:  # three at every token
                    await ticks.get()
                tasks.append(asyncio.create_task(engine.generate(each)))
            hook.remove()
            answers = await asyncio.gather(*tasks)
            return bits(answers[len(before)])
    finally:
        await engine.close()


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_llama(vocab_size=65), tiny_gpt2])
@pytest.mark.parametrize("name", TARGETS)
async def test_alone_among_others_and_in_another_slot_the_bits_are_equal(make, name):
    target, model, crowd = TARGETS[name], make(), others(63, seed=1)
    alone = await run(model, target, [], [])
    assert len(alone[0]) == 4 * target.sampling.max_new_tokens
    among = await run(model, target, crowd[:20], crowd[20:])  # slot 20, others arriving meanwhile
    assert among == alone
    last = await run(model, target, crowd, [])  # slot 63
    assert last == alone


async def test_with_more_requests_than_slots_a_freed_row_gives_the_same_bits():
    target, model = TARGETS["short prompt"], tiny_llama()
    alone = await run(model, target, [], [])
    assert await run(model, target, others(100, seed=2), others(10, seed=3)) == alone


async def test_a_shared_prompt_gives_the_bits_of_one_prefilled_alone():
    target, model = TARGETS["long prompt"], tiny_llama()
    alone = await run(model, target, [], [])
    mates = [request(f"m{i}", target.prompt_ids, new=9, ordinal=1002, sample=i + 1) for i in range(5)]
    assert await run(model, target, mates, []) == alone


async def test_the_promise_is_the_modes_and_not_the_models():
    """The comparison can fail: the fast mode's shapes follow the load, and so do its bits."""
    target, model = TARGETS["long prompt"], tiny_llama()

    async def fast(crowd: list[GenerationRequest]) -> tuple[bytes, bytes]:
        engine = TorchEngine(model, slots=SLOTS, max_sequence=64, device="cpu")
        await engine.start()
        try:
            answers = await asyncio.gather(*(engine.generate(each) for each in (target, *crowd)))
            return bits(answers[0])
        finally:
            await engine.close()

    assert (await fast([]))[1] != (await fast(others(63, seed=1)))[1]
