"""The two Protocols of the learning side: one rank, and the group of ranks that the controller sees.

``LearnerRank`` is a plain object in one process, SPMD over the ranks: every rank gets the same calls
in the same order. ``Learner`` is what the controller awaits: ``learners/group.py`` implements it over
Ray actors, ``learners/scripted.py`` over a script.

Invariants:
- No token with lag > max_staleness gets past ``LearnerRank.step``: it raises StalenessError, or masks
  the token out of the loss where it was told to (``at_bound: mask``).
- The gradient of a step does not depend on how its samples were split over ranks and micro-batches.
- An update whose loss or gradient is not finite changes neither parameters nor optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.checkpoint.files import FileEntry
from asyncrl.types import Batch, Float32Array, Metrics, Trajectory
from asyncrl.weight_sync.base import AdapterSpec, Channel, Manifest, PushGroupSpec, TensorSpec

if TYPE_CHECKING:
    import torch

    from asyncrl.weight_sync.sharing import SharedModel


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One trajectory of an update with the advantage of its answer."""

    ordinal: int
    trajectory: Trajectory
    advantage: float
    masked: bool = False
    """Whether tokens beyond the staleness bound were masked out of it."""
    token_advantages: Float32Array | None = None
    """(T,) in place of ``advantage``, where advantages differ from token to token."""
    proximal: Float32Array | None = None
    """(T,) log p, where the policy has moved on since the step's start; 0 outside the loss mask."""
    reference: Float32Array | None = None
    """(T,) log-probs of the reference policy, where the run has one; 0 outside the loss mask."""
    kl: Float32Array | None = None
    """(T,) KL to the reference that comes off the reward of each token; 0 outside the loss mask."""
    values: Float32Array | None = None
    """(T,) values of the critic, where the run has one; 0 outside the loss mask."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer update within a step, with what its loss is normalised by, over all ranks."""

    micro_batches: tuple[tuple[int, ...], ...]
    """Indices into the rank's samples; an empty one is a dummy with zero weight."""
    loss_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's share of an update. Every rank has the same number of micro-batches; ranks that share each
    sequence, or each layer, have the same ones.

    ``micro_batches`` index into ``samples``; an empty one is a dummy with zero weight.
    """

    version: int
    samples: tuple[TrainSample, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    loss_tokens: int
    """Tokens with loss_mask 1 in the whole step, over all ranks."""
    sequences: int
    """Trajectories in the whole step, over all ranks."""
    mini_batches: tuple[MiniBatch, ...] = ()
    """The same micro-batches in several optimizer updates, one after the other; () for a single one."""
    kl_coef: float = 0.0
    """Factor of the KL to the reference, in loss or reward."""

    @property
    def whole(self) -> MiniBatch:
        """All of it as one optimizer update."""
        return MiniBatch(self.micro_batches, self.loss_tokens, self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an update did. ``skipped``: not finite, nothing moved; ``metrics`` say why."""

    skipped: bool
    metrics: Metrics
    train_s: float = 0.0
    ranks: tuple[tuple[float, float], ...] = ()
    """(begun, ended) of each rank's own part, by the clock of the controller's loop; () where not known."""
    recorded: bool = False
    """Whether the batch was only to be put on record: nothing trains, and no other is tried in its place."""


def finite(metrics: Metrics) -> Metrics:
    """Metrics without those that are not finite: a file of JSON has no way to write them."""
    return {name: value for name, value in metrics.items() if isfinite(value)}


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """Facts that are known once the learner stands."""

    manifest: Manifest
    """What a push sends."""
    parameters: int
    """Of the model, whatever of it is trained."""
    store: tuple[str, int] | None = None
    """Host and port of the TCPStore, on rank 0, where push groups meet."""
    adapters: tuple[AdapterSpec, ...] = ()
    """With pushes of adapters alone, what receivers make of the manifest's tensors."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """The sending half of one push."""

    version: int
    checksum: str
    nbytes: int
    send_s: float
    extra: Metrics = field(default_factory=dict)


class LearnerRank(Protocol):
    """One rank of the learner, in one process."""

    def start(self) -> LearnerInfo: ...

    def step(self, share: RankStep) -> StepResult:
        """One step, of one or several optimizer updates; collective. Metrics are reduced over ranks.

        Where an update is not finite, those that would follow it in the step are left out; the step
        counts as skipped if that was the first.

        Raises StalenessError if any trained token is older than max_staleness.
        """
        ...

    def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T, each given those before it, at temperature 1.

        By the forward pass that training uses; collective, and the same on every rank. Changes nothing.
        """
        ...

    def gather_bucket(
        self, bucket: Sequence[TensorSpec], into: torch.Tensor | None = None, *, everywhere: bool = False
    ) -> torch.Tensor | None:
        """The bucket's tensors, cast to their travelling dtype, as one flat tensor on rank 0.

        Written to ``into``, a flat tensor of their size and dtype, if that lies where they do.
        ``everywhere``: this rank wants it too, whatever its number.

        Collective where parameters are sharded (one bucket gathered at a time), and where ranks divide layers
        (one tensor at a time); None on other ranks.
        """
        ...

    def shards(self, bucket: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """This rank's own part of each tensor, flat, as it lies in memory: valid until the next update.

        Where parameters are sharded (ZeRO 3, FSDP2), parts of one size on every rank: put together in the
        order of the ranks they are the tensor and some padding. Else the whole tensors on rank 0 and []
        elsewhere. With adapters they are copies, merged, and the call is collective for shards. Not where
        ranks divide layers: none has whole tensors then, or runs of them.
        """
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full fp32 (or bf16) parameters by Hugging Face name; collective."""
        ...

    def share(self) -> SharedModel:
        """A model for an engine in this process, over the parameters that this rank trains.

        Not with shards or adapters, where no whole weights lie in memory.
        """
        ...

    def offload(self) -> None:
        """Move weights, masters and moments from the device to host memory, for a generator to have the
        device; until ``reload``, only copying the state works. Collective; no effect on a CPU's own memory.
        """
        ...

    def reload(self) -> None:
        """Move them back; no effect where they are there."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder (safetensors, config, tokenizer); rank 0 writes."""
        ...

    def copy_state(self, *, weights_only: bool = False) -> None:
        """Copy this rank's part of parameters and optimizer state, between two updates."""
        ...

    def write_state(self, folder: Path) -> list[FileEntry]:
        """Write what was copied last; in any thread, beside updates. Paths are relative to ``folder``."""
        ...

    def load_state(self, folder: Path) -> None:
        """Go on from what any number of ranks wrote; collective. Raises CheckpointError."""
        ...

    def close(self) -> None: ...


class Learner(Protocol):
    """All ranks together, as the controller sees them."""

    async def start(self) -> LearnerInfo: ...

    async def step(self, batch: Batch) -> StepResult: ...

    async def open_push_group(self, spec: PushGroupSpec, channel: Channel = "generators") -> None:
        """Rank 0 joins the channel's group as rank 0, leaving an earlier one; receivers join meanwhile."""
        ...

    async def copy_out(self, version: int) -> float:
        """Copy the weights out between two updates, as ``version``; seconds of the slowest rank.

        Only with ``weight_sync.overlap``: every ``push`` then sends what was copied out last, and may
        run beside later updates.
        """
        ...

    async def push(self, version: int, channel: Channel = "generators") -> PushReport:
        """Send ``version`` to the receivers of ``channel``. Raises WeightSyncError."""
        ...

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T by the weights of now, at temperature 1.

        Between two updates: it waits for one that runs, and the next waits for it.
        """
        ...

    async def offload(self) -> None:
        """Leave the device to the generators beside the ranks: between two updates, after the push.

        Until ``reload``, nothing but ``copy_state``, ``write_state`` and ``close`` may be asked for.
        """
        ...

    async def reload(self) -> None:
        """Take the device back; no effect where it was not left."""
        ...

    async def checksum(self) -> str:
        """Checksum of the full parameters, equal for equal bits whatever the number of ranks."""
        ...

    async def export(self, folder: Path) -> None: ...

    async def copy_state(self, *, weights_only: bool = False) -> None:
        """Copy parameters and optimizer state, between two updates: what training stands still for.

        ``weights_only``: the policy's parameters alone, which nobody can go on from.
        """
        ...

    async def write_state(self, folder: Path) -> list[FileEntry]:
        """Write what was copied last into a checkpoint's folder; updates may run beside it.

        The files are on disk on return; their paths are relative to ``folder``. Raises OSError.
        """
        ...

    async def load_state(self, folder: Path) -> None:
        """Go on from a checkpoint's folder, before the first update. Raises CheckpointError."""
        ...

    async def close(self) -> None: ...
