"""The canary over a real engine: it catches what checksums cannot see."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import CanaryError, RolloutError
from asyncrl.generators.base import KVAfterSwap
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.pool import GeneratorPool
from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.generators.torch_generator import TorchGenerator
from asyncrl.learners.base import LearnerInfo, PushReport
from asyncrl.rollout import RolloutHost
from asyncrl.types import Float32Array
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, WeightEcho
from asyncrl.weight_sync.broadcast import PushGroup, create_store
from asyncrl.weight_sync.canary import DEFAULT_TOLERANCE, Canary
from asyncrl.weight_sync.publish import WeightPublisher

from .controller_harness import ScriptedScorer
from .test_torch_engine import running, stage
from .tiny_models import VOCAB, full_logprobs, request, tiny_gpt2, tiny_llama, tiny_qwen2

TOKENS = tuple((7 * i + i * i) % VOCAB for i in range(40))
DEADLINE_S = 30.0
Corruption = Callable[[Any], None]


# ------------------------------------------------------------------ score


def truth(model: Any, tokens: Sequence[int] = TOKENS) -> Float32Array:
    found: Float32Array = full_logprobs(model, tokens[:1], tokens[1:]).numpy()
    return found


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
async def test_scores_are_those_of_a_full_pass_while_requests_run_and_after_a_swap(make):
    old, new = make(0), make(1)
    async with running(copy.deepcopy(old)) as engine:
        asked = [asyncio.create_task(engine.generate(request(f"r{i}", new=40, ordinal=i))) for i in range(6)]
        np.testing.assert_allclose(await engine.score(TOKENS), truth(old), atol=1e-5)
        stage(engine, new)
        await engine.swap_staged(1, in_flight=True, kv="keep")
        np.testing.assert_allclose(await engine.score(TOKENS), truth(new), atol=1e-5)
        await engine.pause()
        assert len(await engine.score(TOKENS[:2])) == 1
        await engine.resume()
        await asyncio.gather(*asked)
        statistics = engine.statistics()
    assert np.abs(truth(old) - truth(new)).max() > 0.1
    assert statistics.tokens == 240
    assert (statistics.running, statistics.outstanding_tokens) == (0, 0)


async def test_a_score_leaves_the_running_sequences_their_bits():
    async def answers(score: bool) -> list[Any]:
        async with running(tiny_llama(), deterministic=True) as engine:
            asked = [asyncio.create_task(engine.generate(request(f"r{i}", ordinal=i))) for i in range(4)]
            for _ in range(5 if score else 0):
                await engine.score(TOKENS)
            return [(got.token_ids.tolist(), got.logprobs.tobytes()) for got in await asyncio.gather(*asked)]

    assert await answers(True) == await answers(False)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((1,), "score 1 tokens, expected 2 to 64"),
        ((1,) * 65, "score 65 tokens, expected 2 to 64"),
        ((1, VOCAB), "from 1 to 48, but the model's vocabulary has 48"),
    ],
)
async def test_what_cannot_be_scored_is_refused_and_the_engine_goes_on(tokens, words):
    async with running(tiny_llama()) as engine:
        with pytest.raises(RolloutError, match=words):
            await engine.score(tokens)
        assert len((await engine.generate(request("after"))).token_ids) == 12


# ------------------------------------------------------------------ a whole push


class ModelLearner:
    """The parts of a ``Learner`` that a push needs, over a model and a real process group."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.store = create_store("127.0.0.1", DEADLINE_S)
        self._group: PushGroup | None = None

    @property
    def info(self) -> LearnerInfo:
        manifest = tuple(TensorSpec(n, tuple(p.shape), "float32") for n, p in self.model.named_parameters())
        return LearnerInfo(manifest, parameters=0, store=("127.0.0.1", self.store.port))

    async def open_push_group(self, spec: PushGroupSpec) -> None:
        self._group = await asyncio.to_thread(PushGroup, spec, self.store)

    async def push(self, version: int) -> PushReport:
        parameters = dict(self.model.named_parameters())

        def gather(bucket: Sequence[TensorSpec]) -> torch.Tensor:
            return torch.cat([parameters[spec.name].detach().reshape(-1) for spec in bucket])

        assert self._group is not None
        checksum, nbytes = await asyncio.to_thread(self._group.send, version, gather)
        return PushReport(version, checksum, nbytes, 0.0)

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        return truth(self.model, token_ids)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


class CorruptedGenerator(TorchGenerator):
    """Swaps as it should and echoes the right checksum; then something happens to the live weights."""

    def __init__(self, engine: TorchEngine, corruption: Corruption) -> None:
        super().__init__(engine)
        self._tampered = engine
        self._corruption = corruption

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        echo = await super().swap(version, in_flight=in_flight, kv=kv)
        await self._tampered.pause()
        with torch.no_grad():
            self._corruption(self._tampered.model)
        await self._tampered.resume()
        return echo


def nothing(model: Any) -> None:
    """No corruption."""


def perturb(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight[3, 5] += 1.0


def exchange_layers(model: Any) -> None:
    first, second = (layer.self_attn.o_proj.weight for layer in model.model.layers)
    first.data, second.data = second.data, first.data


def leave_a_layer_behind(model: Any) -> None:
    stale = tiny_llama(0).model.layers[0].self_attn.k_proj.weight
    model.model.layers[0].self_attn.k_proj.weight.copy_(stale)


def transpose_a_square(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.copy_(weight.T.clone())


def round_to_float8(model: Any) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.float8_e4m3fn))


async def publish_to(corruption: Corruption) -> dict[str, float]:
    """Push one version to a sound replica and to one that ``corruption`` happens to."""
    learner: Any = ModelLearner(tiny_llama(1))
    engines = [TorchEngine(tiny_llama(0), slots=2, max_sequence=64, device="cpu") for _ in range(2)]
    generators = [TorchGenerator(engines[0]), CorruptedGenerator(engines[1], corruption)]
    pool = GeneratorPool(
        [
            LocalReplica(f"generator {i}", RolloutHost(each, ScriptedScorer(), lambda ids: ""))
            for i, each in enumerate(generators)
        ]
    )
    canary = Canary(TOKENS, every=1, tolerance=DEFAULT_TOLERANCE["float32"], overlap=False)
    publisher = WeightPublisher(
        learner,
        pool,
        backend="gloo",
        bucket_bytes=1 << 14,
        timeout_s=DEADLINE_S,
        in_flight=True,
        kv="keep",
        canary=canary,
    )
    await pool.start()
    try:
        await publisher.open(learner.info)
        await publisher.publish(1)
        return publisher.take_metrics()
    finally:
        await pool.close()
        learner.close()


async def test_a_sound_replica_agrees_to_rounding():
    assert (await publish_to(nothing))["weight_sync/canary_diff_max"] < 1e-5


@pytest.mark.parametrize(
    "corruption",
    [perturb, exchange_layers, leave_a_layer_behind, transpose_a_square, round_to_float8],
)
async def test_weights_that_went_wrong_after_the_checksum_are_caught(corruption):
    with pytest.raises(CanaryError, match=r"^generator 1 at version 1: log-probs of the canary"):
        await publish_to(corruption)
