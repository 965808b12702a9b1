from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.errors import ConfigError, InvariantError
from tests.unit.reference_vectors import CASES

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['inputs']['seed']}")
def test_grpo_matches_the_reference(case: dict) -> None:
    inputs = case["inputs"]
    expected = case["expected"]["advantages"]["grpo(std)"]["adv"]
    for group in set(inputs["groups"]):
        rows = [i for i, g in enumerate(inputs["groups"]) if g == group]
        found = group_advantages("grpo", [sum(inputs["token_rewards"][i]) for i in rows])
        for i, advantage in zip(rows, found, strict=True):
            for t, trained in enumerate(inputs["mask"][i]):
                assert expected[i][t] == pytest.approx(advantage if trained else 0.0, abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 12))
def test_equal_rewards_have_exactly_no_advantage(reward: float, size: int) -> None:
    assert group_advantages("grpo", [reward] * size) == (0.0,) * size


@given(rewards)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(values: list[float]) -> None:
    found = group_advantages("grpo", values)
    assert sum(found) == pytest.approx(0.0, abs=1e-6)
    for low, high in zip(sorted(values), sorted(values)[1:], strict=False):
        assert found[values.index(low)] <= found[values.index(high)]


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InvariantError, match="1 of 3 rewards"):
        group_advantages("grpo", [0.0, float("nan"), 1.0])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gpro', expected one of grpo"):
        group_advantages("gpro", [0.0, 1.0])


def test_the_module_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, asyncrl.algorithms.advantages; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
