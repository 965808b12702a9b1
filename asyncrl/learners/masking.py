"""What is too old for an update: refused, or masked out of it (``schedule.at_bound: mask``).

``types.unmasked`` does to the counts of a meta what this does to the tokens, so that the divisors of
a step, made from metas, are those of the tokens that it trains.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.errors import StalenessError
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.types import token_lag


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


def check_staleness(share: RankStep, max_staleness: int) -> None:
    """Raises StalenessError for a trained token that is older, or of a version that does not exist yet."""
    for sample in share.samples:
        trajectory = sample.trajectory
        for version in set(trajectory.versions[trajectory.loss_mask].tolist()):
            lag = token_lag(share.version, version)
            if not 0 <= lag <= max_staleness:
                raise StalenessError(
                    f"sample {trajectory.sample} of ordinal {sample.ordinal} has a trained token of "
                    f"version {version}, lag {lag} in the update of version {share.version}, expected "
                    f"0 to schedule.max_staleness = {max_staleness}"
                )
