"""Where the actors run: the Ray session, what the run needs of it, and cores to pin to.

Invariants:
- What is asked for is compared with what there is before any actor is created: Ray itself would
  leave an actor pending for ever, silently.
- Actors are pinned by us, not by Ray, which counts cores but does not bind to them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.config import Config
from asyncrl.errors import PlacementError
from asyncrl.inherited import set_inherited
from asyncrl.weight_sync.base import HAS_SHM, Backend

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_RESERVE_S = 30
_TOKEN_CPU = 0.001
"""Of a CPU: what Ray counts for a slot without GPUs, to keep its two actors on one node."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of the two sides."""

    generator_gpus: int
    """GPUs of each generator replica, apart from its learner rank's; 0 where both have the same."""
    learner_gpus: int
    """GPUs of each learner rank."""
    host: str
    """Address that process groups meet on."""
    role_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of each actor of a role, by the role's name."""
    logs: str | None = None
    """The folder that this session's processes log to, where the session is our own."""

    @property
    def push_backend(self) -> Literal["nccl", "gloo"]:
        """How weights get from devices of the one side to those of the other."""
        return "nccl" if self.generator_gpus and self.learner_gpus else "gloo"

    @property
    def handover_backend(self) -> Backend:
        """How they get from a learner rank to the generator on its device."""
        if self.learner_gpus:
            return "ipc"
        return "shm" if HAS_SHM else "gloo"


def open_session(config: Config) -> Placement:
    """Start or join Ray, and check that it has what ``config`` asks for. Raises PlacementError."""
    import ray

    address = config.placement.address
    set_inherited()
    if address is None:
        # Says at each start that authentication is on, as it should be.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        ray.init(
            address="local",
            _node_ip_address=_LOOPBACK,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
        host = _LOOPBACK
        logs = str(Path(ray._private.worker._global_node.get_logs_dir_path()))
    else:
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING, configure_logging=False)
        host = ray.util.get_node_ip_address()
        logs = None
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    placement = Placement(
        generator_gpus=_generator_gpus(config, gpus),
        learner_gpus=int(_wants_gpu(config.learner.device, gpus)),
        host=host,
        role_gpus={name: int(_wants_gpu(role.device, gpus)) for name, role in config.roles.items()},
        logs=logs,
    )
    _require_gpus(config, placement, gpus)
    return placement


def _generator_gpus(config: Config, gpus: int) -> int:
    if config.placement.mode == "colocated":
        return 0
    return int(_wants_gpu(config.generators.device, gpus)) * config.generators.workers


def _require_gpus(config: Config, placement: Placement, gpus: int) -> None:
    """Raise PlacementError if the cluster has fewer GPUs than all actors together need."""
    needed = (
        placement.generator_gpus * config.generators.replicas + placement.learner_gpus * config.learner.ranks
    )
    actors = f"{config.generators.replicas} generator replicas and {config.learner.ranks} learner ranks"
    lower, devices = ["generators.replicas", "learner.ranks"], ["generators.device", "learner.device"]
    for name, role in config.roles.items():
        key, count = role.actors
        needed += placement.role_gpus[name] * count
        actors += f" and {count} of the {name}"
        lower.append(f"{name}.{key}")
        devices.append(f"{name}.device")
    if needed > gpus:
        raise PlacementError(
            f"{actors} need {needed} GPUs, the cluster has {gpus}; lower {' or '.join(lower)}, or set "
            f"{' or '.join(devices)} to cpu"
        )


def close_session() -> None:
    """Leave Ray; a session that we started ends with all its processes."""
    import ray

    ray.shutdown()


def fetch_payloads(references: Sequence[Any]) -> list[bytes]:
    """The bytes behind object references; blocks, so never on the event loop."""
    import ray

    payloads: list[bytes] = ray.get(list(references))
    return payloads


def store_payloads(payloads: Sequence[bytes]) -> list[Any]:
    """Object references to the bytes, as actors return them; this process owns them."""
    import ray

    return [ray.put(payload) for payload in payloads]


def deal_cores(cores: Sequence[int] | None, members: int) -> list[tuple[int, ...] | None]:
    """Deal cores out to members in turn; with fewer cores than members, they share."""
    if not cores:
        return [None] * members
    if len(cores) < members:
        return [(cores[i % len(cores)],) for i in range(members)]
    return [tuple(cores[i::members]) for i in range(members)]


def pin_process(cores: Sequence[int] | None) -> None:
    """Bind every thread of this process, and those that it starts later, to ``cores``."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def actor_options(gpus: float) -> dict[str, Any]:
    """Ray options of an actor: no CPUs are counted, since pinning is ours."""
    return {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}


def reserve_slots(count: int, placement: Placement) -> list[dict[str, Any]]:
    """Ray options by slot, for the two actors that share its device: one node, and there one GPU or none.

    Raises PlacementError where the cluster does not give the slots within seconds.
    """
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = placement.learner_gpus
    bundle = {"GPU": float(gpus)} if gpus else {"CPU": _TOKEN_CPU}
    group = placement_group([bundle] * count, strategy="PACK")
    if not group.wait(_RESERVE_S):
        raise PlacementError(
            f"{count} slots for a generator and a learner rank each, of {bundle}, were not to be had in "
            f"{_RESERVE_S} s: the cluster's are taken; lower generators.replicas and learner.ranks"
        )
    return [
        {
            **actor_options(gpus / 2),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot),
        }
        for slot in range(count)
    ]


def _wants_gpu(device: str, gpus: int) -> bool:
    return device == "cuda" or (device == "auto" and gpus > 0)
