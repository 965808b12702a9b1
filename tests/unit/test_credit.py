"""Rewards of a step to advantages: normalisation, several objectives, shaping."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.normalisation import Moments
from asyncrl.credit import CreditAssignment
from asyncrl.types import GroupMeta, TrajectoryMeta

from .controller_harness import config
from .test_config import errors

numbers = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), max_size=20)


def group(
    rewards: Sequence[float | dict[str, float]], lengths: Sequence[int] = (), greedy: float | None = None
) -> GroupMeta:
    """Of plain rewards, or of functions' values by name, which are summed up."""

    def answer(sample: int, reward: float | dict[str, float], length: int) -> TrajectoryMeta:
        parts = reward if isinstance(reward, dict) else {"exact_match": reward}
        return TrajectoryMeta(sample, 3, length, sum(parts.values()), "stop", ((0, length),), parts)

    answers = tuple(answer(i, r, lengths[i] if lengths else 5) for i, r in enumerate(rewards))
    baseline = None if greedy is None else answer(len(answers), greedy, 5)
    return GroupMeta(0, "u0", 0, answers, checksum=0, nbytes=0, baseline=baseline)


def credit(*overrides: str) -> CreditAssignment:
    return CreditAssignment(config(*overrides))


@given(st.lists(numbers, max_size=5))
def test_moments_of_parts_are_those_of_all(parts: list[list[float]]) -> None:
    moments = Moments()
    for part in parts:
        moments.add(part)
    values = [v for part in parts for v in part]
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(statistics.fmean(values) if values else 0.0, abs=1e-9)
    assert moments.std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-6)
    assert Moments.restored(json.loads(json.dumps(moments.state()))) == moments


def test_rewards_are_normalised_over_the_step() -> None:
    found = credit("algorithm.reward_normalisation=batch", "algorithm.advantage=dr_grpo").advantages(
        [group([0.0, 10.0]), group([20.0, 30.0])]
    )
    std = statistics.stdev([0.0, 10.0, 20.0, 30.0])
    for advantages in found:
        assert advantages == pytest.approx((-5.0 / std, 5.0 / std), rel=1e-6)


def test_normalised_rewards_of_a_step_do_not_hang_on_their_scale() -> None:
    plain, scaled = (
        credit("algorithm.reward_normalisation=batch", "algorithm.advantage=rloo").advantages(
            [group([factor * r + offset for r in rewards]) for rewards in ([0.0, 1.0, 5.0], [2.0, 2.0, 3.0])]
        )
        for factor, offset in ((1.0, 0.0), (1000.0, -77.0))
    )
    for a, b in zip(plain, scaled, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_running_normalisation_goes_on_from_its_state() -> None:
    settings = ("algorithm.reward_normalisation=running", "algorithm.advantage=reinforce_plus_plus")
    first = [group([0.0, 1.0]), group([5.0, 5.0])]
    second = [group([2.0, 4.0])]
    whole = credit(*settings)
    whole.advantages(first)
    (found,) = whole.advantages(second)
    values = [0.0, 1.0, 5.0, 5.0, 2.0, 4.0]
    mean, std = statistics.fmean(values), statistics.stdev(values)
    assert found == pytest.approx(tuple((v - mean) / std for v in (2.0, 4.0)), rel=1e-5)
    # Killed after the first step, and resumed from what a checkpoint holds of it.
    before, after = credit(*settings), credit(*settings)
    before.advantages(first)
    after.restore(json.loads(json.dumps(dict(before.state()))))
    assert after.advantages(second) == [found]


def test_the_greedy_reward_is_normalised_and_counts_in_no_mean() -> None:
    remax = credit("algorithm.reward_normalisation=batch", "algorithm.advantage=remax")
    (found,) = remax.advantages([group([0.0, 10.0], greedy=1000.0)])
    std = statistics.stdev([0.0, 10.0])
    assert found == pytest.approx((-1000.0 / std, -990.0 / std), rel=1e-6)


def test_equal_rewards_stay_without_signal_when_normalised() -> None:
    for kind in ("batch", "running"):
        found = credit(f"algorithm.reward_normalisation={kind}").advantages([group([3.0, 3.0, 3.0])])
        assert found == [(0.0, 0.0, 0.0)]


TWO = ("reward.functions=[{path: 'a.py:right', weight: 2.0}, {path: 'a.py:style', name: brief}]",)
NORMALISED = (*TWO, "algorithm.objectives=normalised")


def test_each_objective_is_normalised_by_itself() -> None:
    values = [{"right": 0.0, "brief": 50.0}, {"right": 1.0, "brief": 100.0}, {"right": 1.0, "brief": 0.0}]
    (found,) = credit(*NORMALISED).advantages([group(values)])
    right = group_advantages("grpo", [0.0, 1.0, 1.0])
    brief = group_advantages("grpo", [50.0, 100.0, 0.0])
    sums = [2.0 * a + b for a, b in zip(right, brief, strict=True)]
    std = statistics.stdev(sums)
    assert found == pytest.approx(tuple(s / std for s in sums), rel=1e-5)
    # The sum of the values is decided by the large one alone.
    (summed,) = credit(*TWO).advantages([group(values)])
    assert summed[1] > 0 > summed[2]
    assert found[2] > summed[2]


def test_an_objective_that_does_not_apply_is_left_out_and_zero_is_not() -> None:
    """None of a function is no value; 0.0 is one like any other."""
    rest = [{"right": 1.0, "brief": 1.0}, {"right": 1.0, "brief": 3.0}]
    (without,) = credit(*NORMALISED).advantages([group([*rest, {"right": 1.0}])])
    (zero,) = credit(*NORMALISED).advantages([group([*rest, {"right": 1.0, "brief": 0.0}])])
    assert without[2] == 0.0
    assert without[0] == pytest.approx(-without[1])
    assert zero[2] < 0 < zero[1]


def test_objectives_that_cancel_in_the_sum_still_have_signal() -> None:
    cancelling = group([{"right": 1.0, "brief": 0.0}, {"right": 0.0, "brief": 1.0}])
    assert credit(*TWO).without_signal(cancelling)
    assert not credit(*NORMALISED).without_signal(cancelling)
    assert credit(*NORMALISED).without_signal(group([{"right": 1.0, "brief": 0.5}] * 2))
    (found,) = credit(*NORMALISED).advantages([cancelling])
    assert found[0] > 0 > found[1]


def test_what_would_be_ignored_or_filter_everything_is_refused() -> None:
    pairs = ("algorithm.loss=dpo", "algorithm.correction=none")
    assert "objectives: found 'normalised' with loss 'dpo'" in errors(*pairs, *NORMALISED)[0]
    alone = ("algorithm.preset=ppo", "rollout.group_size=1", "rollout.min_group=1")
    config(*alone)
    for how in ("drop", "refill"):
        (line,) = errors(*alone, f"algorithm.filter_zero_variance={how}")
        assert f"algorithm.filter_zero_variance: found '{how}' with rollout.group_size 1" in line
    # The greedy answer makes it two.
    config("algorithm.advantage=remax", *alone[1:], "algorithm.filter_zero_variance=drop")


def test_pairs_need_no_greedy_answer() -> None:
    remax = "algorithm.advantage=remax"
    assert CreditAssignment(config(remax)).needs_greedy
    pairs = config(remax, "algorithm.loss=dpo", "algorithm.correction=none")
    assert not CreditAssignment(pairs).needs_greedy


def test_penalties_for_length_are_an_objective_of_weight_one() -> None:
    settings = (*NORMALISED, "algorithm.length_penalty=0.001", "algorithm.reward_clip=[0,1]")
    values = [{"right": 7.0, "brief": 1.0}, {"right": 1.0, "brief": 9.0}]
    (found,) = credit(*settings).advantages([group(values, lengths=[10, 60])])
    # Clipped, the values are all the same: what is left is that the first answer is shorter.
    assert found[0] > 0 > found[1]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("algorithm.advantage=rloo", "advantage: found 'rloo' with objectives 'normalised'"),
        ("algorithm.reward_normalisation=batch", "reward_normalisation: found 'batch' with objectives"),
    ],
)
def test_what_does_not_go_with_normalised_objectives(override: str, part: str) -> None:
    (line,) = errors("algorithm.objectives=normalised", override)
    assert part in line
