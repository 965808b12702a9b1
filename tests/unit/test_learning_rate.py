from __future__ import annotations

import pytest

from asyncrl.learners.schedule import learning_rate


def rates(schedule: str, warmup: int, total: int) -> list[float]:
    return [
        learning_rate(v, peak=1.0, schedule=schedule, warmup_steps=warmup, total_steps=total)  # type: ignore[arg-type]
        for v in range(total)
    ]


def test_constant_after_a_linear_warmup() -> None:
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates("constant", 0, 2) == [1.0, 1.0]


def test_linear_falls_to_zero_one_update_after_the_last() -> None:
    assert rates("linear", 1, 5) == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates("cosine", 0, 8)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_update_of_a_run_has_learning_rate_zero(schedule: str) -> None:
    for warmup in (0, 3, 10, 20):
        assert min(rates(schedule, warmup, 10)) > 0
