"""A push of sharded weights never holds more than two buckets, or two of its largest tensors.

Beside shard and copy on a rank, and beside weights and staging area on a receiver. What counts is the peak of
the process's resident memory, so that nothing that any library allocates escapes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.deepspeed_worker import free_port, run_jobs, run_ranks
from tests.e2e.push_memory_worker import (
    CLEAR_REFS,
    LARGEST,
    MODEL,
    Push,
    meter,
    receive_and_measure,
    save_wide_policy,
    send_and_measure,
)

SLACK = 2 << 20
"""What a push may cost whatever its size: messages, threads, pages that the kernel rounds up to."""
SMALL, LARGE = 4 << 20, 12 << 20
"""Bytes of a bucket: less than the largest tensor, and more."""
PUSHES = [
    Push(overlap, size, in_place)
    for size, in_place in ((SMALL, False), (LARGE, True), (LARGE, False))
    for overlap in (False, True)
]
WARM_UP = PUSHES[:2]
"""Go before, because what a process loads on its first push stays."""

pytestmark = pytest.mark.skipif(not CLEAR_REFS.exists(), reason="needs Linux, which counts peaks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide_policy(tmp_path_factory.mktemp("memory") / "model")


def test_the_meter_sees_tensors_that_were_freed() -> None:
    sizes = [LARGEST, 3 * LARGEST, 1]
    # Once in vain: the first use of an operator loads its code.
    ((_, *found),) = run_jobs([(meter, ([LARGEST, *sizes],))])
    for size, measured in zip(sizes, found, strict=True):
        assert size - SLACK / 2 <= measured <= size + SLACK


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_two_ranks_push_within_two_buckets(folder: Path, backend: str) -> None:
    port, pushes = free_port(), [*WARM_UP, *PUSHES]
    *ranks, receiver = run_ranks(
        send_and_measure,
        folder,
        backend=backend,
        stage=3,
        ranks=2,
        beside=(receive_and_measure, (folder, port, pushes)),
        port=port,
        pushes=pushes,
    )
    for i, push in list(enumerate(pushes))[len(WARM_UP) :]:
        bound = 2 * max(push.bucket_bytes, LARGEST) + SLACK
        assert bound < MODEL, "the bound would allow a whole model"
        first, second, received = ranks[0][i], ranks[1][i], receiver[i]
        assert push.bucket_bytes <= first <= bound, f"rank 0 held {first >> 10} KiB for {push}"
        assert second <= SLACK, f"rank 1 held {second >> 10} KiB for {push}"
        assert received <= (SLACK if push.in_place else bound), f"received in {received >> 10} KiB for {push}"
