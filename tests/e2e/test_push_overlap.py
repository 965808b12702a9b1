"""A push that runs beside an update delivers the version that was copied out, from real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deepspeed_worker import run_ranks
from tests.e2e.push_worker import push_beside_updates, push_to_a_receiver_that_dies
from tests.e2e.tiny_policy import save_tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("push") / "model")


@pytest.mark.parametrize(
    ("backend", "stage", "ranks", "dtype"),
    [
        ("deepspeed", 0, 1, "float32"),
        ("deepspeed", 2, 2, "float32"),
        ("deepspeed", 3, 1, "float32"),
        ("deepspeed", 3, 2, "float32"),
        ("deepspeed", 3, 2, "bfloat16"),
        ("fsdp2", 3, 2, "bfloat16"),
    ],
)
def test_a_slow_push_delivers_its_version_though_the_next_update_is_over(
    folder: Path, backend: str, stage: int, ranks: int, dtype: str
) -> None:
    where: dict[str, Any] = {"backend": backend, "stage": stage, "ranks": ranks, "dtype": dtype}
    found = run_ranks(push_beside_updates, folder, **where, updates=3)
    first = found[0]
    assert len(set(first["held"])) == 3, "the updates changed nothing"
    assert first["sent"] == [(checksum, checksum) for checksum in first["held"]]
    assert all(rank["allocations"] == 1 for rank in found)
    copied = [rank["copied"] for rank in found]
    if stage == 3 and ranks == 2:
        # Each rank copies its shard alone: half, and less than a row of padding a tensor.
        assert copied[0] == copied[1]
    else:
        assert copied[1:] == [0] * (ranks - 1)
    assert max(first["tensors"]) > 1
    if stage > 0 and backend == "deepspeed":
        # DeepSpeed keeps them in one flat buffer: a bucket is one copy, however many tensors it holds.
        assert set(first["runs"]) == {1}


@pytest.mark.parametrize("overlap", [False, True])
def test_no_rank_is_left_waiting_when_a_receiver_dies_and_the_push_is_sent_again(
    folder: Path, overlap: bool
) -> None:
    first, second = run_ranks(push_to_a_receiver_that_dies, folder, stage=3, ranks=2, overlap=overlap)
    assert "sending version 0" in first["failure"]
    # Beside an update the others learn of it at once; between updates they have been served.
    assert (second["failure"] is not None) == overlap
    assert first["sent"] == (first["held"], first["held"])
