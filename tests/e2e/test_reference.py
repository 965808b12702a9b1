"""A run with a reference in actors of its own: what it measures, and where its time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .runs import assert_sound, finish


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("loss", ["algorithm.kl=loss", "algorithm.kl_coef=0.01", "reference.replicas=2"]),
        ("reward", ["algorithm.kl=reward", "algorithm.kl_coef=0.01", "algorithm.kl_target=0.5"]),
        ("pairs", ["algorithm.loss=dpo", "algorithm.correction=none"]),
    ],
)
def test_the_policy_starts_at_its_reference_and_leaves_it(
    tmp_path: Path, name: str, overrides: list[str]
) -> None:
    run = finish(tmp_path, *overrides, "data.eval=null", "schedule.max_staleness=1", name=name)
    assert_sound(run, max_staleness=1, capacity=4)
    lines = run.metrics[1:]
    assert all(line["timing_s/reference"] >= 0 <= line["timing_s/annotate_wait"] for line in lines)
    assert lines[0]["timing_s/reference"] > 0
    if name == "pairs":
        check_pairs(lines)
        return
    # The first batch was sampled and is trained by the start model, which is the reference.
    assert abs(lines[0]["actor/reference_kl"]) < 1e-5
    assert abs(lines[-1]["actor/reference_kl"]) > 1e-5
    coefficients = [line["actor/kl_coef"] for line in lines]
    assert coefficients[0] == 0.01
    # Far below its target, the KL asks for a smaller coefficient.
    assert (coefficients[-1] < 0.01) == (name == "reward")


def check_pairs(lines: list[dict[str, Any]]) -> None:
    (first, *_) = [line for line in lines if "actor/preference_loss" in line]
    assert abs(first["actor/preference_margin"]) < 1e-3
    assert first["actor/preference_loss"] == pytest.approx(0.6931, abs=1e-3)
