"""A learner goes on from its saved state: to the bit on as many ranks, and closely on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from asyncrl.checkpoint.files import measure
from tests.e2e.deepspeed_worker import run_ranks
from tests.e2e.state_worker import train_on
from tests.e2e.tiny_policy import save_tiny_policy

SAVED, END = 3, 6
Runs = dict[tuple[int, int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("state") / "model")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(train_on, folder, stage=0, ranks=1, versions=range(END))


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"),
    [
        (0, 2, "float32"),
        (2, 1, "float32"),
        (2, 2, "float32"),
        (3, 2, "float32"),
        (2, 2, "bfloat16"),
        (0, 2, "bfloat16"),
        (3, 2, "bfloat16"),
    ],
)
def test_equal_ranks_go_on_to_the_bit(
    folder: Path, tmp_path: Path, stage: int, ranks: int, dtype: str
) -> None:
    where: dict[str, Any] = {"stage": stage, "ranks": ranks, "dtype": dtype}
    whole = run_ranks(train_on, folder, **where, versions=range(END))
    before = run_ranks(train_on, folder, **where, versions=range(SAVED), save=tmp_path)
    after = run_ranks(train_on, folder, **where, versions=range(SAVED, END), resume=tmp_path)
    for of_rank, first, second in zip(whole, before, after, strict=True):
        assert first["norms"] + second["norms"] == of_rank["norms"]
        assert second["last"] == of_rank["last"]
        assert first["last"] != second["digest"], "the step after the copy went into the files"
        for entry in first["files"]:
            assert measure(tmp_path, entry.path) == entry


@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (2, 2)), ((2, 2), (2, 1)), ((3, 2), (0, 1)), ((0, 1), (3, 2))], ids=str
)
def test_another_number_of_ranks_or_stage_goes_on_closely(
    folder: Path,
    tmp_path: Path,
    undisturbed: list[dict[str, Any]],
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    stage, ranks = before
    run_ranks(train_on, folder, stage=stage, ranks=ranks, versions=range(SAVED), save=tmp_path)
    stage, ranks = after
    (found, *_) = run_ranks(
        train_on, folder, stage=stage, ranks=ranks, versions=range(SAVED, END), resume=tmp_path
    )
    expected = undisturbed[0]
    np.testing.assert_allclose(found["norms"], expected["norms"][SAVED:], rtol=1e-4)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, atol=1e-5)


def test_the_files_are_plain_safetensors_by_name(
    folder: Path, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    run_ranks(train_on, folder, stage=0, ranks=1, versions=range(END), save=tmp_path)
    tensors = load_file(tmp_path / "rank-00000-of-00001.safetensors")
    for name, parameter in undisturbed[0]["parameters"].items():
        np.testing.assert_array_equal(tensors[f"weight/{name}"].numpy(), parameter.ravel())
        assert tensors[f"exp_avg_sq/{name}"].abs().max() > 0
