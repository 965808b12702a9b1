"""The policy's full weights under Hugging Face names, as they leave the learner: for pushes, sums and files.

Invariants:
- Every way out gives the same tensors, under the base model's names, and in its shapes and dtypes.
- Those of the adapters alone leave as they are, under names of their own.
- An adapter is merged into what leaves, one tensor at a time; the parameters themselves are only read.
- Every rank gets the same calls in the same order: with ZeRO 3, or layers that ranks divide, all are
  collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncrl.learners.lora import LoraAdapter
from asyncrl.learners.tensor import TensorParallel
from asyncrl.weight_sync.base import TensorSpec


class WeightHolder(Protocol):
    """What has the weights: a training engine's rank, or a model in one piece."""

    @property
    def rank(self) -> int: ...

    @property
    def module(self) -> Any: ...

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]: ...


class PolicyWeights:
    """The weights of ``engine``'s model.

    ``sharded``: each rank holds a part of every tensor (ZeRO 3). ``tensors``: which parts, where ranks divide
    layers among them; not both, and no adapter then.
    """

    def __init__(
        self,
        engine: WeightHolder,
        adapter: LoraAdapter | None,
        *,
        sharded: bool,
        tensors: TensorParallel | None = None,
    ) -> None:
        self._engine = engine
        self._tensors = tensors
        self._adapter = adapter
        self._sharded = sharded
        self._pairs = {} if adapter is None else adapter.pairs
        self._parameters: dict[str, nn.Parameter] = (
            dict(engine.module.named_parameters()) if adapter is None else adapter.base(engine.module)
        )
        self._names = tuple(self._parameters)
        if adapter is not None:
            self._parameters |= adapter.travelling()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on every rank, each valid until the next is asked for."""
        for name in self._names:
            with self._engine.gathered(self._sources(name)):
                yield name, self._whole(name, self._parameters[name].dtype)

    def bucket(
        self, bucket: Sequence[TensorSpec], into: Tensor | None = None, *, everywhere: bool = False
    ) -> Tensor | None:
        """The tensors of a bucket in its dtype as one flat tensor, a copy, on rank 0, and ``everywhere`` if
        this rank wants it too; None elsewhere.

        The copy is ``into`` where that lies on their device.
        """
        wanted = everywhere or self._engine.rank == 0
        if self._tensors is not None and not wanted and self._engine.rank < self._tensors.size:
            for spec in bucket:
                self._whole(spec.name, self._parameters[spec.name].dtype)
            return None
        if not self._sharded and not wanted:
            return None
        dtype = getattr(torch, bucket[0].dtype)
        with self._engine.gathered([p for spec in bucket for p in self._sources(spec.name)]):
            if not wanted:
                return None
            # A copy: the next update may run before the last of it is on the wire.
            flats = [self._whole(spec.name, dtype).reshape(-1).to(dtype) for spec in bucket]
            if into is not None and into.device == flats[0].device:
                return torch.cat(flats, out=into)
            return torch.cat(flats)

    def shards(self, bucket: Sequence[TensorSpec]) -> list[Tensor]:
        """This rank's part of each tensor, flat, as ``LearnerRank.shards`` defines it."""
        if self._sharded:
            # The adapters of a bucket at once; what is merged into stays where it is.
            with self._engine.gathered([p for spec in bucket for p in self._sources(spec.name)[1:]]):
                return [self._part(spec.name) for spec in bucket]
        if self._engine.rank != 0:
            return []
        return [self._whole(spec.name, self._parameters[spec.name].dtype).reshape(-1) for spec in bucket]

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter alone; rank 0 writes."""
        assert self._adapter is not None
        state: dict[str, Tensor] = {}
        for name, parameter in self._adapter.trained.items():
            with self._engine.gathered([parameter]):
                if self._engine.rank == 0:
                    state[name] = parameter.detach().to("cpu", copy=True)
        if self._engine.rank == 0:
            self._adapter.save(folder, state)

    def _sources(self, name: str) -> list[nn.Parameter]:
        """What a tensor is made of."""
        pair = self._pairs.get(name)
        return [self._parameters[name], *(pair.parameters if pair is not None else ())]

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor; its sources are gathered. Collective where ranks divide layers."""
        weight, pair = self._parameters[name].detach(), self._pairs.get(name)
        if self._tensors is not None:
            weight = self._tensors.whole(name, weight)
        return weight if pair is None else pair.merge(weight, dtype)

    def _part(self, name: str) -> Tensor:
        """This rank's part of a tensor, with padding at the end of the last ones; its adapter is gathered."""
        parameter: Any = self._parameters[name]
        own: Tensor = parameter.ds_tensor.detach()
        pair = self._pairs.get(name)
        if pair is None:
            return own
        # All of the product, not this part's rows alone: the bits of a product depend on its shape.
        delta = pair.delta().reshape(-1)
        begin = self._engine.rank * own.numel()
        part = own.to(torch.float32, copy=True)
        mine = delta[begin : begin + own.numel()]
        part[: mine.numel()] += mine
        return part.to(own.dtype)
