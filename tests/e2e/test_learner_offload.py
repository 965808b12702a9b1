"""A learner that leaves its device between two updates trains as if it had stayed, and saves the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.deepspeed_worker import run_ranks
from tests.e2e.offload_worker import train_in_turns
from tests.e2e.tiny_policy import save_tiny_policy

UPDATES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("offload") / "model")


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "moves"),
    [
        (2, 1, "float32", True),
        (2, 2, "bfloat16", True),
        (1, 1, "bfloat16", False),
        (0, 1, "float32", False),
        (3, 2, "float32", False),
    ],
)
def test_leaving_the_device_changes_no_bit(
    folder: Path, tmp_path: Path, stage: int, ranks: int, dtype: str, moves: bool
) -> None:
    stays, leaves = (
        run_ranks(
            train_in_turns,
            folder,
            stage=stage,
            ranks=ranks,
            dtype=dtype,
            updates=UPDATES,
            offloads=offloads,
            target=tmp_path / f"offloads-{offloads}",
        )
        for offloads in (False, True)
    )
    for expected, found in zip(stays, leaves, strict=True):
        assert found.pop("moved") is moves
        assert found == expected, "parameters, optimizer state, log-probs or files"
        assert len(set(found["digests"])) == UPDATES
