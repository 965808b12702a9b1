"""Masking what is too old out of an update (``schedule.at_bound: mask``).

``types.unmasked`` does to the counts of a meta what this does to the tokens, so that the divisors of
a step, made from metas, are those of the tokens that it trains.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.learners.base import RankStep, TrainSample


def mask_stale(share: RankStep, max_staleness: int) -> RankStep:
    """The share without a loss on tokens with lag > ``max_staleness``; they stay as context.

    Advantages are left alone: they come from whole answers.
    """
    oldest = share.version - max_staleness

    def masked(sample: TrainSample) -> TrainSample:
        trajectory = sample.trajectory
        young = trajectory.versions >= oldest  # (T,)
        loss_mask = np.logical_and(trajectory.loss_mask, young)
        if np.array_equal(loss_mask, trajectory.loss_mask):
            return sample
        return replace(sample, trajectory=replace(trajectory, loss_mask=loss_mask), masked=True)

    return replace(share, samples=tuple(masked(sample) for sample in share.samples))
