"""One process among the ranks that train a model together: its device, how they meet, what they exchange.

Invariants:
- The ranks meet at rank 0, which listens on the one address that it was told, and on no other.
- Sums and maxima are over all ranks and the same on each; with a single rank, nothing is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.config import EngineSection
from asyncrl.errors import ConfigError
from asyncrl.learners.gathering import collect


class RankGroup:
    """Rank ``rank`` of ``world_size``: ``prepare`` the process, then ``join``, then the rest.

    ``section`` is the settings' name in the config, for messages. ``master`` is host and port where the
    ranks meet. Raises ConfigError for a device that is not there.
    """

    def __init__(
        self, settings: EngineSection, section: str, *, rank: int, world_size: int, master: tuple[str, int]
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._settings = settings
        self._section = section
        self._master = master
        self.device = torch.device(self._pick_device())

    @property
    def backend(self) -> str:
        """What the ranks exchange tensors by."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def prepare(self, *, deterministic: bool) -> None:
        """Make the process ready; before the model is loaded."""
        torch.set_num_threads(self._settings.threads)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)

    def join(self) -> None:
        """Meet the other ranks in the process's default group; collective."""
        host, port = self._master
        timeout = timedelta(seconds=self._settings.start_timeout_s)
        # Bound by us to that one address: left to itself the store listens on every interface.
        listener = socket.create_server((host, port)).detach() if self.rank == 0 else None
        store = TCPStore(
            host,
            port,
            is_master=self.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
            use_libuv=True,
        )
        step_timeout = timedelta(seconds=self._settings.step_timeout_s)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=step_timeout
        )
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            # One visible device a rank: placement sees to that.
            LOCAL_RANK="0",
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )

    def all_sum(self, values: Tensor) -> None:
        """Sum over the ranks, in place; collective."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)

    def all_max(self, values: Tensor) -> None:
        """Maximum over the ranks, in place; collective."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, (N,) each, any N: one tensor, padded with infinity; collective."""
        if self.world_size == 1:
            return values
        longest = torch.tensor(len(values), device=self.device)
        self.all_max(longest)
        padded = values.new_full((int(longest),), torch.inf)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)

    def collect(
        self, numels: Sequence[int], parts: Iterable[Tensor], dtype: torch.dtype, whole: Tensor | None
    ) -> None:
        """Bring all ranks' parts of some tensors into ``whole`` on rank 0, as ``gathering.collect`` does."""
        collect(dist.group.WORLD, self.rank, numels, parts, dtype, whole)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _pick_device(self) -> str:
        wanted = self._settings.device
        if wanted == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"{self._section}.device is cuda, but torch finds 0 CUDA devices: use auto or cpu"
            )
        return wanted
