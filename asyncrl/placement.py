"""Where the actors run: the Ray session, what the run needs of it, and cores to pin to.

Invariants:
- What is asked for is compared with what there is before any actor is created: Ray itself would
  leave an actor pending for ever, silently.
- Actors are pinned by us, not by Ray, which counts cores but does not bind to them.
- On a machine of its own a run listens on loopback alone; in a cluster, ranks meet on the address of the node
  that the first of them is on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config import Config, SidePlacementSection
from asyncrl.config_halves import absent_parts
from asyncrl.errors import PlacementError
from asyncrl.generators.places import generator_names
from asyncrl.inherited import set_inherited
from asyncrl.nodes import Demand, Node, assign, chosen, counts, require_total
from asyncrl.weight_sync.base import HAS_SHM, Backend

if TYPE_CHECKING:
    from asyncrl.seats import GeneratorSeats, Seat

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_RESERVE_S = 30
_TOKEN_CPU = 0.001
"""Of a CPU: what Ray counts for a slot without GPUs, to keep its two actors on one node."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of the two sides, and where in a cluster they go."""

    generator_gpus: int
    """GPUs of each generator replica, apart from its learner rank's; 0 where both have the same."""
    learner_gpus: int
    """GPUs of each learner rank."""
    role_gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of each actor of a role, by the role's name."""
    logs: str | None = None
    """The folder that this session's processes log to, where the session is our own."""
    ranks: Mapping[str, Sequence[Seat]] = field(default_factory=dict)
    """The seats of the ranks of learner and critic, by section; empty where there is one node, our own."""
    generators: GeneratorSeats | None = None
    """The seats of generators in a cluster."""

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

    def host(self, section: str) -> str:
        """Address that the ranks of learner or critic meet on."""
        seats = self.ranks.get(section)
        return seats[0].node.address if seats else _LOOPBACK


def open_session(config: Config) -> Placement:
    """Start or join Ray, and set aside what ``config`` asks for. Raises PlacementError."""
    set_inherited()  # before the import of ray, which reads some of it
    import ray

    from asyncrl.seats import cluster_nodes

    address = config.placement.address
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
        logs = str(Path(ray._private.worker._global_node.get_logs_dir_path()))
    else:
        try:
            ray.init(
                address=address, log_to_driver=True, logging_level=logging.WARNING, configure_logging=False
            )
        except (ConnectionError, ValueError) as error:
            raise PlacementError(
                f"placement.address: found {address!r}, where no Ray cluster answers ({error}); expected the "
                "address of one, as 'ray start --head' prints it"
            ) from None
        logs = None
    nodes = cluster_nodes()
    gpus = sum(node.gpus for node in nodes)
    placement = Placement(
        generator_gpus=_generator_gpus(config, gpus),
        learner_gpus=int(_wants_gpu(config.learner.device, gpus)),
        role_gpus={name: int(_wants_gpu(role.device, gpus)) for name, role in config.roles.items()},
        logs=logs,
    )
    demands = demands_of(config, placement)
    if address is None:
        require_total(nodes, [replace(demand, cpus=0.0) for demand in demands.values()])
        return placement
    return _in_cluster(config, placement, demands, nodes)


def _in_cluster(
    config: Config, placement: Placement, demands: Mapping[str, Demand], nodes: Sequence[Node]
) -> Placement:
    """``placement`` with seats that are set aside. Raises PlacementError, at best before anything is."""
    from asyncrl.seats import GeneratorSeats, cluster_nodes, reserve_ranks

    names = [name for demand in demands.values() for name in demand.names or ()]
    limit = config.placement.nodes
    placed = {name: demand for name, demand in demands.items() if demand.side}
    everything = list(demands.values())

    def decide(nodes: Sequence[Node]) -> dict[str, list[Node]]:
        taken = chosen(nodes, limit, names)
        require_total(taken, everything)
        return dict(zip(placed, assign(taken, list(placed.values())), strict=True))

    seats = decide(nodes)
    # Others may use some of it. Where they use too much, they may be about to end: setting aside waits.
    with contextlib.suppress(PlacementError):
        seats = decide(cluster_nodes(free=True))
    ranks: dict[str, Sequence[Seat]] = {
        name: reserve_ranks(placed[name], seats[name]) for name in ("learner", "critic") if name in placed
    }
    others = {seat.node.id for of_group in ranks.values() for seat in of_group}
    generators = None
    if "generators" in placed:
        generators = GeneratorSeats(placed["generators"], limit=limit, others=others)
        generators.reserve(generator_names(config.generators.replicas), seats["generators"])
    for name, of_name in seats.items():
        log.info("%s: %s", name, ", ".join(f"{n} on {node}" for node, n in counts(of_name).items()))
    return replace(placement, ranks=ranks, generators=generators)


def demands_of(config: Config, placement: Placement) -> dict[str, Demand]:
    """What each kind of actor needs, by its section. Roles without a side go where Ray finds room.

    Of half a run, what that half has.
    """
    learner, generators = config.placement.learner, config.placement.generators

    def cpus(side: SidePlacementSection, threads: int, gpus: int) -> float:
        return side.cpus if side.cpus is not None else 0.0 if gpus else float(threads)

    demands = {
        "learner": Demand(
            "learner rank",
            "learner.ranks",
            config.learner.ranks,
            cpus(learner, config.learner.threads, placement.learner_gpus),
            placement.learner_gpus,
            "placement.learner",
            learner.strategy,
            learner.nodes,
            "learner.device",
        )
    }
    if config.placement.mode == "split":
        demands["generators"] = Demand(
            "generator",
            "generators.replicas",
            config.generators.replicas,
            cpus(generators, config.generators.threads * config.generators.workers, placement.generator_gpus),
            placement.generator_gpus,
            "placement.generators",
            generators.strategy,
            generators.nodes,
            "generators.device",
        )
    for name, role in config.roles.items():
        key, count = role.actors
        gpus = placement.role_gpus[name]
        demand = Demand(f"{name} actor", f"{name}.{key}", count, 0.0, gpus, device_key=f"{name}.device")
        if name == "critic":
            demand = replace(
                demand,
                what="critic rank",
                cpus=cpus(learner, config.critic.threads, gpus),
                side="placement.learner",
                strategy=learner.strategy,
                names=learner.nodes,
            )
        demands[name] = demand
    absent = absent_parts(config)
    return {name: demand for name, demand in demands.items() if not name.startswith(absent)}


def _generator_gpus(config: Config, gpus: int) -> int:
    if config.placement.mode == "colocated":
        return 0
    return int(_wants_gpu(config.generators.device, gpus)) * config.generators.workers


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


def actor_options(gpus: float, seat: Seat | None = None) -> dict[str, Any]:
    """Ray options of an actor: no CPUs are counted, since pinning is ours. None: wherever there is room."""
    options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
    return options if seat is None else {**options, **seat.options()}


def rank_options(placement: Placement, section: str, ranks: int) -> list[dict[str, Any]]:
    """Ray options of each rank of learner or critic, which is what ``section`` names."""
    gpus = placement.learner_gpus if section == "learner" else placement.role_gpus[section]
    seats: Sequence[Seat | None] = placement.ranks.get(section) or [None] * ranks
    return [actor_options(gpus, seat) for seat in seats]


def reserve_slots(count: int, placement: Placement) -> list[dict[str, Any]]:
    """Ray options by slot, for the two actors that share its device: one node, and there one GPU or none.

    In a cluster the slots are the seats of the learner's ranks. Raises PlacementError where Ray does not give
    others within seconds.
    """
    seats = placement.ranks.get("learner")
    if seats:
        return [actor_options(placement.learner_gpus / 2, seat) for seat in seats]
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
