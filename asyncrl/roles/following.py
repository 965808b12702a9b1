"""Weights that follow the policy's: the receiving half of a push, in the process of one reference.

Invariants:
- What is computed with changes in ``take`` alone, all of it between two groups; a push that fails has
  changed nothing.
- Averages are kept in float32, whatever the model computes in: in bfloat16 a step below 2^-8 of a value
  rounds to nothing.
- The room that a version arrives in is there from its push until it is taken.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from asyncrl.algorithms.averaging import update_average
from asyncrl.checkpoint.files import FileEntry, write_file
from asyncrl.errors import CheckpointError, ConfigError, WeightSyncError
from asyncrl.roles.base import Received
from asyncrl.weight_sync.base import Manifest, PushGroupSpec
from asyncrl.weight_sync.broadcast import PushGroup, Staging, make_staging

_WEIGHTS = "weights.safetensors"


class FollowingWeights:
    """The parameters of ``model``, by Hugging Face name, and the push group that others arrive on."""

    def __init__(self, model: nn.Module) -> None:
        self.version = 0
        """The policy version whose weights were taken last; 0: none yet."""
        self._parameters = {name: p.detach() for name, p in model.named_parameters()}
        self._average: dict[str, Tensor] = {}
        """In float32, where the parameters are in less and an average was asked for."""
        self._group: PushGroup | None = None
        self._staged: tuple[int, Staging] | None = None
        self._copied: dict[str, Tensor] = {}

    def join(self, spec: PushGroupSpec) -> None:
        """Leave an earlier group and join this one. Raises ConfigError, WeightSyncError."""
        self.leave()
        self._require_fit(spec.manifest)
        self._group = PushGroup(spec)

    def receive(self, version: int) -> Received:
        """Lay ``version`` ready. Raises WeightSyncError."""
        if self._group is None:
            raise WeightSyncError(f"asked to receive version {version} before joining a push group")
        self._staged = None
        staging = make_staging(self._group.buckets, self._group.device)
        checksum = self._group.receive(version, staging)
        self._staged = version, staging
        return Received(checksum, self.version)

    @torch.no_grad()
    def take(self, version: int, decay: float) -> None:
        """Weights <- decay weights + (1 - decay) what lies ready; see ``FollowingWorker.take``."""
        if decay > 0 and version == self.version:
            return
        if self._staged is None or self._staged[0] != version:
            held = "nothing" if self._staged is None else f"version {self._staged[0]}"
            raise WeightSyncError(f"asked to take version {version}, but {held} lies ready")
        arrived = self._staged[1].tensors
        for name, parameter in self._parameters.items():
            if decay > 0:
                mean = self._in_float32(name)
                update_average([mean], [arrived[name].to(mean.device)], decay)
                if mean is not parameter:
                    parameter.copy_(mean)
            else:
                parameter.copy_(arrived[name])
        if decay == 0:
            self._average.clear()
        self._staged = None
        self.version = version

    def copy_state(self) -> None:
        """Copy the weights, of averages what they are in float32."""
        self._copied = {n: self._average.get(n, p).to("cpu", copy=True) for n, p in self._parameters.items()}

    def write_state(self, folder: Path) -> list[FileEntry]:
        """Write what was copied as ``weights.safetensors``, in any thread."""
        folder.mkdir(parents=True, exist_ok=True)
        return [write_file(folder, _WEIGHTS, save(self._copied))]

    @torch.no_grad()
    def load_state(self, folder: Path, version: int) -> None:
        """Take over what was written of ``version``. Raises CheckpointError where it is of another model."""
        stored = load_file(folder / _WEIGHTS)
        own = {name: tuple(p.shape) for name, p in self._parameters.items()}
        found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        if own != found:
            differing = sorted(n for n in own.keys() | found.keys() if own.get(n) != found.get(n))
            first = differing[0]
            raise CheckpointError(
                f"{folder / _WEIGHTS} is of another reference: {len(differing)} tensors differ, the first is "
                f"{first} with shape {found.get(first)}, expected {own.get(first)}"
            )
        self._average = {}
        for name, parameter in self._parameters.items():
            parameter.copy_(stored[name])
            if stored[name].dtype != parameter.dtype:
                self._average[name] = stored[name].to(parameter.device, torch.float32)
        self.version = version

    def leave(self) -> None:
        """Leave the group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _in_float32(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if parameter.dtype == torch.float32:
            return parameter
        if name not in self._average:
            self._average[name] = parameter.float()
        return self._average[name]

    def _require_fit(self, manifest: Manifest) -> None:
        own = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        sent = {spec.name: spec.shape for spec in manifest}
        if own == sent:
            return
        differing = sorted(name for name in own.keys() | sent.keys() if own.get(name) != sent.get(name))
        first = differing[0]
        raise ConfigError(
            "reference.refresh_every: found a reference that cannot take the policy's weights: "
            f"{len(differing)} tensors differ, the first is {first} with shape {own.get(first)} in the "
            f"reference and {sent.get(first)} in the policy; expected a reference.path of the policy's "
            "architecture, or refresh_every 0"
        )
