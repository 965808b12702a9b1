"""Files of a training engine's state: any part is read, whoever wrote it, and a lacking one noticed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.checkpoint.files import measure
from asyncrl.errors import CheckpointError
from asyncrl.learners.state_files import Part, SavedState, Slab, write_state

SHAPE = (5, 4)
VALUES = torch.arange(20.0)


def save(folder: Path, cuts: list[int], updates: int = 3) -> None:
    """One parameter, cut at these places among as many ranks and one more."""
    bounds = [0, *cuts, 20]
    for rank, (start, end) in enumerate(pairwise(bounds)):
        part = Part("layer.weight", SHAPE, start, end - start, updates)
        tensors = [(f"{kind}/layer.weight", VALUES[start:end] * 10**i) for i, kind in enumerate(part.kinds)]
        entries = write_state(folder, rank, len(bounds) - 1, [part], tensors)
        assert [measure(folder, entry.path) for entry in entries] == entries


@given(
    cuts=st.lists(st.integers(0, 20), max_size=3).map(sorted),
    start=st.integers(0, 20),
    end=st.integers(0, 20),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_run_of_values_is_read_whoever_wrote_them(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], start: int, end: int
) -> None:
    folder = tmp_path_factory.mktemp("state")
    save(folder, cuts)
    saved = SavedState(folder)
    start, end = sorted((start, end))
    for i, kind in enumerate(("weight", "exp_avg", "exp_avg_sq")):
        found: Tensor = saved.read(kind, "layer.weight", start, end - start)  # type: ignore[arg-type]
        assert torch.equal(found, VALUES[start:end] * 10**i)
    assert torch.equal(saved.read("weight", "layer.weight"), VALUES)
    assert saved.parameters["layer.weight"].updates == 3


@given(
    dim=st.integers(0, 1),
    saved=st.integers(1, 4),
    wanted=st.integers(1, 4),
    cut=st.integers(0, 20),
    data=st.data(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slabs_of_any_number_of_ranks_are_read_as_those_of_any_other(
    tmp_path_factory: pytest.TempPathFactory, dim: int, saved: int, wanted: int, cut: int, data: st.DataObject
) -> None:
    folder, whole = tmp_path_factory.mktemp("slabs"), VALUES.view(SHAPE)
    slabs = slabs_of(dim, saved)
    for index, slab in enumerate(slabs):
        flat = slab.of(whole).flatten()
        # Each slab in two runs, as two replicas have them.
        for half, (start, end) in enumerate(pairwise((0, min(cut, len(flat)), len(flat)))):
            part = Part("layer.weight", SHAPE, start, end - start, 0, slab)
            write_state(
                folder,
                2 * index + half,
                2 * len(slabs),
                [part],
                [("weight/layer.weight", flat[start:end].clone())],
            )
    found = SavedState(folder)
    assert torch.equal(found.read("weight", "layer.weight"), VALUES)
    assert found.parameters["layer.weight"].shape == SHAPE
    slab = data.draw(st.sampled_from(slabs_of(1 - dim, wanted)))
    expected = slab.of(whole).flatten()
    assert torch.equal(found.read("weight", "layer.weight", slab=slab), expected)
    start = data.draw(st.integers(0, len(expected)))
    assert torch.equal(found.read("weight", "layer.weight", start, 2, slab), expected[start : start + 2])


def slabs_of(dim: int, ranks: int) -> list[Slab]:
    """As even as they get."""
    size = SHAPE[dim]
    return [Slab(dim, size * i // ranks, size * (i + 1) // ranks) for i in range(min(ranks, size))]


def test_slabs_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    for rank, slab in enumerate((Slab(0, 0, 2), Slab(0, 3, 5))):
        values = slab.of(VALUES.view(SHAPE)).flatten().clone()
        part = Part("layer.weight", SHAPE, 0, len(values), 0, slab)
        write_state(tmp_path, rank, 2, [part], [("weight/layer.weight", values)])
    with pytest.raises(CheckpointError, match=r"the parts of layer\.weight do not add up"):
        SavedState(tmp_path)


def test_a_parameter_without_updates_has_no_moments(tmp_path: Path) -> None:
    save(tmp_path, [], updates=0)
    assert set(load_file(tmp_path / "rank-00000-of-00001.safetensors")) == {"weight/layer.weight"}


def test_a_rank_that_is_missing_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, [7])
    (tmp_path / "rank-00001-of-00002.json").unlink()
    with pytest.raises(CheckpointError, match=r"has files of 1 ranks, .* says 2"):
        SavedState(tmp_path)


def test_parts_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path) -> None:
    save(tmp_path, [7])
    index = tmp_path / "rank-00001-of-00002.json"
    document = json.loads(index.read_text())
    document["parts"][0] |= {"start": 8, "numel": 12}
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"the parts of layer\.weight do not add up"):
        SavedState(tmp_path)


def test_an_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no rank-"):
        SavedState(tmp_path)
