"""Neighbours in memory as one view: any layout gives the same elements in the same order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.learners.runs import adjacent_runs, copy_run

BUFFERS = 3
LENGTH = 64
DTYPES = (torch.float32, torch.bfloat16, torch.int32)

# Where a tensor lies: in which buffer, how far behind the one before (None: anywhere), its size and stride.
places = st.lists(
    st.tuples(
        st.integers(0, BUFFERS - 1),
        st.sampled_from([0, 0, 0, 0, 1, -1, None]),
        st.integers(0, 6),
        st.sampled_from([1, 1, 1, 1, 2]),
        st.sampled_from([0, 0, 0, 0, 1, 2]),
        st.integers(0, LENGTH - 12),
    ),
    max_size=24,
)


def laid_out(places: list[tuple]) -> list[Tensor]:
    buffers = [torch.arange(LENGTH, dtype=torch.int32) + 1000 * i for i in range(BUFFERS)]
    ends, found = [0] * BUFFERS, []
    for buffer, gap, size, stride, dtype, anywhere in places:
        begin = anywhere if gap is None else ends[buffer] + gap
        begin = min(max(begin, 0), LENGTH - 12)
        stretch = buffers[buffer].view(DTYPES[dtype] if dtype != 1 else torch.int32)[
            begin : begin + size * stride
        ]
        found.append((stretch.view(torch.bfloat16) if dtype == 1 else stretch)[::stride])
        ends[buffer] = begin + size * stride
    return found


def raw(tensors: list[Tensor]) -> list[tuple[torch.dtype, bytes]]:
    """Every element with its dtype."""
    return [
        (tensor.dtype, bytes(element.reshape(1).view(torch.uint8).tolist()))
        for tensor in tensors
        for element in tensor
    ]


@given(places)
def test_any_layout_keeps_its_elements_in_order(places: list[tuple]) -> None:
    tensors = laid_out(places)
    runs = adjacent_runs(tensors)
    assert raw(runs) == raw(tensors)
    assert len(runs) <= sum(tensor.numel() > 0 for tensor in tensors)
    # Not copies: what is written to a run is seen through the tensors.
    for run in runs:
        run.zero_()
    assert all(not tensor.any() for tensor in tensors)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_a_flat_buffer_is_one_run_up_to_what_is_left_out(sizes: list[int], data: st.DataObject) -> None:
    flat = torch.arange(sum(sizes), dtype=torch.float32)
    tensors = list(flat.split(sizes))
    assert len(adjacent_runs(tensors)) == (sum(sizes) > 0)
    filled = [i for i, size in enumerate(sizes) if size]
    if len(filled) > 2:
        gone = data.draw(st.sampled_from(filled[1:-1]))
        assert len(adjacent_runs(tensors[:gone] + tensors[gone + 1 :])) == 2


def test_storages_that_happen_to_be_neighbours_stay_apart() -> None:
    memory = bytearray(32)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=4, offset=at) for at in (0, 16))
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert [run.numel() for run in adjacent_runs([first, second])] == [4, 4]


@given(places, st.sampled_from(DTYPES))
def test_runs_are_copied_whatever_they_are_copied_into(places: list[tuple], dtype: torch.dtype) -> None:
    for run in adjacent_runs(laid_out(places)):
        target = torch.zeros(run.numel() + 1, dtype=dtype)
        copy_run(target[:-1], run)
        assert raw([target[:-1]]) == raw([run.to(dtype)])
        assert target[-1] == 0
