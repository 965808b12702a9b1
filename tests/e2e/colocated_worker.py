"""What the colocation tests run in a rank's process: a real rank, and an engine on its parameters."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.generators.shared import SharedTorchGenerator
from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.live_bytes import live_bytes, storages
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams
from tests.e2e.deepspeed_worker import SCORED, Rank, learner, share_of

ANSWER = 40
"""Tokens of each answer: more than are sampled in one turn."""
WAIT_S = 200.0


def take_turns(at: Rank, updates: int) -> dict[str, Any]:
    """One turn each for every update, with answers that are unfinished all along.

    Where the parameters lie before and after each update; live bytes by owner in every phase; how far
    engine and learner differ after each wake; and the versions of each answer.
    """
    with learner(at) as (rank, _):
        return asyncio.run(_take_turns(at, rank, updates))


async def _take_turns(at: Rank, rank: PolicyRank, updates: int) -> dict[str, Any]:
    shared = rank.share()
    engine = TorchEngine(shared.model, slots=4, max_sequence=ANSWER + 8, device=shared.device, asleep=True)
    generator = SharedTorchGenerator(engine, shared)
    found: dict[str, Any] = {"addresses": [], "echoes": [], "differences": [], "bytes": []}

    def sample(phase: str) -> None:
        found["bytes"].append((phase, live_bytes(rank._engine, engine)))

    await generator.start()
    sample("start")
    await generator.swap(0, in_flight=True, kv="recompute")
    asked = [
        GenerationRequest(f"r{i}", (i + 1, 3), SamplingParams(ANSWER, ignore_eos=True), DrawKey(0, i, 0))
        for i in range(4)
    ]
    answers = [asyncio.create_task(generator.generate(request)) for request in asked]
    apply = rank._engine.update

    def update(lr: float) -> tuple[float, bool]:
        sample("in update")
        return apply(lr)

    rank._engine.update = update  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(WAIT_S):
            for version in range(updates):
                await generator.wake()
                differences = np.abs(await generator.score(SCORED) - rank.score(SCORED))
                found["differences"].append(float(differences.max()))
                await a_token_each(generator)
                sample("rollout")
                await generator.sleep()
                sample("before update")
                found["addresses"].append(shared.addresses())
                assert not (await asyncio.to_thread(rank.step, share_of(at, version))).skipped
                found["addresses"].append(shared.learner_addresses())
                sample("after update")
                echo = await generator.swap(version + 1, in_flight=True, kv="recompute")
                found["echoes"].append(echo)
                sample("push")
            await generator.wake()
            found["versions"] = [(await answer).versions.tolist() for answer in answers]
    finally:
        await generator.close()
    found["total"] = total_bytes()
    return found


async def a_token_each(generator: SharedTorchGenerator) -> None:
    """Return once all four answers have grown."""
    before = generator.statistics().tokens
    while generator.statistics().tokens < before + 4:
        await generator.score(SCORED[:2])  # comes after the token that is being sampled


def total_bytes() -> int:
    """Of all tensors of floating point that Python knows of."""
    gc.collect()
    with torch.no_grad():
        known = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return sum(storages(t for t in known if t.is_floating_point() and t.device.type == "cpu").values())
