"""One process among the ranks that train a model together: its device, how they meet, what they exchange.

Invariants:
- The ranks meet at rank 0, which listens on the one address that it was told, and on no other.
- Sums and maxima count each sample once, and are the same on every rank: they are taken over the replicas,
  one rank of each of the groups of ``shared`` ranks that train the same samples. With a single one, nothing
  is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.config import EngineSection
from asyncrl.errors import ConfigError
from asyncrl.inherited import close_to_others
from asyncrl.learners.gathering import collect
from asyncrl.network import interface_towards


class RankGroup:
    """Rank ``rank`` of ``world_size``: ``prepare`` the process, then ``join``, then the rest.

    ``section`` is the settings' name in the config, for messages. ``master`` is host and port where the
    ranks meet. ``shared``: ranks that follow each other in number and train the same samples, a part of the
    work each. Raises ConfigError for a device that is not there.
    """

    def __init__(
        self,
        settings: EngineSection,
        section: str,
        *,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        shared: int = 1,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._settings = settings
        self._section = section
        self._master = master
        self._shared = shared
        self.sharing: Any = None
        """The process group of the ranks with the same samples, once the ranks have met; None for one."""
        self._replicas: Any = None  # of the ranks with the same place in theirs; None for all ranks
        self.device = torch.device(self._pick_device())

    @property
    def replicas(self) -> int:
        """How many groups of ranks train samples of their own."""
        return self.world_size // self._shared

    @property
    def backend(self) -> str:
        """What the ranks exchange tensors by."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def prepare(self, *, deterministic: bool) -> None:
        """Make the process ready; before the model is loaded."""
        close_to_others()  # it writes checkpoints, and a cluster that was there before has a umask of its own
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
        interface = interface_towards(host)
        if interface is not None:
            # Left to itself gloo listens where the host's name leads: to nobody else, on many machines.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
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
        if self._shared > 1:
            self._meet_neighbours(step_timeout)

    def all_sum(self, values: Tensor) -> None:
        """Sum over the replicas, in place; collective."""
        if self.replicas > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self._replicas)

    def all_max(self, values: Tensor) -> None:
        """Maximum over the replicas, in place; collective."""
        if self.replicas > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._replicas)

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all replicas, (N,) each, any N: one tensor, padded with infinity; collective."""
        if self.replicas == 1:
            return values
        longest = torch.tensor(len(values), device=self.device)
        self.all_max(longest)
        padded = values.new_full((int(longest),), torch.inf)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.replicas)]
        dist.all_gather(parts, padded, group=self._replicas)
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

    def _meet_neighbours(self, timeout: timedelta) -> None:
        """Every rank makes every group, as torch wants it, and keeps those that it is in."""
        ranks = range(self.world_size)
        for first in ranks[:: self._shared]:
            members = ranks[first : first + self._shared]
            group = dist.new_group(list(members), timeout=timeout)
            self.sharing = group if self.rank in members else self.sharing
        for first in ranks[: self._shared]:
            members = ranks[first :: self._shared]
            group = dist.new_group(list(members), timeout=timeout)
            self._replicas = group if self.rank in members else self._replicas

    def _pick_device(self) -> str:
        wanted = self._settings.device
        if wanted == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"{self._section}.device is cuda, but torch finds 0 CUDA devices: use auto or cpu"
            )
        return wanted
