"""Inside vLLM's workers: weights arrive in a staging area and are loaded between two steps.

Every worker of every replica is a rank of the push group and receives all tensors, by their Hugging
Face names; vLLM's own loaders map the names and cut out the worker's shard.

Invariants:
- Nothing here waits for the network on the thread that runs the model: see ``StagingReceiver``.
- A load is bracketed by vLLM's layerwise reload: layers may keep their weights repacked, and take
  plain ones only between its two calls.
- What the worker computes with is what was received: the checksum is of the tensors that are loaded,
  and a parameter that none of them reached is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec
from asyncrl.weight_sync.staging import StagingReceiver

# It warns at each push of layers that have buffers alone; parameters that are missing we look for.
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
        self.receiver = StagingReceiver(self.device)
        self._names = {name for name, _ in self.model.named_parameters()}
        self.load_s: dict[str, float] = {}
        """Seconds of the last load, by phase: prepare, load, finish."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Start to join the push group; the outcome goes through its store."""
        self.receiver.join(spec_from_plain(init_info.spec, self.parallel_config.rank))

    def start_weight_update(self) -> None:
        with self._timed("prepare"):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Hand the staged tensors to vLLM's loader; each layer is repacked once it is complete."""
        with self._timed("load"):
            loaded = self.model.load_weights(self.receiver.staged(update_info.version).items())
        missing = sorted(self._names - loaded) if loaded is not None else []
        if missing:
            raise WeightSyncError(
                f"version {update_info.version}: {len(missing)} of {len(self._names)} parameters of vLLM's "
                f"model were not in the push: {', '.join(missing[:5])}"
            )

    def finish_weight_update(self) -> None:
        with self._timed("finish"):
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.receiver.close()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.load_s[phase] = time.perf_counter() - began


class StagingWorker:
    """Mixed into vLLM's worker class: what its weight transfer interface has no call for."""

    if TYPE_CHECKING:
        weight_transfer_engine: StagedWeightTransfer | None

        def start_weight_update(self) -> None: ...
        def update_weights(self, update_info: dict[str, Any]) -> None: ...
        def finish_weight_update(self) -> None: ...

    def asyncrl_receive(self, version: int, ticket: int) -> None:
        """Start to receive; returns at once, and the outcome goes through the group's store."""
        self._asyncrl_transfer().receiver.receive(version, ticket)

    def asyncrl_load(self, version: int) -> dict[str, float]:
        """A whole weight update from the staging area; returns its seconds by phase.

        The three calls of vLLM's interface in one: a trip between the processes for each would be
        time that generation stands still.
        """
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        return dict(self._asyncrl_transfer().load_s)

    def _asyncrl_transfer(self) -> StagedWeightTransfer:
        engine = self.weight_transfer_engine
        if engine is None:
            raise WeightSyncError("the worker has no weight transfer: was the engine started by asyncrl?")
        return engine
