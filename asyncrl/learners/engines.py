"""The seam under a rank that trains: an engine has its share of model and optimizer, and steps the two.

What a rank computes (losses, micro-batches, schedules, skipped steps) is the same above every engine.
``deepspeed_engine`` and ``fsdp_engine`` implement it.

Invariants:
- Every rank gets the same calls in the same order. One engine a process.
- An update whose gradient is not finite, on any rank, is skipped on every rank: parameters and optimizer
  state keep their bits.
- The learning rate is that of the call; an engine holds no schedule.
- Sums and maxima over the step count each sample once, whoever shares its work.
- Parameters, float32 masters, moments and their number of updates are all of its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import Dtype, EngineSection
from asyncrl.learners.rank_group import RankGroup
from asyncrl.learners.state_files import Part
from asyncrl.learners.tensor import TensorParallel


class TrainingEngine(Protocol):
    """A model that is trained by its ranks together: ``prepare``, then ``build``, then the rest."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def module(self) -> Any:
        """The model itself."""
        ...

    @property
    def optimizer(self) -> Any:
        """torch's optimizer, or what the engine wraps around it."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of every parameter, or all of them."""
        ...

    @property
    def replicas(self) -> int:
        """How many groups of ranks train samples of their own."""
        ...

    @property
    def sharing(self) -> Any:
        """The process group of the ranks with the same samples, once built; None where each has its own."""
        ...

    @property
    def tensors(self) -> TensorParallel | None:
        """Which part of the parameters this rank has, where ranks divide layers, once built."""
        ...

    def prepare(self) -> None:
        """Make the process ready; before the model is loaded."""
        ...

    def build(self, model: nn.Module) -> None:
        """Meet the other ranks, and take the model over; collective. What needs no gradient is frozen.

        Raises ConfigError for layers that cannot be divided among ranks.
        """
        ...

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass; collective where parameters are sharded."""
        ...

    def accumulate(self, *, last: bool) -> None:
        """Before the forward pass of each micro-batch: whether it is the update's last."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch: this rank's share of the update's loss, a scalar."""
        ...

    def update(self, lr: float) -> tuple[float, bool]:
        """Apply the gradient; its norm before clipping, and whether it was skipped; collective."""
        ...

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[list[Tensor]]:
        """Whole parameters, in the dtype that the model computes in, valid inside the block alone.

        Collective where parameters are sharded; to be read only.
        """
        ...

    def part(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a sharded parameter, flat, as it lies in memory.

        Of one size on every rank: in the order of the ranks they are the parameter and some padding.
        """
        ...

    def collect(
        self, numels: Sequence[int], parts: Iterable[Tensor], dtype: torch.dtype, whole: Tensor | None
    ) -> None:
        """Bring all ranks' parts of some tensors into ``whole`` on rank 0, as ``gathering.collect`` does."""
        ...

    def local_parameters(self) -> list[Tensor]:
        """This rank's own part of each parameter, as it lies in memory, in the model's order.

        After writing to them, ``drop_gathered``.
        """
        ...

    def local_parts(self) -> list[Part]:
        """Which part of its parameter each of ``local_parameters`` is; padding is behind its ``numel``."""
        ...

    def drop_gathered(self) -> None:
        """Have the next forward pass gather every parameter anew, where parameters are sharded."""
        ...

    def offload(self) -> None:
        """Move weights, masters and moments to host memory; until ``reload``, only its state can be copied.

        Nothing, where they lie there already, or the engine cannot.
        """
        ...

    def reload(self) -> None:
        """Move them back; no effect where they are there."""
        ...

    def copy_state(self, *, weights_only: bool = False) -> None:
        """Copy this rank's part of the state, or of the weights alone, between two updates."""
        ...

    def write_state(self, folder: Path) -> list[FileEntry]:
        """Write what was copied last into ``folder``, in any thread, also while updates run."""
        ...

    def load_state(self, folder: Path) -> None:
        """Go on from what ranks of any engine wrote into ``folder``; collective. Raises CheckpointError."""
        ...

    def all_sum(self, values: Tensor) -> None:
        """Sum over the replicas, in place; collective."""
        ...

    def all_max(self, values: Tensor) -> None:
        """Maximum over the replicas, in place; collective."""
        ...

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all replicas, (N,) each, any N: one tensor, padded with infinity; collective."""
        ...

    def close(self) -> None:
        """Leave the other ranks. Safe to call twice."""
        ...


def make_engine(
    settings: EngineSection,
    section: str,
    *,
    dtype: Dtype,
    rank: int,
    world_size: int,
    master: tuple[str, int],
    deterministic: bool = False,
    shared: int = 1,
    tensor_parallel: int = 1,
) -> TrainingEngine:
    """The engine that ``settings.backend`` names.

    ``section`` is the settings' name in the config, for messages. ``master`` is host and port where the
    ranks meet; rank 0 listens there, on that address alone. ``shared``: ranks that follow each other in
    number and train the same samples, a part of the work each; with ``tensor_parallel``, those divide the
    layers. Both are DeepSpeed's alone. Raises ConfigError for a device that is not there.
    """
    group = RankGroup(settings, section, rank=rank, world_size=world_size, master=master, shared=shared)
    if settings.backend == "fsdp2":
        from asyncrl.learners.fsdp_engine import FsdpEngine

        return FsdpEngine(settings, group, dtype=dtype, deterministic=deterministic)
    from asyncrl.learners.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(
        settings, group, dtype=dtype, deterministic=deterministic, tensor_parallel=tensor_parallel
    )
