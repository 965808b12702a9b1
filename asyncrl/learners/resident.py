"""A reference beside the learner: weights in host memory that take the policy's place for a forward pass.

Invariants:
- Outside ``held`` the parameters are the policy's, to the bit, also after an error inside it.
- Each rank holds its own part of the weights, as it lies in its memory: no rank holds more of the reference
  than of the policy, and an exchange sends nothing.
- Averages are kept in float32, whatever the model computes in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.algorithms.averaging import update_average
from asyncrl.checkpoint.files import FileEntry, sync_folder, write_file
from asyncrl.learners.engines import TrainingEngine
from asyncrl.learners.state_files import SavedState, write_state

_VERSION = "version.json"


class ResidentReference:
    """The weights that ``engine``'s model has now; with ``every`` they follow it, every so many versions.

    ``engine`` is built and has made no update. ``ema``: the share of the old reference that stays whenever it
    follows, None for none.
    """

    def __init__(self, engine: TrainingEngine, *, every: int = 0, ema: float | None = None) -> None:
        self.version = 0
        """The policy version whose weights it took last; 0: it is the start model."""
        self._engine = engine
        self._every = every
        self._decay = 0.0 if ema is None else ema
        self._kept = [_to_host(place) for place in engine.local_parameters()]
        self._average = self._kept
        if ema is not None and any(kept.dtype != torch.float32 for kept in self._kept):
            self._average = [kept.float() for kept in self._kept]
        self._copied: tuple[int, list[Tensor]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block, the model computes what the reference does. Without gradients alone."""
        exchanged: list[tuple[Tensor, Tensor]] = []
        try:
            for place, kept in zip(self._engine.local_parameters(), self._kept, strict=True):
                _exchange(place, kept)
                exchanged.append((place, kept))
            self._engine.drop_gathered()
            yield
        finally:
            for place, kept in exchanged:
                _exchange(place, kept)
            self._engine.drop_gathered()

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Take the weights of the policy, which is at ``version``, or their average, if that is due."""
        if not self._every or version == self.version or version % self._every:
            return
        places = self._engine.local_parameters()
        for place, mean, kept in zip(places, self._average, self._kept, strict=True):
            update_average([mean], [place.to(mean.device)], self._decay)
            if mean is not kept:
                kept.copy_(mean)
        self.version = version

    def copy(self, *, nothing: bool = False) -> None:
        """Copy what ``write`` writes, between two updates: ``nothing``, as while it is the start model."""
        self._copied = None
        if self.version > 0 and not nothing:
            self._copied = self.version, [mean.to(torch.float32, copy=True) for mean in self._average]

    def write(self, folder: Path) -> list[FileEntry]:
        """Write this rank's part of what was copied last, in any thread; paths are relative to ``folder``."""
        if self._copied is None:
            return []
        version, values = self._copied
        parts = self._engine.local_parts()
        own = [(part, value.view(-1)[: part.numel]) for part, value in zip(parts, values, strict=True)]
        if self._engine.rank != 0 and not self._engine.is_sharded:
            own = []  # rank 0 has all of it
        rank, ranks = self._engine.rank, self._engine.world_size
        weights = ((f"weight/{part.name}", value) for part, value in own)
        entries = write_state(folder, rank, ranks, [part for part, _ in own], weights)
        if rank == 0:
            entries.append(write_file(folder, _VERSION, json.dumps({"version": version}).encode()))
            sync_folder(folder)
        return entries

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Be what any number of ranks wrote: nothing means the start model. Raises CheckpointError."""
        if not folder.exists():
            return
        saved = SavedState(folder)
        parts = self._engine.local_parts()
        saved.require({part.name: part.shape for part in parts})
        for part, mean, kept in zip(parts, self._average, self._kept, strict=True):
            value = saved.read("weight", part.name, part.start, part.numel)
            for held in (mean, kept):
                held.view(-1)[: part.numel].copy_(value)
        self.version = int(json.loads((folder / _VERSION).read_bytes())["version"])


def _to_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


@torch.no_grad()
def _exchange(place: Tensor, kept: Tensor) -> None:
    policy = place.clone()
    place.copy_(kept)
    kept.copy_(policy)
