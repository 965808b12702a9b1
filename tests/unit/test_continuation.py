"""Answers that the embedded engine goes on with from a prefix, against those that nothing interrupted."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import RolloutError
from asyncrl.types import Completion, GenerationRequest

from .tiny_models import ForwardPasses, Letters, request, running, tiny_gpt2, tiny_llama, tiny_qwen2


def cut(answer: Completion, length: int, version: int = 7) -> Completion:
    """The beginning of an answer, as if an engine at ``version`` had sampled it and died then."""
    versions = np.full(length, version, np.int32)
    return Completion(answer.token_ids[:length], answer.logprobs[:length] - 0.125, versions, "abort")


def assert_continues(got: Completion, prefix: Completion, whole: Completion, version: int = 0) -> None:
    """The prefix as it is, then what the undisturbed answer goes on with, newly stamped."""
    seam = len(prefix.token_ids)
    assert got.token_ids.tolist() == whole.token_ids.tolist()
    assert got.logprobs[:seam].tobytes() == prefix.logprobs.tobytes()
    np.testing.assert_allclose(got.logprobs[seam:], whole.logprobs[seam:], atol=1e-5, rtol=0)
    assert got.versions.tolist() == [7] * seam + [version] * (len(whole.token_ids) - seam)
    assert got.finish_reason == whole.finish_reason


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
async def test_a_continued_answer_is_the_undisturbed_one(make):
    asked = request("whole", [5, 2, 9], new=30, temperature=0.8)
    async with running(make()) as engine:
        whole = await engine.generate(asked)
        before = engine.statistics().tokens
        # Twice from each prefix, and beside a fresh sibling: shared contexts must be told apart.
        prefixes = [cut(whole, length) for length in (1, 1, 13, 13, 29)]
        sibling = asyncio.create_task(engine.generate(replace(asked, uid="sibling")))
        answers = await asyncio.gather(
            *(engine.generate(replace(asked, uid=f"r{i}", prefix=p)) for i, p in enumerate(prefixes))
        )
        assert (await sibling).token_ids.tolist() == whole.token_ids.tolist()
        statistics = engine.statistics()
    for got, prefix in zip(answers, prefixes, strict=True):
        assert_continues(got, prefix, whole)
    assert statistics.tokens - before == 30 + sum(30 - len(p.token_ids) for p in prefixes)
    assert statistics.outstanding_tokens == 0


async def test_eos_ends_a_continued_answer_too():
    async with running(tiny_llama(eos_token_id=[3, 11])) as engine:
        asked = [request(f"r{i}", [i], new=60, ordinal=i) for i in range(12)]
        answers = await asyncio.gather(*(engine.generate(each) for each in asked))
        stopped = [(r, a) for r, a in zip(asked, answers, strict=True) if a.finish_reason == "stop"]
        stopped = [(r, a) for r, a in stopped if len(a.token_ids) > 1]
        assert len(stopped) >= 4
        for each, whole in stopped:
            for length in {1, len(whole.token_ids) - 1}:
                prefix = cut(whole, length)
                assert_continues(await engine.generate(replace(each, prefix=prefix)), prefix, whole)
        assert engine.statistics().outstanding_tokens == 0


async def test_a_stop_string_across_the_seam_ends_a_continued_answer():
    asked = request("free", [1, 2], new=40)
    async with running(tiny_llama(), tokenizer=Letters()) as engine:
        free = await engine.generate(asked)
        stop = Letters().decode(free.token_ids[20:24].tolist(), skip_special_tokens=False)
        stopping = request("stops", [1, 2], new=40, stop=(stop,))
        whole = await engine.generate(stopping)
        assert whole.finish_reason == "stop"
        end = len(whole.token_ids)
        for length in range(end - 4, end):  # before the string, and inside it
            prefix = cut(whole, length)
            assert_continues(await engine.generate(replace(stopping, prefix=prefix)), prefix, whole)


async def test_what_runs_can_be_had_and_continued_from_at_any_moment():
    asked = [request(f"r{i}", [i, 4], new=40 + i, ordinal=i) for i in range(3)]
    async with running(tiny_llama(), slots=2) as engine:
        whole = await asyncio.gather(*(engine.generate(each) for each in asked))
        passes = ForwardPasses(engine.model)
        tasks = [asyncio.create_task(engine.generate(each)) for each in asked]
        await passes.more(6)
        first = await engine.partials()
        assert list(first) == ["r0", "r1"], "the third waits for a slot, and has nothing"
        await passes.more(6)
        later = await engine.partials()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await engine.partials() == {}
        # The second life of what was first taken is interrupted in its turn.
        again = [replace(each, prefix=first.get(each.uid)) for each in asked]
        tasks = [asyncio.create_task(engine.generate(each)) for each in again]
        await passes.more(4)
        second = await engine.partials()
        answers = await asyncio.gather(*tasks)
    for partials in (first, later, second):
        for i, partial in ((i, partials[f"r{i}"]) for i in range(2)):
            length = len(partial.token_ids)
            assert partial.finish_reason == "abort"
            assert 0 < length < 40
            assert partial.token_ids.tolist() == whole[i].token_ids[:length].tolist()
            np.testing.assert_allclose(partial.logprobs, whole[i].logprobs[:length], atol=1e-5)
    for name in ("r0", "r1"):
        assert len(first[name].token_ids) < len(later[name].token_ids)
        assert len(first[name].token_ids) < len(second[name].token_ids)
    for got, undisturbed in zip(answers, whole, strict=True):
        assert got.token_ids.tolist() == undisturbed.token_ids.tolist()


async def test_a_continuation_that_is_aborted_while_it_waits_has_its_prefix():
    async with running(tiny_llama(), slots=1) as engine:
        whole = await engine.generate(request("whole", new=30))
        running_one = asyncio.create_task(engine.generate(request("runs", new=60)))
        waiting = request("waits", new=30)
        waiting = replace(waiting, prefix=cut(whole, 10))
        task = asyncio.create_task(engine.generate(waiting))
        await ForwardPasses(engine.model).more(2)
        await engine.abort("waits")
        got = await task
        assert (got.token_ids.tolist(), got.finish_reason) == (whole.token_ids[:10].tolist(), "abort")
        await running_one
        assert engine.statistics().outstanding_tokens == 0


async def test_a_prefix_that_leaves_nothing_to_sample_is_refused():
    async with running(tiny_llama()) as engine:
        whole = await engine.generate(request("whole", new=8))
        asked: GenerationRequest = replace(request("r", new=8), prefix=cut(whole, 8))
        with pytest.raises(
            RolloutError, match="brings 8 tokens of its answer along, but max_new_tokens is 8"
        ):
            await engine.generate(asked)


async def test_an_engine_that_promises_bits_offers_nothing_to_continue_from():
    async with running(tiny_llama(), deterministic=True) as engine:
        task = asyncio.create_task(engine.generate(request("r", new=50)))
        await ForwardPasses(engine.model).more(3)
        assert await engine.partials() == {}
        await task
