"""Parts of tensors on their way to rank 0: real process groups between threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.learners.gathering import collect
from asyncrl.weight_sync.base import PushGroupSpec
from asyncrl.weight_sync.broadcast import connect_store, create_group, create_store

NUMELS = [10, 1, 0, 7, 3]


def parts_of(tensors: list[Tensor], rank: int, ranks: int) -> Iterator[Tensor]:
    """Equal ones, NaN behind the end of a tensor."""
    for tensor in tensors:
        size = -(-tensor.numel() // ranks)
        padded = torch.full((size * ranks,), float("nan"))
        padded[: tensor.numel()] = tensor
        yield padded[rank * size : (rank + 1) * size]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_come_together_without_their_padding(ranks: int, dtype: torch.dtype) -> None:
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in NUMELS]
    store = create_store("127.0.0.1", 20.0)
    whole = torch.full((sum(NUMELS),), float("nan"), dtype=dtype)

    def run(rank: int) -> Any:
        spec = PushGroupSpec("127.0.0.1", store.port, "c", rank, ranks, "gloo", 1, 20.0, ())
        own = store if rank == 0 else connect_store(spec)
        group = create_group(torch.distributed.PrefixStore("c", own), spec)
        for _ in range(2):
            parts = parts_of(tensors, rank, ranks)
            collect(group, rank, NUMELS, parts, dtype, whole if rank == 0 else None)
        return group

    with ThreadPoolExecutor(ranks) as threads:
        running = [threads.submit(run, rank) for rank in range(ranks)]
        groups = [future.result(20) for future in running]
    assert len(groups) == ranks
    assert torch.equal(whole, torch.cat(tensors).to(dtype))
