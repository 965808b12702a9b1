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
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import PlacementError
from asyncrl.inherited import set_inherited

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of the two sides."""

    generator_gpus: int
    """GPUs of each generator replica; 0 where it has those of its learner rank."""
    learner_gpus: int
    """GPUs of each learner rank."""
    host: str
    """Address that process groups meet on."""
    role_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of each actor of a role, by the role's name."""
    logs: str | None = None
    """The folder that this session's processes log to, where the session is our own."""

    @property
    def push_backend(self) -> str:
        return "nccl" if self.generator_gpus and self.learner_gpus else "gloo"


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


def actor_options(gpus: int) -> dict[str, Any]:
    """Ray options of an actor: no CPUs are counted, since pinning is ours."""
    return {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}


def _wants_gpu(device: str, gpus: int) -> bool:
    return device == "cuda" or (device == "auto" and gpus > 0)
