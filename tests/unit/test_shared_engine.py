"""An engine on somebody else's parameters: it sleeps while they change, and then goes on with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import GeneratorError, InvariantError, WeightSyncError
from asyncrl.generators.shared import SharedTorchGenerator
from asyncrl.weight_sync.sharing import SharedModel

from .tiny_models import ForwardPasses, full_logprobs, request, running, tiny_gpt2, tiny_llama, tiny_qwen2

MAKERS = [tiny_llama, tiny_qwen2, tiny_gpt2]


def update(model: Any, to: Any) -> None:
    """What an optimizer does: change the parameters in place."""
    with torch.no_grad():
        for parameter, target in zip(model.parameters(), to.parameters(), strict=True):
            parameter.copy_(target)


@pytest.mark.parametrize("make", MAKERS)
def test_a_shared_model_has_the_parameters_and_nothing_else_in_common(make: Callable[[], Any]) -> None:
    trained = make().train()
    shared = SharedModel(trained)
    theirs, ours = dict(trained.named_parameters()), dict(shared.model.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(theirs[name] is ours[name] for name in theirs)
    assert {id(m) for m in trained.modules()}.isdisjoint(id(m) for m in shared.model.modules())
    shared.model.eval().set_attn_implementation("eager")
    assert trained.training
    assert trained.config._attn_implementation != "eager"
    buffers = {id(buffer) for buffer in trained.buffers()}
    assert buffers.isdisjoint(id(buffer) for buffer in shared.model.buffers())
    # It is trained as if nobody shared it, and what is trained is what the other computes with.
    ids = torch.tensor([[1, 2, 3, 4]])
    trained(input_ids=ids, labels=ids).loss.backward()
    update(trained, make())
    assert shared.addresses() == shared.learner_addresses()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
async def test_answers_go_on_after_sleep_as_if_they_began_under_the_new_weights(
    make: Callable[[int], Any], deterministic: bool
) -> None:
    trained, old, new = make(0), make(0), make(1)
    shared = SharedModel(trained)
    addresses = shared.addresses()
    async with running(shared.model, deterministic=deterministic, asleep=True) as engine:
        assert engine.kv_bytes == 0
        await engine.wake()
        held = engine.kv_bytes
        assert held > 0
        passes = ForwardPasses(engine.model)
        asked = [request(f"r{i}", [5, i, 2], new=30, ordinal=i) for i in range(4)]
        tasks = [asyncio.create_task(engine.generate(each)) for each in asked]
        await passes.more(8)
        asleep = await engine.sleep()
        assert (asleep.sequences, asleep.freed_bytes, engine.kv_bytes) == (4, held, 0)
        sampled = engine.statistics().tokens
        update(trained, new)
        await engine.relabel(3)
        assert engine.live_version == 3
        assert engine.statistics().tokens == sampled, "sampled in its sleep"
        await engine.wake()
        await engine.wake()
        assert engine.kv_bytes == held
        answers = await asyncio.gather(*tasks)
    for each, got in zip(asked, answers, strict=True):
        answer, fresh = got.token_ids.tolist(), got.versions == 3
        assert set(got.versions.tolist()) == {0, 3}
        by_old = full_logprobs(old, each.prompt_ids, answer).numpy()
        by_new = full_logprobs(new, each.prompt_ids, answer).numpy()
        np.testing.assert_allclose(got.logprobs[~fresh], by_old[~fresh], atol=1e-5)
        np.testing.assert_allclose(got.logprobs[fresh], by_new[fresh], atol=1e-5)
    assert shared.addresses() == shared.learner_addresses() == addresses


async def test_a_sleeping_engine_answers_everything_but_samples_nothing() -> None:
    model = tiny_llama()
    async with running(model, slots=2) as engine:
        passes = ForwardPasses(engine.model)
        begun = [asyncio.create_task(engine.generate(request(f"r{i}", [i], new=50))) for i in (1, 2)]
        await passes.more(4)
        await engine.sleep()
        late = asyncio.create_task(engine.generate(request("late", [3], new=5)))
        np.testing.assert_allclose(
            await engine.score([4, 5, 6]), full_logprobs(model, [4], [5, 6]).numpy(), atol=1e-5
        )
        partials = await engine.partials()
        await engine.abort("r1")
        aborted = await begun[0]
        assert aborted.finish_reason == "abort"
        assert aborted.token_ids.tolist() == partials["r1"].token_ids.tolist()
        begun[1].cancel()
        engine.check_health()
        await engine.relabel(1)
        assert (await engine.sleep()).sequences == 0
        await engine.wake()
        assert set((await late).versions.tolist()) == {1}
        statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.outstanding_tokens) == (0, 0, 0)


async def test_weights_are_not_renamed_under_an_engine_that_is_awake() -> None:
    async with running(tiny_llama()) as engine:
        with pytest.raises(GeneratorError, match="while the engine was awake"):
            await engine.relabel(1)


async def test_naming_a_version_takes_no_time_that_grows_with_the_model() -> None:
    """By the processor's time, which others on the machine do not change."""
    trained = tiny_llama(hidden_size=512, intermediate_size=2048, layers=4)
    shared = SharedModel(trained)
    async with running(shared.model, asleep=True) as engine:
        generator = SharedTorchGenerator(engine, shared)
        start = time.process_time()
        for version in range(1, 11):
            await generator.swap(version, in_flight=True, kv="recompute")
        ten_pushes = time.process_time() - start
    start = time.process_time()
    copies = [parameter.detach().clone() for parameter in trained.parameters()]
    one_copy = time.process_time() - start
    assert sum(copy.nbytes for copy in copies) > 60e6
    assert ten_pushes < one_copy


async def test_a_parameter_that_was_replaced_and_not_changed_is_noticed() -> None:
    trained = tiny_llama()
    shared = SharedModel(trained)
    async with running(shared.model, asleep=True) as engine:
        generator = SharedTorchGenerator(engine, shared)
        first = await generator.swap(1, in_flight=True, kv="recompute")
        second = await generator.swap(2, in_flight=True, kv="recompute")
        assert (first.version, second.version) == (1, 2)
        assert first.checksum == second.checksum, "the tensors lie where they lay"
        with pytest.raises(WeightSyncError, match="has the learner's own weights"):
            await generator.receive(3)
        trained.lm_head.weight = torch.nn.Parameter(trained.lm_head.weight.detach().clone())
        with pytest.raises(InvariantError, match="1 of 21 tensors"):
            await generator.swap(3, in_flight=True, kv="recompute")
        assert generator.live_version == 2
