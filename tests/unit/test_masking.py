"""What is too old is masked out of the loss, and counted as the learner counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import StalenessError
from asyncrl.learners.base import RankStep
from asyncrl.learners.collate import collate
from asyncrl.learners.masking import mask_stale
from asyncrl.learners.packing import plan_step
from asyncrl.metrics import batch_metrics
from asyncrl.types import Batch, FinishReason, GroupMeta, TrajectoryMeta, group_lag, unmasked
from tests.unit.recorded_batches import MAX_AGE, batch_of, record_batch, shares
from tests.unit.test_collate import learner, sample

VERSION = 4


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), bound=st.integers(0, MAX_AGE), ranks=st.integers(1, 3))
def test_metas_count_exactly_the_tokens_that_are_left(seed: int, bound: int, ranks: int) -> None:
    groups = record_batch(VERSION, seed=seed)
    batch = batch_of(groups, VERSION)
    masked = [mask_stale(share, bound) for share in shares(groups, VERSION, ranks, 10**4)]
    metas = [unmasked(VERSION, bound, item.meta) for item in batch.items]
    items = tuple(replace(item, meta=meta) for item, meta in zip(batch.items, metas, strict=True))
    (plan, *_) = plan_step(Batch(VERSION, items), ranks, 10**4)

    left = [s.trajectory.loss_mask.sum() for share in masked for s in share.samples]
    assert plan.loss_tokens == sum(left)
    assert plan.sequences == sum(n > 0 for n in left)
    lags = [
        VERSION - version
        for share in masked
        for s in share.samples
        for version in s.trajectory.versions[s.trajectory.loss_mask]
    ]
    assert max((lag for meta in metas if (lag := group_lag(VERSION, meta)) is not None), default=None) == max(
        lags, default=None
    )
    assert max(lags, default=0) <= bound
    for before, after in zip(batch.items, metas, strict=True):
        assert (before.meta.rewards, before.meta.checksum) == (after.rewards, after.checksum)
        assert [t.response_tokens for t in before.meta.trajectories] == [
            t.response_tokens for t in after.trajectories
        ]


def test_only_old_tokens_lose_their_loss_and_nothing_else_changes() -> None:
    old = sample([1], [2, 3, 4, 5], [True, True, False, True], [0, 3, 0, 5])
    young = sample([1], [2, 3], [True, False], [4, 0])
    share = RankStep(version=5, samples=(old, young), micro_batches=((0, 1),), loss_tokens=3, sequences=2)
    masked = mask_stale(share, 2)
    assert masked.samples[0].trajectory.loss_mask.tolist() == [False, True, False, True]
    assert masked.samples[0].masked
    assert masked.samples[0].advantage == old.advantage
    assert masked.samples[1] is young, "only an untrained token was old"
    assert old.trajectory.loss_mask.tolist() == [True, True, False, True], "changed in place"


def test_a_row_with_masked_tokens_is_not_of_one_version() -> None:
    """What is left of it was sampled on keys and values of other weights than the learner's."""
    mixed = sample([1], [2, 3], [True, True], [0, 5])
    share = RankStep(version=5, samples=(mixed,), micro_batches=((0,),), loss_tokens=1, sequences=1)
    batch = collate(mask_stale(share, 2).samples, 5, torch.device("cpu"))
    assert batch.mask.tolist() == [[False, True]]
    assert batch.ages.tolist() == [[-1, 0]]
    assert not batch.fresh.any()


def test_a_version_that_does_not_exist_yet_is_refused_in_mask_mode_too() -> None:
    masking = learner(max_staleness=2)
    masking._mask_stale = True
    future = sample([1], [2, 3], [True, True], [0, 6])
    share = RankStep(version=5, samples=(future,), micro_batches=((0,),), loss_tokens=1, sequences=1)
    with pytest.raises(StalenessError, match="version 6, lag -1"):
        masking.step(share)


def test_what_lies_within_the_bound_is_left_as_it_is() -> None:
    meta = batch_of(record_batch(VERSION), VERSION).items[0].meta
    assert unmasked(VERSION, MAX_AGE, meta) is meta


def test_token_mean_weighs_every_trained_token_the_same() -> None:
    def meta(ordinal: int, *trained: tuple[int, int]) -> GroupMeta:
        trajectory = TrajectoryMeta(0, 1, 100, 1.0, "stop", trained)
        return GroupMeta(ordinal, f"train-{ordinal}", 0, (trajectory,), 0, 0)

    metrics = batch_metrics(5, [meta(0, (3, 10), (4, 20)), meta(1, (5, 70))])
    assert metrics["staleness/mean"] == 1.0
    assert metrics["staleness/token_mean"] == pytest.approx((10 * 2 + 20) / 100)


def test_lengths_are_of_what_the_model_wrote_and_a_clipped_answer_ended_by_its_length() -> None:
    """A tool's tokens are no part of a response's length, and padding is no part of anything."""

    def meta(ordinal: int, finish_reason: FinishReason, tokens: int, foreign: int) -> GroupMeta:
        trained = ((5, tokens - foreign),)
        trajectory = TrajectoryMeta(0, 1, tokens, 1.0, finish_reason, trained, environment_tokens=foreign)
        return GroupMeta(ordinal, f"train-{ordinal}", 0, (trajectory,), 0, 0)

    metrics = batch_metrics(5, [meta(0, "stop", 100, 60), meta(1, "length", 20, 0)])
    assert metrics["response_length/mean"] == 30.0
    assert metrics["response_length/max"] == 40.0
    assert metrics["response_length/clip_ratio"] == 0.5


def test_a_trajectory_counts_its_trained_tokens_by_version() -> None:
    trajectory = sample([1], [2, 3, 4, 5], [True, False, True, True], [2, 2, 2, 4]).trajectory
    meta = trajectory.meta()
    assert meta.trained == ((2, 2), (4, 1))
    assert (meta.loss_tokens, meta.oldest_version, meta.newest_version) == (3, 2, 4)
    nothing = replace(trajectory, loss_mask=np.zeros(4, np.bool_)).meta()
    assert (nothing.loss_tokens, nothing.oldest_version, nothing.newest_version) == (0, None, None)
