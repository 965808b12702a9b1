"""Keys and values in fixed slots, behind the ``Cache`` interface of transformers.

Invariants:
- Memory is a pair of tensors a layer, (slots, kv_heads, max_sequence, head_dim). It is held from the start,
  but for the time between ``release`` and ``allocate``, in which nothing may run.
- Each row is written at its own position. What lies beyond a row's position is never read, but
  has to be finite, since a masked score is multiplied by it: memory starts as zeros.
- A forward pass sees the slots through a view: ``PrefillView`` for many tokens of fresh rows,
  ``DecodeView`` for one token of running ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

TensorPair = tuple[torch.Tensor, torch.Tensor]


class SlotKV:
    """The storage. ``shapes`` holds, for each layer, (kv_heads, head_dim) of its keys and values."""

    def __init__(
        self,
        shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        *,
        slots: int,
        max_sequence: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = [shape for pair in shapes for shape in pair]
        self._slots = slots
        self._dtype = dtype
        self._device = device
        self._blocks: list[torch.Tensor] = []
        self.layers: list[TensorPair] = []
        self.max_sequence = max_sequence
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, as zeros; no effect where it is held already."""
        if self._blocks:
            return

        def zeros(heads: int, width: int, *lead: int) -> torch.Tensor:
            shape = (*lead, self._slots, heads, self.max_sequence, width)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        flat = self._shapes
        # Rows move in as few operations as possible: layers of one shape share one tensor.
        self._blocks = (
            [zeros(*flat[0], len(flat))] if len(set(flat)) == 1 else [zeros(*shape, 1) for shape in flat]
        )
        tensors = [tensor for block in self._blocks for tensor in block.unbind(0)]
        self.layers = list(zip(tensors[0::2], tensors[1::2], strict=True))

    def release(self) -> int:
        """Give the memory back, with all that was kept in it; its bytes."""
        freed = self.nbytes
        self._blocks, self.layers = [], []
        return freed

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(block.nbytes for block in self._blocks)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give ``targets`` the first ``length`` positions of ``source``."""
        for block in self._blocks:
            kept = block[:, source, :, :length]
            for target in targets:
                block[:, target, :, :length] = kept


class _View(Cache):  # type: ignore[misc]  # transformers is untyped
    """What the models of transformers ask of a cache besides ``update``."""

    def __init__(self, kv: SlotKV) -> None:
        super().__init__(layers=[])
        self._layers = kv.layers

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self._layers)


class PrefillView(_View):
    """For one forward pass over the first L tokens of some rows, right-padded.

    ``rows`` (B,) int64 are the slots. A batch with more rows than that ends in filler rows, which
    are computed and not kept. The caller passes no mask: the model's own causal one is right,
    because padding comes after everything that is read.
    """

    def __init__(self, kv: SlotKV, rows: torch.Tensor) -> None:
        super().__init__(kv)
        self._rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> TensorPair:
        """Keep (B, kv_heads, L, head_dim) and return it: nothing comes before it."""
        keys, values = self._layers[layer_idx]
        count, length = len(self._rows), key_states.shape[2]
        keys[self._rows, :, :length] = key_states[:count]
        values[self._rows, :, :length] = value_states[:count]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class DecodeView(_View):
    """For one forward pass over one token of each of the first B slots.

    ``positions`` (B,) int64 says where each row's token stands; attention sees the first
    ``length`` positions, and the caller's mask (B, 1, 1, length) hides what a row has not reached.
    """

    def __init__(self, kv: SlotKV, rows: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        super().__init__(kv)
        self._rows = rows
        self._positions = positions
        self._length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> TensorPair:
        """Write (B, kv_heads, 1, head_dim) at each row's position; return what attention reads."""
        keys, values = self._layers[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        count = len(self._rows)
        return keys[:count, :, : self._length], values[:count, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0
