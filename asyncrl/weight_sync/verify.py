"""Checksums of weights: equal for equal bits, wherever and in whatever pieces they are computed.

A tensor's bytes are read as 32-bit words w_0, w_1, ... Two sums over them, sum(w_i) and
sum((i + 1) w_i), wrap around in int64; hashed with name, shape and dtype they name the state. The
first notices any single change, the second any exchange of two words. Against accidents, not
against an adversary.

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

_WORD = 4
_CPU_CHUNK = 1 << 16
"""Words summed at a time on a CPU: a chunk and its int64 copy stay in the second-level cache."""
_DEVICE_CHUNK = 1 << 22
"""Words summed at a time elsewhere: enough to fill the device, 32 MiB as int64."""


def tensor_checksum(tensor: Tensor) -> tuple[int, int]:
    """Plain and position-weighted sum of a tensor's 32-bit words, both as wrapped int64."""
    plain, weighted = _sums(tensor).tolist()
    return plain, weighted


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
            for facts, (plain, weighted) in sorted(lines):
                digest.update(f"{facts}|{plain}|{weighted}\n".encode())
        return digest.hexdigest()


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """(2,) int64, on the tensor's device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // _WORD * _WORD
    chunk = _CPU_CHUNK if data.device.type == "cpu" else _DEVICE_CHUNK
    if data.storage_offset() % _WORD:
        # A view as words needs aligned bytes; a slice of a bucket may start between two.
        data = data.clone()
    words = data[:whole].view(torch.int32)
    position = _positions(chunk, data.device)
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, len(words), chunk):
        block = words[start : start + chunk].to(torch.int64)
        plain = block.sum()
        total[0] += plain
        total[1] += block.mul_(position[: len(block)]).sum() + plain * start
    if whole < data.numel():
        # The last one to three bytes make one more word.
        shifts = torch.arange(data.numel() - whole, device=data.device) * 8
        word = (data[whole:].to(torch.int64) << shifts).sum()
        total += torch.stack([word, word * (len(words) + 1)])
    return total


@lru_cache(maxsize=4)
def _positions(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device)
