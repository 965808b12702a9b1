"""Where a rank's share of parameters, float32 masters and Adam moments lies, whatever the ZeRO stage.

DeepSpeed keeps masters and moments in flat tensors: one a parameter group and rank (stages 1 and 2, and
bfloat16), one a group of whole parameters' parts (stage 3), or none, so that they are the parameters' own
(stage 0 in float32). A ``Fragment`` says of one parameter which part of it this rank has, and where.

Invariants:
- Over all ranks, the fragments of ``owned`` are each value of each trained parameter exactly once: of a
  parameter that ranks divide, each has its slab; what they all have alike is the first one's.
- Masters, moments and the number of updates are all that an optimizer of the learner's keeps: with these
  set, the next update is the one that would have come.
- Nothing here imports deepspeed: it reads attributes that its optimizers put on parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.learners.state_files import MOMENTS, Kind, Part, SavedState, Slab
from asyncrl.learners.tensor import TensorParallel


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
    """The state behind ``module``'s trained parameters.

    ``optimizer`` is DeepSpeed's, or the plain one where it wraps none. ``gathered`` makes parameters whole,
    as the engine's does; what rank 0 writes to them inside is everyone's when the block ends. ``tensors``
    says which parameters ranks divide, where they do.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        *,
        rank: int,
        ranks: int,
        gathered: Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]],
        tensors: TensorParallel | None = None,
    ) -> None:
        self._rank = rank
        self._tensors = tensors
        self._ranks = ranks
        self._gathered = gathered
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._optimizer = optimizer
        self._inner = getattr(optimizer, "optimizer", optimizer)
        self._replicated = False
        self._fragments = list(self._find())

    @property
    def owned(self) -> list[Fragment]:
        """What this rank has to write: where all have everything, each its share."""
        if self._tensors is not None and self._tensors.index > 0:
            return [fragment for fragment in self._fragments if fragment.slab is not None]
        return self._fragments[self._rank :: self._ranks] if self._replicated else self._fragments

    @property
    def values(self) -> dict[Tensor, dict[str, Tensor]]:
        """The optimizer's state by ``Fragment.owner``."""
        state: dict[Tensor, dict[str, Tensor]] = self._inner.state
        return state

    @torch.no_grad()
    def load(self, saved: SavedState) -> None:
        """Take over what was saved; collective. Raises CheckpointError where it is of another model."""
        saved.require({name: self._shape(name) for name in self._parameters})
        for fragment in self._fragments:
            source = fragment.start, fragment.numel, fragment.slab
            fragment.values("weight", {}).copy_(saved.read("weight", fragment.name, *source))
            updates = saved.parameters[fragment.name].updates
            if not updates:
                continue
            state = self._state_of(fragment.owner, updates)
            for kind in MOMENTS:
                fragment.values(kind, {fragment.owner: state}).copy_(saved.read(kind, fragment.name, *source))
        for name, parameter in self._parameters.items():
            with self._gathered([parameter]):
                if not hasattr(parameter, "ds_id") or self._rank == 0:
                    values = saved.read("weight", name, slab=self._slab(name))
                    parameter.copy_(values.view(_local_shape(parameter)))

    def _state_of(self, owner: Tensor, updates: int) -> dict[str, Tensor]:
        """The optimizer's state of one tensor, which is empty before its first update."""
        state = self._inner.state[owner]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state |= {kind: torch.zeros_like(owner) for kind in MOMENTS}
        state["step"].fill_(max(float(updates), float(state["step"])))
        return state  # type: ignore[no-any-return]

    def _find(self) -> Iterator[Fragment]:
        for name, parameter in self._parameters.items():
            if hasattr(parameter, "ds_id"):
                found = self._of_shard(name, parameter)
            elif hasattr(parameter, "_hp_mapping"):
                found = self._of_partition(name, parameter)
            else:
                self._replicated = True
                found = Fragment(name, self._shape(name), 0, parameter.numel(), parameter, 0)
            if found is not None:
                yield found

    def _of_partition(self, name: str, parameter: Any) -> Fragment | None:
        """Below ZeRO 3: a rank's flat masters hold a run of all parameters one after the other."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return None  # all of it is with other ranks
        owner = self._inner.param_groups[mapping.param_group_index]["params"][0]
        lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Fragment(name, self._shape(name), lp.start, hp.numel, owner, hp.start, slab=self._slab(name))

    def _of_shard(self, name: str, parameter: Any) -> Fragment | None:
        """ZeRO 3: parts of one size on all ranks, with padding at the end of the last."""
        zero = self._optimizer
        group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
        start = self._rank * length
        numel = min(length, parameter.ds_numel - start)
        if numel <= 0:
            return None  # padding alone
        owner = zero.fp32_partitioned_groups_flat[group]
        return Fragment(name, self._shape(name), start, numel, owner, offset)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        if self._tensors is not None and name in self._tensors.slabs:
            return self._tensors.shapes[name]
        return _local_shape(self._parameters[name])

    def _slab(self, name: str) -> Slab | None:
        return None if self._tensors is None else self._tensors.slabs.get(name)


def _local_shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


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
