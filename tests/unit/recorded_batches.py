"""Seeded batches that look like those of a run: uneven lengths, groups, ages, tool tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.names import PREFERENCE_NAMES
from asyncrl.algorithms.pairs import pair_signs
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.learners.layout import Layout
from asyncrl.learners.packing import plan_step
from asyncrl.types import Batch, BatchItem, Group, GroupMeta, Trajectory

VOCABULARY = 32
MAX_AGE = 2


def record_batch(version: int, seed: int = 0, groups: int = 4, group_size: int = 4) -> list[Group]:
    """The groups of one update: 5 to 12 prompt tokens, 1 to 24 answer tokens, ages 0 to 2."""
    rng = np.random.default_rng([seed, version])
    return [
        Group(
            ordinal=version * groups + g,
            uid=f"train-{version * groups + g}",
            start_version=max(version - MAX_AGE, 0),
            trajectories=tuple(_trajectory(rng, sample, version) for sample in range(group_size)),
        )
        for g in range(groups)
    ]


def one_prompt_a_group(groups: list[Group]) -> list[Group]:
    """As in a run; one answer of the first has a prompt of its own, as where a history was rewritten."""
    made = []
    for g, group in enumerate(groups):
        first, *others = group.trajectories
        kept = others[-1:] if g == 0 else []
        same = [replace(t, prompt_ids=first.prompt_ids) for t in others[: len(others) - len(kept)]]
        made.append(replace(group, trajectories=(first, *same, *kept)))
    return made


def _trajectory(rng: np.random.Generator, sample: int, version: int) -> Trajectory:
    length = int(rng.integers(1, 25))
    oldest = max(version - int(rng.integers(0, MAX_AGE + 1)), 0)
    # A push in the middle: the versions of an answer never fall.
    versions = np.sort(rng.integers(oldest, version + 1, length)).astype(np.int32)
    mask = rng.random(length) < 0.9
    mask[-1] = True
    return Trajectory(
        sample=sample,
        attempt=0,
        prompt_ids=rng.integers(0, VOCABULARY, rng.integers(5, 13)).astype(np.int32),
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        logprobs=(-np.log(VOCABULARY) + 0.5 * rng.standard_normal(length)).astype(np.float32),
        versions=versions,
        reward=float(rng.integers(0, 2)),
        finish_reason="stop",
    )


def batch_of(groups: Sequence[Group], version: int, advantage: str = "grpo") -> Batch:
    """As the controller would hand it to a learner, payloads left out."""
    items = []
    for group in groups:
        meta = GroupMeta(
            ordinal=group.ordinal,
            uid=group.uid,
            start_version=group.start_version,
            trajectories=tuple(t.meta() for t in group.trajectories),
            checksum=0,
            nbytes=0,
        )
        lengths = [t.loss_tokens for t in meta.trajectories]
        items.append(BatchItem(meta, group, group_advantages(advantage, meta.rewards, lengths)))
    return Batch(version, tuple(items))


def shares(
    groups: Sequence[Group],
    version: int,
    ranks: int,
    micro_batch_tokens: int,
    advantage: str = "grpo",
    mini_batches: int = 1,
    layout: Layout = "padded",
) -> list[RankStep]:
    """What each rank is asked to train."""
    batch = batch_of(groups, version, advantage)
    return [
        RankStep(
            version=version,
            samples=tuple(
                TrainSample(batch.items[i].meta.ordinal, trajectory, advantage)
                for i in plan.items
                for trajectory, advantage in zip(
                    batch.items[i].payload.trajectories, batch.items[i].advantages, strict=True
                )
            ),
            micro_batches=plan.micro_batches,
            loss_tokens=plan.loss_tokens,
            sequences=plan.sequences,
            mini_batches=plan.mini_batches,
        )
        for plan in plan_step(batch, ranks, micro_batch_tokens, mini_batches, layout)
    ]


def with_values(share: RankStep) -> RankStep:
    """The share as a run with a critic has it: a sample's values depend on the sample alone."""
    samples = []
    for sample in share.samples:
        rng = np.random.default_rng([sample.ordinal, sample.trajectory.sample])
        values = rng.standard_normal(len(sample.trajectory.token_ids)).astype(np.float32)
        samples.append(replace(sample, values=np.where(sample.trajectory.loss_mask, values, np.nan)))
    return replace(share, samples=tuple(samples))


def gae_by_definition(sample: TrainSample, gamma: float, lam: float) -> np.ndarray:
    """sum over k of (gamma lam)^k delta(t + k) for each trained token t alone, in float64: (trained,)."""
    assert sample.values is not None
    values = sample.values[sample.trajectory.loss_mask].astype(np.float64)
    following = np.append(values[1:], 0.0)
    rewards = np.zeros(len(values))
    rewards[-1:] = sample.advantage
    deltas = rewards + gamma * following - values
    return np.array(
        [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    )


KL_COEF = 0.7
"""Large, so that what the KL adds to a gradient is no rounding error."""


def with_reference(share: RankStep, algorithm: Mapping[str, Any]) -> RankStep:
    """The share as a run with a reference has it: a sample's log-probs depend on the sample alone."""

    def referred(sample: TrainSample) -> TrainSample:
        t = sample.trajectory
        rng = np.random.default_rng([sample.ordinal, t.sample])
        noise = 0.3 * rng.standard_normal(len(t.token_ids))
        return replace(sample, reference=np.where(t.loss_mask, t.logprobs + noise, 0.0).astype(np.float32))

    samples = [referred(sample) for sample in share.samples]
    if algorithm.get("loss") in PREFERENCE_NAMES:
        signs: list[float] = []
        for _, members in groupby(samples, key=lambda sample: sample.ordinal):
            group = [sample.trajectory for sample in members]
            signs += pair_signs([t.reward for t in group], [int(t.loss_mask.sum()) for t in group])
        samples = [replace(s, advantage=sign) for s, sign in zip(samples, signs, strict=True)]
    return replace(share, samples=tuple(samples), kl_coef=KL_COEF)
