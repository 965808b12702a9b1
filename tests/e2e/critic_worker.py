"""What the critic's tests run in its ranks' processes; started by ``deepspeed_worker.run_ranks``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.config import AlgorithmSection, CriticSection, ModelSection
from asyncrl.learners.base import RankStep, StepResult
from asyncrl.learners.critic import CriticRank
from asyncrl.types import Float32Array, Group
from tests.e2e.deepspeed_worker import Arrays, Rank, full_gradient, optimizer_state, to_arrays
from tests.unit.recorded_batches import MAX_AGE, record_batch, shares

GAMMA, LAMBDA = 0.95, 0.9
VALUE_CLIP = 0.1
VERSION = 2
Key = tuple[int, int]
"""Ordinal and sample."""


@contextmanager
def critic(at: Rank) -> Iterator[CriticRank]:
    rank = CriticRank(
        model=ModelSection.model_validate({"path": str(at.folder), "dtype": at.dtype}),
        # Small micro-batches for ``annotate``, so that a group takes several.
        critic=CriticSection(
            backend=at.backend,
            ranks=at.ranks,
            zero_stage=at.stage,
            lr=at.lr,
            device="cpu",
            value_clip=VALUE_CLIP,
            micro_batch_tokens=64,
        ),
        algorithm=AlgorithmSection.model_validate({"preset": "ppo", "gamma": GAMMA, "gae_lambda": LAMBDA}),
        model_path=str(at.folder),
        max_staleness=MAX_AGE,
        rank=at.rank,
        world_size=at.ranks,
        master=("127.0.0.1", at.port),
        deterministic=True,
    )
    rank.start()
    try:
        yield rank
    finally:
        rank.close()


def values_of(rank: CriticRank, groups: list[Group]) -> dict[Key, Float32Array]:
    """By sample, its values: all ranks ask for all groups in one order, as ZeRO-3 needs it."""
    found = {}
    for group in groups:
        columns = rank.annotate(group).arrays["values"]
        for trajectory, values in zip(group.trajectories, columns, strict=True):
            found[group.ordinal, trajectory.sample] = values
    return found


def share_of(at: Rank, values: dict[Key, Float32Array], tokens: int, version: int = VERSION) -> RankStep:
    share = shares(record_batch(version), version, at.ranks, tokens, "gae")[at.rank]
    samples = [replace(s, values=values[s.ordinal, s.trajectory.sample]) for s in share.samples]
    return replace(share, samples=tuple(samples))


def moved(values: dict[Key, Float32Array]) -> dict[Key, Float32Array]:
    """Values of a critic that has learned since: now and then by more than the clip."""
    return {
        key: (array + 0.1 * np.random.default_rng(key).standard_normal(len(array))).astype(np.float32)
        for key, array in values.items()
    }


def critic_gradients(at: Rank, splits: list[int]) -> dict[str, Any]:
    """Train a little, so that the head is not zero; then values, and the gradient for each split."""
    with critic(at) as rank:
        start = values_of(rank, record_batch(0))
        results = [rank.step(share_of(at, start, 80, version=0)) for _ in range(3)]
        assert not any(result.skipped for result in results)
        values = values_of(rank, record_batch(VERSION))
        parameters = dict(rank._engine.module.named_parameters())
        weights = to_arrays(dict(rank.named_parameters()))
        gradients: list[tuple[int, Arrays]] = []
        for tokens in splits:
            share = share_of(at, moved(values), tokens)
            rank.accumulate(share)
            full = {name: full_gradient(p) for name, p in parameters.items()}
            gradients.append((len(share.micro_batches), to_arrays(full)))
            # Takes the gradient away; a learning rate of 0 leaves the weights as they are.
            rank._engine.update(0.0)
        return {
            "start": start,
            "results": results,
            "values": values,
            "weights": weights,
            "gradients": gradients,
        }


def critic_skips(at: Rank) -> tuple[list[StepResult], list[dict[str, Any]]]:
    """Good, then with a value that is not finite on the last rank alone, then good: weights after each."""
    with critic(at) as rank:
        values = values_of(rank, record_batch(0))
        results, states = [], []
        for bad in (False, True, False):
            share = share_of(at, values, 80, version=0)
            if bad and at.rank == at.ranks - 1:
                first, *rest = share.samples
                spoiled = np.full_like(values[first.ordinal, first.trajectory.sample], np.nan)
                share = replace(share, samples=(replace(first, values=spoiled), *rest))
            results.append(rank.step(share))
            state = dict(rank.named_parameters())
            optimizer = {n: t for n, t in optimizer_state(rank) if t.is_floating_point()}
            states.append({**to_arrays(state), **to_arrays(optimizer)})
        return results, states
