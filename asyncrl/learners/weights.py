"""The policy's full weights under Hugging Face names, as they leave the learner: for pushes, sums and files.

Invariants:
- Every way out gives the same tensors, under the base model's names, and in its shapes and dtypes.
- Those of the adapters alone leave as they are, under names of their own.
- An adapter is merged into what leaves, one tensor at a time; the parameters themselves are only read.
- Every rank gets the same calls in the same order: where parameters are sharded, or ranks divide layers, all
  are collective.
- A bucket takes no more memory than its own, and one tensor more: whole where ranks divide layers or each
  wants the bucket, else one rank's part of it, and that only where there are adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    @property
    def is_sharded(self) -> bool: ...

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[list[Tensor]]: ...

    def part(self, parameter: nn.Parameter) -> Tensor: ...

    def collect(
        self, numels: Sequence[int], parts: Iterable[Tensor], dtype: torch.dtype, whole: Tensor | None
    ) -> None: ...


class PolicyWeights:
    """The weights of ``engine``'s model, with the adapter that is around it, if any.

    ``tensors``: where ranks divide layers among them, which parts this one has; no adapter then, and no
    sharding.
    """

    def __init__(
        self, engine: WeightHolder, adapter: LoraAdapter | None, tensors: TensorParallel | None = None
    ) -> None:
        self._engine = engine
        self._tensors = tensors
        self._adapter = adapter
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
            with self._engine.gathered(self._sources(name)) as (weight, *_):
                yield name, self._merged(name, weight, weight.dtype)

    def bucket(
        self, bucket: Sequence[TensorSpec], into: Tensor | None = None, *, everywhere: bool = False
    ) -> Tensor | None:
        """The tensors of a bucket in its dtype as one flat tensor, a copy, on rank 0, and ``everywhere`` if
        this rank wants it too; None elsewhere.

        The copy is ``into`` where that lies on their device.
        """
        wanted, sharded = everywhere or self._engine.rank == 0, self._engine.is_sharded
        if self._tensors is not None and not wanted and self._engine.rank < self._tensors.size:
            for spec in bucket:
                self._tensors.whole(spec.name, self._parameters[spec.name])
            return None
        if not sharded and not wanted:
            return None
        dtype, numels = getattr(torch, bucket[0].dtype), [spec.numel for spec in bucket]
        # A copy: the next update may run before the last of it is on the wire.
        flat = self._room(sum(numels), dtype, into) if wanted else None
        if sharded and not everywhere:
            self._engine.collect(numels, self._parts(bucket), dtype, flat)
        elif flat is not None:
            for spec, place in zip(bucket, torch.split(flat, numels), strict=True):
                with self._engine.gathered(self._sources(spec.name)) as (weight, *_):
                    place.copy_(self._merged(spec.name, weight, dtype).reshape(-1))
        return flat

    def shards(self, bucket: Sequence[TensorSpec]) -> list[Tensor]:
        """This rank's part of each tensor, flat, as ``LearnerRank.shards`` defines it."""
        if self._engine.is_sharded:
            return list(self._parts(bucket))
        if self._engine.rank != 0:
            return []
        weights = [(spec.name, self._parameters[spec.name].detach()) for spec in bucket]
        return [self._merged(name, weight, weight.dtype).reshape(-1) for name, weight in weights]

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter alone; rank 0 writes."""
        assert self._adapter is not None
        state: dict[str, Tensor] = {}
        for name, parameter in self._adapter.trained.items():
            with self._engine.gathered([parameter]) as (whole,):
                if self._engine.rank == 0:
                    state[name] = whole.to("cpu", copy=True)
        if self._engine.rank == 0:
            self._adapter.save(folder, state)

    def _room(self, numel: int, dtype: torch.dtype, into: Tensor | None) -> Tensor:
        device = next(iter(self._parameters.values())).device
        if into is not None and into.device == device:
            return into
        return torch.empty(numel, dtype=dtype, device=device)

    def _sources(self, name: str) -> list[nn.Parameter]:
        """What a tensor is made of."""
        pair = self._pairs.get(name)
        return [self._parameters[name], *(pair.parameters if pair is not None else ())]

    def _merged(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A whole tensor with its adapter, which is gathered: ``weight`` itself where it has none.

        Collective where ranks divide layers.
        """
        pair = self._pairs.get(name)
        if self._tensors is not None:
            weight = self._tensors.whole(name, weight)
        return weight if pair is None else pair.merge(weight, dtype)

    def _parts(self, bucket: Sequence[TensorSpec]) -> Iterator[Tensor]:
        """This rank's part of each tensor, with padding at the end of the last ones; collective."""
        for spec in bucket:
            weight, *adapter = self._sources(spec.name)
            # What is merged into stays where it is.
            with self._engine.gathered(adapter):
                yield self._with_delta(spec.name, self._engine.part(weight))

    def _with_delta(self, name: str, own: Tensor) -> Tensor:
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
