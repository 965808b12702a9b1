"""Checksums of weights: equal for equal bits, wherever and in whatever pieces they are computed.

Each tensor has a digest of its bytes, and the state is named by a hash of these with names, shapes and
dtypes. Two methods, against accidents and not against an adversary:

- ``xxh3``: XXH3-128 by the xxhash library, some 10 GB/s on one core. Reads host memory.
- ``sums``: for tensors that are on a GPU, where it runs at the speed of the memory. The bytes are read as
  64-bit words w, mixed as v = w ^ (w >> 17), laid out in rows of 512. Three sums over them wrap around in
  int64: of all words, of the rows' sums weighted by the row's number, and of the columns' sums weighted by
  the column's. The first notices any single change, the others any exchange of two words; the mixing keeps
  changes of one bit in every word, as of all signs, from cancelling.

Invariants:
- Depends on bits alone: -0.0 and 0.0 differ, and equal NaNs are equal.
- Does not depend on the device, on the order of the tensors, or on how they were cut into buckets; but two
  methods give two checksums, so whoever compares names one.
- Digests are computed when a tensor is added: its memory may be reused at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import torch
import xxhash
from torch import Tensor

from asyncrl.errors import InvariantError

Method = Literal["xxh3", "sums"]

_ROW = 512
"""Words of 8 bytes in a row."""
_ROW_BYTES = 8 * _ROW
_CPU_ROWS = 512
"""Rows summed at a time on a CPU: 2 MiB and their mixture stay in its caches."""
_DEVICE_ROWS = 1 << 13
"""Rows summed at a time elsewhere: enough to fill the device, 32 MiB."""


def tensor_checksum(tensor: Tensor, method: Method = "xxh3") -> tuple[int, ...]:
    """A tensor's digest, as signed words of 64 bits: XXH3's two; or the sums, plain, by row and by column."""
    return tuple(_DIGESTS[method](tensor).tolist())


def state_checksum(state: Iterable[tuple[str, Tensor]], method: Method = "xxh3") -> str:
    """Checksum of named tensors: 32 hexadecimal digits."""
    builder = ChecksumBuilder(method)
    for name, tensor in state:
        builder.add(name, tensor)
    return builder.hexdigest()


class ChecksumBuilder:
    """A ``state_checksum`` of tensors that arrive one at a time."""

    def __init__(self, method: Method = "xxh3") -> None:
        self._digest = _DIGESTS[method]
        self._found: dict[str, tuple[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one whole tensor. Raises InvariantError for a name that was added before."""
        if name in self._found:
            raise InvariantError(f"tensor {name!r} was added twice to one checksum, expected once")
        facts = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}"
        self._found[name] = (facts, self._digest(tensor))

    def hexdigest(self) -> str:
        """The checksum of all tensors so far; more may be added after it."""
        state = hashlib.blake2b(digest_size=16)
        if self._found:
            # One transfer from the device for all tensors, not one each.
            digests = torch.stack([digest for _, digest in self._found.values()]).tolist()
            lines = zip((facts for facts, _ in self._found.values()), digests, strict=True)
            for facts, words in sorted(lines):
                state.update(f"{'|'.join([facts, *map(str, words)])}\n".encode())
        return state.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _xxh3(tensor: Tensor) -> Tensor:
    """(2,) int64, in host memory. Other threads run meanwhile."""
    digest = xxhash.xxh3_128_digest(_bytes(tensor).cpu().numpy().data)
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """(3,) int64, on the tensor's device."""
    data = _bytes(tensor)
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


_DIGESTS = {"xxh3": _xxh3, "sums": _sums}
