"""Where a rank's share of parameters, float32 masters and Adam moments lies, whatever the engine.

An engine says of each trained parameter which part of it this rank has, and where: a ``Fragment``.

Invariants:
- Over all ranks, the fragments of ``owned`` are each value of each trained parameter exactly once: of a
  parameter that ranks divide, each has its slab; what they all have alike is the first one's.
- Masters, moments and the number of updates are all that an optimizer of the learner's keeps: with these
  set, the next update is the one that would have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.learners.state_files import MOMENTS, Kind, Part, SavedState, Slab


@dataclass(frozen=True, slots=True)
class Fragment:
    """One rank's part of one trained parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Where the part begins in the flattened parameter, or slab."""
    numel: int
    owner: Tensor
    """The tensor that the optimizer knows, of which the masters are a part."""
    offset: int
    """Where the part begins in the flattened owner."""
    slab: Slab | None = None
    """What this rank has of a parameter that ranks divide."""

    def values(self, kind: Kind, state: Mapping[Tensor, Mapping[str, Tensor]]) -> Tensor:
        """A view, (numel,) float32, of the part's masters or moments."""
        whole = self.owner if kind == "weight" else state[self.owner][kind]
        return whole.detach().view(-1).narrow(0, self.offset, self.numel)

    def part(self, state: Mapping[Tensor, Mapping[str, Tensor]]) -> Part:
        """What a file says of it."""
        updates = int(state[self.owner]["step"]) if state.get(self.owner) else 0
        return Part(self.name, self.shape, self.start, self.numel, updates, self.slab)


class OptimizerState:
    """The state behind trained parameters of ``shapes``, of which this rank has ``fragments``.

    ``optimizer`` is torch's own, inside of whatever an engine wraps around it. ``owned`` are those of the
    fragments that this rank has to write, where others have some of them too; None: all.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        optimizer: Any,
        fragments: Sequence[Fragment],
        *,
        owned: Sequence[Fragment] | None = None,
    ) -> None:
        self._shapes = dict(shapes)
        self._optimizer = optimizer
        self._fragments = list(fragments)
        self._owned = self._fragments if owned is None else list(owned)

    @property
    def owned(self) -> list[Fragment]:
        """What this rank has to write: of what others have too, its share."""
        return self._owned

    @property
    def values(self) -> dict[Tensor, dict[str, Tensor]]:
        """The optimizer's state by ``Fragment.owner``."""
        state: dict[Tensor, dict[str, Tensor]] = self._optimizer.state
        return state

    @torch.no_grad()
    def load(self, saved: SavedState) -> None:
        """Take over what was saved, by all fragments. Raises CheckpointError where it is of another model."""
        saved.require(self._shapes)
        for fragment in self._fragments:
            source = fragment.start, fragment.numel, fragment.slab
            fragment.values("weight", {}).copy_(saved.read("weight", fragment.name, *source))
            updates = saved.parameters[fragment.name].updates
            if not updates:
                continue
            state = self._state_of(fragment.owner, updates)
            for kind in MOMENTS:
                fragment.values(kind, {fragment.owner: state}).copy_(saved.read(kind, fragment.name, *source))

    def _state_of(self, owner: Tensor, updates: int) -> dict[str, Tensor]:
        """The optimizer's state of one tensor, which is empty before its first update."""
        state = self._optimizer.state[owner]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state |= {kind: torch.zeros_like(owner) for kind in MOMENTS}
        state["step"].fill_(max(float(updates), float(state["step"])))
        return state  # type: ignore[no-any-return]


class StateCopy:
    """A copy of a rank's fragments in host memory: made at a step's boundary, written while training goes on.

    Its memory is allocated once: 12 bytes a value.
    """

    def __init__(self, source: OptimizerState) -> None:
        self._source = source
        self._parts: list[Part] = []
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, *, weights_only: bool = False) -> None:
        """Copy everything, or the masters alone, as it is now. Not while ``tensors`` is read."""
        state = {} if weights_only else self._source.values
        self._parts = []
        for fragment in self._source.owned:
            part = fragment.part(state)
            self._parts.append(part)
            for kind in part.kinds:
                values = fragment.values(kind, state)
                name = f"{kind}/{part.name}"
                if name not in self._copies:
                    self._copies[name] = torch.empty(part.numel, dtype=torch.float32)
                self._copies[name].copy_(values)

    @property
    def parts(self) -> list[Part]:
        return self._parts

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was copied, in the order of the parts and of their kinds."""
        for part in self._parts:
            for kind in part.kinds:
                name = f"{kind}/{part.name}"
                yield name, self._copies[name]
