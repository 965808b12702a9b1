"""benchmarks/published.py: its page is made of its figures, and these by the simulator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import published  # noqa: E402
from published import (  # noqa: E402
    ASSUMED,
    ASYNCHRONOUS,
    COLOCATED,
    UNIT,
    Costs,
    Row,
    Schedule,
    calibrate,
    single_update,
)


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads((ROOT / "docs" / "published.json").read_text())


def test_the_page_is_made_of_the_figures(figures: Any) -> None:
    assert published.page(figures) == (ROOT / "docs" / "published.md").read_text()
    rows = [json.loads(json.dumps(published.asdict(row))) for row in COLOCATED]
    assert [row["published"] for row in figures["whole"]["colocated"]] == rows
    assert {row["published"]["devices"] for row in figures["whole"]["asynchronous"]} == {
        row.devices for row in ASYNCHRONOUS
    }


def test_a_figure_comes_from_a_run_in_virtual_time(figures: Any) -> None:
    part = figures["first_half"]
    row = part["asynchronous"][-1]
    schedule, costs = Schedule(**row["schedule"]), Costs(**part["costs"])
    found = single_update(row["published"]["devices"], schedule, costs, ASSUMED)
    assert found == pytest.approx(row["single_update"])


def test_costs_are_found_again_from_the_rows_that_they_make() -> None:
    costs = Costs(0.005, 0.0001, 60.0, 0.0002, 40.0, 0.00003, 9.0, 0.0)
    drawn = np.array([[100, 300, 2000, 600]])
    tokens, longest = 3000, 2000
    rows = []
    for devices in (32, 64, 128):
        each = tokens * UNIT / devices
        generate = costs.token_s * longest + costs.sequence_s * each
        update, old = costs.update_s + costs.update_token_s * each, costs.old_s + costs.old_token_s * each
        rows.append(Row(devices, generate + update + old + costs.turn_s, generate, update, (1.0, 2.0), old))
    found = calibrate(rows, drawn)
    for name in ("token_s", "sequence_s", "update_s", "update_token_s", "old_s", "old_token_s", "turn_s"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name)), name


def test_the_first_half_is_in_proportion_to_its_time() -> None:
    # 27 h 43 min of 89 h 5 min: faster than the mean of all 400 steps.
    half = COLOCATED[0].first_half
    assert half.step == pytest.approx(790.10 * 2 * (27 + 43 / 60) / (89 + 5 / 60))
    assert half.update / half.step == pytest.approx(313.81 / 790.10)
    assert (half.devices, half.hours) == (32, COLOCATED[0].hours)
