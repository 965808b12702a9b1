"""Inside vLLM's workers: weights arrive in a staging area and are loaded between two steps.

Every worker of every replica is a rank of the push group and receives all tensors, by their Hugging
Face names; vLLM's own loaders map the names and cut out the worker's shard.

Invariants:
- Nothing here waits for the network on the thread that runs the model: see ``StagingReceiver``.
- What the worker computes with is what was received: the checksum is of the tensors that are loaded. How
  they are loaded is ``vllm_loading``'s matter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.errors import WeightSyncError
from asyncrl.generators.vllm_loading import choose_loading
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec
from asyncrl.weight_sync.staging import StagingReceiver

# It warns at each push of layers that have buffers alone; for parameters that are missing we look.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """A ``PushGroupSpec`` as plain values, with the rank of the replica's first worker."""

    spec: dict[str, Any]


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """Load what is staged, which has to be this version."""

    version: int


def spec_to_plain(spec: PushGroupSpec) -> dict[str, Any]:
    """The spec as values that vLLM's messages can carry."""
    return asdict(spec)


def spec_from_plain(plain: Mapping[str, Any], offset: int) -> PushGroupSpec:
    """The spec of the worker that stands ``offset`` ranks after the replica's first."""
    manifest = tuple(
        TensorSpec(entry["name"], tuple(entry["shape"]), entry["dtype"]) for entry in plain["manifest"]
    )
    spec = PushGroupSpec(**{**plain, "manifest": manifest})
    return replace(spec, rank=spec.rank + offset)


class StagedWeightTransfer(WeightTransferEngine[JoinInfo, LoadInfo]):
    """vLLM's weight transfer over a ``PushGroup``, received in a thread."""

    init_info_cls = JoinInfo
    update_info_cls = LoadInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver = StagingReceiver(self._build, self.device)
        self._loading = choose_loading(self.model, self.vllm_config, self.device)
        self._built: int | None = None
        self.commit_s = 0.0
        """Seconds of the last commit, in which the worker computed nothing."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Start to join the push group, and then stand ready to receive: orders and outcomes go through
        its store."""
        self._built = None
        self.receiver.join(spec_from_plain(init_info.spec, self.parallel_config.rank))

    def _build(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._built = None
        self._loading.build(tensors)
        self._built = version

    def start_weight_update(self) -> None:
        """Nothing: loading opens and closes what it needs itself."""

    def release(self) -> None:
        """Give back the memory of the staging area: what was in it has been loaded."""
        self.receiver.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Make the built version the one that the worker computes with."""
        if self._built != update_info.version:
            held = "nothing" if self._built is None else f"version {self._built}"
            raise WeightSyncError(f"asked to load version {update_info.version}, but {held} is staged")
        began = time.perf_counter()
        self._built = None
        self._loading.commit()
        self.commit_s = time.perf_counter() - began

    def finish_weight_update(self) -> None:
        """Nothing, as at the start."""

    def shutdown(self) -> None:
        self.receiver.close()


class StagingWorker:
    """Mixed into vLLM's worker class: what its weight transfer interface has no call for."""

    if TYPE_CHECKING:
        weight_transfer_engine: StagedWeightTransfer | None

        def start_weight_update(self) -> None: ...
        def update_weights(self, update_info: dict[str, Any]) -> None: ...
        def finish_weight_update(self) -> None: ...

    def asyncrl_load(self, version: int, release: bool) -> float:
        """A whole weight update with what was built; returns the seconds that it took.

        The three calls of vLLM's interface in one: a trip between the processes for each would be
        time that generation stands still. ``release``: the staging area's memory is given back.
        """
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        transfer = self._asyncrl_transfer()
        if release:
            transfer.release()
        return transfer.commit_s

    def asyncrl_free_bytes(self) -> int:
        """Memory of the device that nobody has; 0 for a CPU, whose memory is not the worker's own."""
        device = self._asyncrl_transfer().device
        return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0

    def _asyncrl_transfer(self) -> StagedWeightTransfer:
        engine = self.weight_transfer_engine
        if engine is None:
            raise WeightSyncError("the worker has no weight transfer: was the engine started by asyncrl?")
        return engine
