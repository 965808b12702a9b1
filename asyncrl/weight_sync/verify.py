"""Checksums of weights: equal for equal bits, wherever and in whatever pieces they are computed.

A tensor's bytes are read as 64-bit words w, mixed as v = w ^ (w >> 17), laid out in rows of 512. Three sums
over them wrap around in int64: of all words, of the rows' sums weighted by the row's number, and of the
columns' sums weighted by the column's. Hashed with name, shape and dtype they name the state. The first
notices any single change, the others any exchange of two words; the mixing keeps changes of one bit in every
word, as of all signs, from cancelling. Plain sums along rows and columns run several times faster than a
weight for each word. Against accidents, not against an adversary.

Invariants:
- Depends on bits alone: -0.0 and 0.0 differ, and equal NaNs are equal.
- Does not depend on the device, on the order of the tensors, or on how they were cut into buckets.
- Sums are computed when a tensor is added: its memory may be reused at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from asyncrl.errors import InvariantError

_ROW = 512
"""Words of 8 bytes in a row."""
_ROW_BYTES = 8 * _ROW
_CPU_ROWS = 512
"""Rows summed at a time on a CPU: 2 MiB and their mixture stay in its caches."""
_DEVICE_ROWS = 1 << 13
"""Rows summed at a time elsewhere: enough to fill the device, 32 MiB."""


def tensor_checksum(tensor: Tensor) -> tuple[int, int, int]:
    """The sums of a tensor's words: plain, weighted by row, weighted by column; wrapped int64."""
    plain, by_row, by_column = _sums(tensor).tolist()
    return plain, by_row, by_column


def state_checksum(state: Iterable[tuple[str, Tensor]]) -> str:
    """Checksum of named tensors: 32 hexadecimal digits."""
    builder = ChecksumBuilder()
    for name, tensor in state:
        builder.add(name, tensor)
    return builder.hexdigest()


class ChecksumBuilder:
    """A ``state_checksum`` of tensors that arrive one at a time."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one whole tensor. Raises InvariantError for a name that was added before."""
        if name in self._sums:
            raise InvariantError(f"tensor {name!r} was added twice to one checksum, expected once")
        facts = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}"
        self._sums[name] = (facts, _sums(tensor))

    def hexdigest(self) -> str:
        """The checksum of all tensors so far; more may be added after it."""
        digest = hashlib.blake2b(digest_size=16)
        if self._sums:
            # One transfer from the device for all tensors, not one each.
            sums = torch.stack([s for _, s in self._sums.values()]).tolist()
            lines = zip((facts for facts, _ in self._sums.values()), sums, strict=True)
            for facts, (plain, by_row, by_column) in sorted(lines):
                digest.update(f"{facts}|{plain}|{by_row}|{by_column}\n".encode())
        return digest.hexdigest()


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """(3,) int64, on the tensor's device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        # A view as words needs aligned bytes; a slice of a bucket may start between two.
        data = data.clone()
    whole = data.numel() // _ROW_BYTES * _ROW_BYTES
    rows = data[:whole].view(torch.int64).view(-1, _ROW)
    rest = data.numel() - whole
    last = torch.zeros(_ROW_BYTES if rest else 0, dtype=torch.uint8, device=data.device)
    last[:rest] = data[whole:]
    at_a_time = _CPU_ROWS if data.device.type == "cpu" else _DEVICE_ROWS
    numbers = _numbers(max(at_a_time, _ROW), data.device)
    mixture = torch.empty(min(at_a_time, max(len(rows), 1)), _ROW, dtype=torch.int64, device=data.device)
    plain, by_row = torch.zeros(2, dtype=torch.int64, device=data.device)
    columns = torch.zeros(_ROW, dtype=torch.int64, device=data.device)
    blocks = [*torch.split(rows, at_a_time), last.view(torch.int64).view(-1, _ROW)]
    start = 0
    for block in blocks:
        if not len(block):
            continue
        mixed = torch.bitwise_right_shift(block, 17, out=mixture[: len(block)]).bitwise_xor_(block)
        columns += mixed.sum(0)
        sums = mixed.sum(1)
        total = sums.sum()
        plain += total
        by_row += sums.mul_(numbers[: len(block)]).sum() + total * start
        start += len(block)
    return torch.stack([plain, by_row, columns.mul_(numbers[:_ROW]).sum()])


@lru_cache(maxsize=4)
def _numbers(count: int, device: torch.device) -> Tensor:
    """1, 2, ... (count,)."""
    return torch.arange(1, count + 1, dtype=torch.int64, device=device)
