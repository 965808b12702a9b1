"""What the colocation tests run in a rank's process: a real rank, and an engine on its parameters."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.generators.shared import SharedTorchGenerator
from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams
from tests.e2e.deepspeed_worker import SCORED, Rank, learner, optimizer_state, share_of

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
    await generator.start()
    await generator.swap(0, in_flight=True, kv="recompute")
    found: dict[str, Any] = {"addresses": [], "echoes": [], "differences": [], "bytes": []}
    asked = [
        GenerationRequest(f"r{i}", (i + 1, 3), SamplingParams(ANSWER, ignore_eos=True), DrawKey(0, i, 0))
        for i in range(4)
    ]
    answers = [asyncio.create_task(generator.generate(request)) for request in asked]
    apply = rank._engine.update

    def update(lr: float) -> tuple[float, bool]:
        found["bytes"].append(("gradients taken", live_bytes(rank, engine)))
        return apply(lr)

    rank._engine.update = update  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(WAIT_S):
            for version in range(updates):
                await generator.wake()
                differences = np.abs(await generator.score(SCORED) - rank.score(SCORED))
                found["differences"].append(float(differences.max()))
                await a_token_each(generator)
                found["bytes"].append(("awake", live_bytes(rank, engine)))
                await generator.sleep()
                found["bytes"].append(("asleep", live_bytes(rank, engine)))
                found["addresses"].append(shared.addresses())
                assert not (await asyncio.to_thread(rank.step, share_of(at, version))).skipped
                found["addresses"].append(shared.learner_addresses())
                found["bytes"].append(("updated", live_bytes(rank, engine)))
                echo = await generator.swap(version + 1, in_flight=True, kv="recompute")
                found["echoes"].append(echo)
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


def live_bytes(rank: PolicyRank, engine: TorchEngine) -> dict[str, int]:
    """Memory by owner. What is a view of another owner's tensor counts there alone."""
    parameters = list(rank._engine.module.parameters())
    optimizer = rank._engine.optimizer
    gradients = [p.grad for p in parameters if p.grad is not None]
    for averaged in getattr(optimizer, "averaged_gradients", {}).values():
        gradients += averaged or []
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        gradients += bucket.buffer
    states = [tensor for _, tensor in optimizer_state(rank)]
    gradients += [tensor.grad for tensor in states if tensor.grad is not None]
    held = storages(parameters)
    assert engine._weights is not None
    staged = engine._weights._staging or {}
    return {
        "parameters": sum(held.values()),
        "gradients": sum(storages(gradients).values()),
        "optimizer": sum(size for place, size in storages(states).items() if place not in held),
        "kv": engine.kv_bytes,
        "staging": sum(storages(staged.values()).values()),
    }


def total_bytes() -> int:
    """Of all tensors of floating point that Python knows of."""
    gc.collect()
    with torch.no_grad():
        known = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    return sum(storages(t for t in known if t.is_floating_point() and t.device.type == "cpu").values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the memory under the tensors, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found
