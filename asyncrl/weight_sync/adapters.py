"""Pushes of adapters alone: A and B of each adapted weight travel, and receivers merge them themselves.

Invariants:
- A merged weight is W + scaling * B @ A, computed in float32 and rounded once. W is that of the start model,
  of which a receiver keeps a copy: nothing is ever merged into what was merged before.
- Sender and receivers merge by ``low_rank_delta`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.weight_sync.base import AdapterSpec, Manifest


@torch.no_grad()
def low_rank_delta(a: Tensor, b: Tensor, scaling: float, *, transposed: bool) -> Tensor:
    """What an adapter adds to a weight: (rank, in), (out, rank) -> (out, in), or (in, out); float32."""
    product = b.float() @ a.float()
    return (product.T if transposed else product) * scaling


class AdapterMerger:
    """Keeps ``start``, the start model's tensors by name, and merges what arrives into a copy of them.

    ``manifest`` and ``adapters`` are those of the push group. Costs the memory of one more model.
    """

    def __init__(
        self, start: Mapping[str, Tensor], manifest: Manifest, adapters: Sequence[AdapterSpec]
    ) -> None:
        self._start = {name: tensor.clone() for name, tensor in start.items()}
        self._adapters = {adapter.weight: adapter for adapter in adapters}
        self.room = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in manifest
        }
        """Where the adapters' tensors arrive."""

    @torch.no_grad()
    def merge(self, into: Mapping[str, Tensor]) -> None:
        """Fill ``into``, tensors by name as in the start model, from what lies in ``room``."""
        for name, target in into.items():
            weight, adapter = self._start[name], self._adapters.get(name)
            if adapter is None:
                target.copy_(weight)
                continue
            a, b = (self.room[part].to(weight.device) for part in (adapter.a, adapter.b))
            delta = low_rank_delta(a, b, adapter.scaling, transposed=adapter.transposed)
            target.copy_(weight.float() + delta)
        if any(target.is_cuda for target in into.values()):
            torch.cuda.synchronize()  # whoever swaps does so on another stream
