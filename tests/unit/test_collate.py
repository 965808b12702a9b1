from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection
from asyncrl.errors import InvariantError, StalenessError
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.learners.collate import collate
from asyncrl.learners.masking import check_staleness
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.types import Trajectory

CPU = torch.device("cpu")
PAD_AND_EOS = 0


def sample(prompt: list[int], tokens: list[int], mask: list[bool], versions: list[int]) -> TrainSample:
    trajectory = Trajectory(
        sample=3,
        attempt=0,
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.array(mask),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions=np.array(versions, np.int32),
        reward=1.0,
        finish_reason="stop",
    )
    return TrainSample(ordinal=17, trajectory=trajectory, advantage=0.5)


def test_positions_name_the_inputs_that_predict_trained_tokens() -> None:
    long = sample([5, 6], [7, 8, PAD_AND_EOS], [True, False, True], [4, 3, 4])
    short = sample([9], [PAD_AND_EOS], [True], [3])
    batch = collate([long, short], version=4, device=CPU)

    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 0, 0, 0]]
    # Token 7 from input 1, EOS from input 3, and the second row's EOS from its input 0.
    assert batch.positions.tolist() == [1, 3, 4]
    # EOS is trained, though it equals the padding.
    assert batch.targets.tolist() == [7, PAD_AND_EOS, PAD_AND_EOS]
    assert batch.mask.tolist() == [[True, False, True], [True, False, False]]
    assert batch.behaviour.tolist() == [[-1, -2, -3], [-1, 0, 0]]
    assert batch.advantages.tolist() == [[0.5], [0.5]]
    # The old token of the first row is not trained.
    assert batch.fresh.tolist() == [[True], [False]]


def test_samples_that_share_a_row_start_at_position_zero() -> None:
    long = sample([5, 6], [7, 8, PAD_AND_EOS, 9], [True, False, True, True], [4, 4, 4, 4])
    short, single = sample([9], [3], [True], [3]), sample([4, 4], [2], [True], [4])
    batch = collate([long, single, short], version=4, device=CPU, layout="packed")

    assert batch.input_ids.tolist() == [[5, 6, 7, 8, PAD_AND_EOS], [4, 4, 0, 9, 0]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch.positions.tolist() == [1, 3, 4, 6, 8]
    assert batch.targets.tolist() == [7, PAD_AND_EOS, 9, 2, 3]
    # What is known of an answer stays in a row of its own.
    padded = collate([long, single, short], version=4, device=CPU)
    for name in ("targets", "mask", "behaviour", "advantages", "fresh", "ages"):
        assert getattr(batch, name).equal(getattr(padded, name)), name
    whole = collate([long, single, short], version=4, device=CPU, layout="one_row")
    assert whole.input_ids.tolist() == [[5, 6, 7, 8, PAD_AND_EOS, 0, 4, 4, 0, 9]]


def test_a_dummy_has_one_row_and_nothing_to_train() -> None:
    batch = collate([], version=0, device=CPU)
    assert batch.input_ids.shape == (1, 1)
    assert batch.positions.numel() == batch.targets.numel() == 0
    assert not batch.mask.any()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvariantError, match="sample 3 of ordinal 17 has a prompt of 0 tokens"):
        collate([sample([], [1], [True], [0])], version=0, device=CPU)


def learner(max_staleness: int) -> PolicyRank:
    return PolicyRank(
        model=ModelSection(path="unused"),
        learner=LearnerSection(device="cpu"),
        algorithm=AlgorithmSection(),
        model_path="unused",
        temperature=1.0,
        max_staleness=max_staleness,
        total_steps=10,
        master=("127.0.0.1", 0),
    )


@pytest.mark.parametrize(("oldest", "lag"), [(2, 3), (6, -1)])
def test_a_token_outside_the_bound_never_gets_past_the_learner(oldest: int, lag: int) -> None:
    stale = sample([1], [2, 3], [True, True], [5, oldest])
    share = RankStep(version=5, samples=(stale,), micro_batches=((0,),), loss_tokens=2, sequences=1)
    with pytest.raises(StalenessError) as caught:
        learner(max_staleness=2).step(share)
    for fact in ("sample 3", "ordinal 17", f"version {oldest}", f"lag {lag}", "max_staleness = 2"):
        assert fact in str(caught.value)


def test_a_stale_token_that_is_not_trained_is_none_of_its_business() -> None:
    stale = sample([1], [2, 3], [True, False], [5, 0])
    share = RankStep(version=5, samples=(stale,), micro_batches=((0,),), loss_tokens=1, sequences=1)
    check_staleness(share, 2)
    masked = replace(stale, trajectory=replace(stale.trajectory, loss_mask=np.array([False, True])))
    with pytest.raises(StalenessError):
        check_staleness(replace(share, samples=(masked,)), 2)
