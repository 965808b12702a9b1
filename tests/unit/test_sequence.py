"""Columns of shared sequences: every token is predicted on one rank, from what stands before it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learners.sequence import columns_of


@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 17),
    size=st.integers(1, 5),
    chosen=st.sets(st.integers(0, 67)),
)
def test_ranks_have_every_column_once_and_every_token_where_it_is_predicted(
    rows: int, width: int, size: int, chosen: set[int]
) -> None:
    input_ids = torch.arange(1, rows * width + 1).view(rows, width)  # each of them once, and no 0
    positions = torch.tensor(sorted(p for p in chosen if p < rows * width), dtype=torch.int64)
    parts = [columns_of(input_ids, positions, index, size) for index in range(size)]

    assert len({part.input_ids.shape for part in parts}) == 1, "all-to-alls are between equal parts"
    whole = torch.cat([part.input_ids for part in parts], dim=1)
    assert torch.equal(whole[:, :width], input_ids)
    assert not whole[:, width:].any()
    places = torch.cat([part.position_ids for part in parts], dim=1)
    assert torch.equal(places[:, :width], torch.arange(width).expand(rows, width))
    assert bool((places[:, width:] == width - 1).all())

    assert torch.equal(torch.stack([part.owned for part in parts]).sum(0), torch.ones_like(positions))
    for part in parts:
        predicted_from = part.input_ids.flatten()[part.positions]
        assert torch.equal(predicted_from, input_ids.flatten()[positions[part.owned]])
