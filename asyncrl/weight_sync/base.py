"""What both halves of a weight push agree on: the manifest, its buckets, and the echo.

Invariants:
- Sender and receivers derive the same buckets from the same manifest, by ``plan_buckets`` alone.
- A version counts as live only when every receiver has echoed it with the sender's checksum.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype (as ``float32``, ``bfloat16``) of one tensor as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


Manifest = tuple[TensorSpec, ...]

Backend = Literal["gloo", "nccl", "shm", "ipc"]
"""How weights travel: broadcast between CPUs or between GPUs, or, to a process on the same device, through
memory of a CPU or of a GPU that both have open."""
BESIDE: tuple[Backend, ...] = ("shm", "ipc")
"""Those by which each learner rank sends to the generator of its own slot, and to nobody else."""
HAS_SHM = sys.platform == "linux"
"""Whether this system has what ``shm`` needs: memory without a name, and sockets without a file."""

Channel = Literal["generators", "reference"]
"""Who a push is for. A sender has one push group for each, which come and go without each other."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A weight that receivers make of the start model's and of two tensors that travel."""

    weight: str
    a: str
    """Name of A, (rank, in), in the manifest."""
    b: str
    """Name of B, (out, rank), in the manifest."""
    scaling: float
    """The weight is W + scaling * B @ A."""
    transposed: bool
    """Whether W is (in, out), as in a Conv1D, and not (out, in)."""


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> list[list[TensorSpec]]:
    """Cut the manifest, in order, into buckets of one dtype and at most ``bucket_bytes``.

    A tensor larger than ``bucket_bytes`` gets a bucket of its own.
    """
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in manifest:
        if buckets and size + spec.nbytes <= bucket_bytes and buckets[-1][0].dtype == spec.dtype:
            buckets[-1].append(spec)
            size += spec.nbytes
        else:
            buckets.append([spec])
            size = spec.nbytes
    return buckets


@dataclass(frozen=True, slots=True)
class PushGroupSpec:
    """How to join the process group of one learner rank (rank 0) and all receivers."""

    host: str
    port: int
    prefix: str
    """A new one at each rebuild, so that a late member of an old group cannot interfere."""
    rank: int
    """Of the process that joins; a replica of several workers is told that of its first."""
    world_size: int
    backend: Backend
    bucket_bytes: int
    timeout_s: float
    manifest: Manifest
    adapters: tuple[AdapterSpec, ...] = ()
    """Where the manifest's tensors are those of adapters alone, what receivers make of them."""
    slots: tuple[int, ...] = ()
    """With a backend out of ``BESIDE``: the learner ranks that have a receiver beside them."""

    def of_slot(self, slot: int, rank: int) -> PushGroupSpec:
        """How the two ends of ``slot`` meet, as sender (``rank`` 0) or receiver (1)."""
        return replace(self, prefix=f"{self.prefix}-{slot}", rank=rank, world_size=2, slots=(slot,))


@dataclass(frozen=True, slots=True)
class WeightEcho:
    """A receiver's answer after a swap."""

    version: int
    checksum: str
    pause_s: float
    """Seconds that generation stood still."""
    receive_s: float = 0.0
    """Seconds that filling the staging area took, generation going on."""


def mismatches(expected: str, echoes: Sequence[WeightEcho]) -> list[int]:
    """Indices of receivers whose checksum differs from the sender's."""
    return [i for i, echo in enumerate(echoes) if echo.checksum != expected]
