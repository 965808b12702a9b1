"""Layers that are divided among ranks (tensor parallelism, by DeepSpeed's AutoTP): who has which slab.

DeepSpeed replaces linear layers by ones that hold some of their rows or columns, and sums up what the
ranks make of them. Here is how their parts are put together again, for all that leaves the learner.

Invariants:
- Ranks that divide layers get the same micro-batches, and compute the same logits.
- A divided parameter is a run of one dimension on each rank, in the order of the ranks: checked at the
  start, by putting every parameter together and comparing it with what was loaded, to the bit.
- At most one tensor is put together at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from asyncrl.learners.state_files import Slab
from asyncrl.weight_sync.verify import tensor_checksum


class TensorParallel:
    """This rank's place among those of ``group``, after they have divided ``module`` among them.

    ``whole`` is what every tensor was before. Collective over the group.
    """

    def __init__(self, module: nn.Module, whole: Mapping[str, WholeTensor], group: Any) -> None:
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self.shapes = {name: tensor.shape for name, tensor in whole.items()}
        """Of whole parameters, by name."""
        self._sizes: dict[str, list[int]] = {}
        self.slabs: dict[str, Slab] = {}
        """What this rank has, of each parameter that is divided."""
        found: list[Any] = [None] * self.size
        own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        dist.all_gather_object(found, own, group=group)
        for name, shape in self.shapes.items():
            dim = next((d for d, n in enumerate(shape) if own[name][d] != n), None)
            if dim is not None:
                sizes = [of_rank[name][dim] for of_rank in found]
                ends = list(accumulate(sizes, initial=0))
                self._sizes[name] = sizes
                self.slabs[name] = Slab(dim, ends[self.index], ends[self.index + 1])
        self._require_runs(module, whole)

    @torch.no_grad()
    def whole(self, name: str, parameter: Tensor) -> Tensor:
        """The whole of one parameter, on every rank of the group: itself, or a new tensor; collective."""
        slab = self.slabs.get(name)
        if slab is None:
            return parameter.detach()
        # Along the first dimension, where parts lie one after the other, all as long as the longest.
        own, sizes = parameter.detach().movedim(slab.dim, 0), self._sizes[name]
        padded = own.new_zeros((max(sizes), *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, slab.dim).contiguous()

    def _require_runs(self, module: nn.Module, whole: Mapping[str, WholeTensor]) -> None:
        name = type(module).__name__
        if not self.slabs:
            raise ConfigError(
                f"learner.tensor_parallel: found {self.size} with {name}, of whose {len(whole)} tensors "
                "DeepSpeed divides 0; expected a model that transformers has a plan for, or tensor_parallel 1"
            )
        wrong = [
            tensor
            for tensor, parameter in module.named_parameters()
            if tensor_checksum(self.whole(tensor, parameter)) != whole[tensor].checksum
        ]
        if wrong:
            raise ConfigError(
                f"learner.tensor_parallel: found {self.size} with {name}, of which DeepSpeed divides "
                f"{len(wrong)} tensors otherwise than in a row, {wrong[0]} for one: they cannot be put "
                "together for a push; expected linear layers that are not fused, or tensor_parallel 1"
            )


class WholeTensor:
    """What is remembered of a parameter before it is divided."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.checksum = tensor_checksum(tensor)


def whole_tensors(module: nn.Module) -> dict[str, WholeTensor]:
    """Every parameter of a model that nobody has divided yet."""
    return {name: WholeTensor(parameter.detach()) for name, parameter in module.named_parameters()}
