"""Generators and learner of a run, and what passes weights and turns between them.

Invariants:
- Nothing outside knows whether the two share processes: all four parts are behind their Protocols.
- Actors are created here, and nothing is asked of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.attempts import GroupSource
from asyncrl.colocated import build_colocated
from asyncrl.config import Config
from asyncrl.generators.actor import RayReplica, generator_actor
from asyncrl.generators.places import ClusterPlaces, generator_names, generator_number
from asyncrl.generators.pool import GeneratorPool
from asyncrl.halves.no_learner import NoLearner
from asyncrl.halves.publisher import UnsentPublisher
from asyncrl.halves.recording import Recording
from asyncrl.halves.replay import RecordedGroups
from asyncrl.handover import HandoverPublisher, HandoverTurns
from asyncrl.learners.base import Learner
from asyncrl.learners.group import RayLearner, learner_actors
from asyncrl.placement import Placement, actor_options, deal_cores, reserve_slots, store_payloads
from asyncrl.pushes import Publisher
from asyncrl.timeline import Timeline
from asyncrl.turns import ColocatedTurns, NoTurns, Turns
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.publish import WeightPublisher
from asyncrl.weight_sync.relabel import RelabelPublisher


@dataclass(frozen=True, slots=True)
class Sides:
    """Generators and learner, and what passes weights and turns between them."""

    pool: GeneratorPool
    policy: Learner
    publisher: Publisher
    turns: Turns
    source: GroupSource | None = None
    """What makes the groups that are trained, where that is not ``pool``."""


def build_sides(
    config: Config, model_path: str, placement: Placement, canary: Canary | None, timeline: Timeline
) -> Sides:
    """Create the actors of both sides, as ``placement.mode`` says; nothing runs yet."""
    if config.placement.mode == "split":
        build = _split
    else:
        build = _colocated if config.generators.backend == "torch" else _taking_turns
    return build(config, model_path, placement, canary, timeline)


def _split(
    config: Config, model_path: str, placement: Placement, canary: Canary | None, timeline: Timeline
) -> Sides:
    """A process for each generator and each learner rank."""
    sync = config.weight_sync
    pool = _pool(config, model_path, placement, timeline)
    learner = _learner(config, model_path, placement)
    publisher = WeightPublisher(
        learner,
        pool,
        backend=placement.push_backend if sync.backend == "auto" else sync.backend,
        bucket_bytes=sync.bucket_bytes,
        timeout_s=sync.timeout_s,
        in_flight=config.schedule.in_flight_updates,
        kv=config.schedule.kv_after_swap,
        canary=canary,
    )
    return Sides(pool, learner, publisher, NoTurns())


def build_generators_alone(
    config: Config, model_path: str, placement: Placement, timeline: Timeline
) -> Sides:
    """A process for each generator, which stays at the start model; nobody trains."""
    pool = _pool(config, model_path, placement, timeline)
    return Sides(pool, NoLearner(), UnsentPublisher(pool), NoTurns())


def build_learner_alone(config: Config, model_path: str, placement: Placement, recording: Recording) -> Sides:
    """A process for each learner rank, which train what was recorded; nobody samples."""
    pool = GeneratorPool([], min_replicas=0)
    groups = RecordedGroups(recording, lambda: pool.newest_version, store_payloads)
    learner = _learner(config, model_path, placement)
    return Sides(pool, learner, UnsentPublisher(pool), NoTurns(), groups)


def _pool(config: Config, model_path: str, placement: Placement, timeline: Timeline) -> GeneratorPool:
    """Of replicas in processes of their own, which are restarted, and joined by others in a cluster."""
    generators = config.generators
    names = generator_names(generators.replicas)
    dealt = deal_cores(generators.cpu_cores, len(names))
    seats = placement.generators

    def make_replica(name: str) -> RayReplica:
        options = actor_options(placement.generator_gpus, None if seats is None else seats[name])
        of_it = dealt[generator_number(name) % len(dealt)]
        actor = generator_actor(config, model_path, cores=of_it, options=options)
        return RayReplica(name, config, actor)

    return GeneratorPool(
        [make_replica(name) for name in names],
        restart=make_replica,
        places=None if seats is None else ClusterPlaces(seats, make_replica, taken=len(names)),
        min_replicas=generators.fewest,
        max_replicas=generators.most,
        below_min_s=generators.below_min_s,
        max_restarts=generators.max_restarts,
        health_every_s=generators.health_every_s,
        health_timeout_s=generators.health_timeout_s,
        timeline=timeline,
    )


def _learner(config: Config, model_path: str, placement: Placement) -> RayLearner:
    settings = config.learner
    cores = deal_cores(settings.cpu_cores, settings.ranks)
    return RayLearner(config, learner_actors(config, model_path, placement, cores=cores))


def _colocated(
    config: Config, model_path: str, placement: Placement, canary: Canary | None, timeline: Timeline
) -> Sides:
    """A process for each generator with its learner rank. None is restarted: a rank would be missing."""
    generators, timeout_s = config.generators, config.weight_sync.timeout_s
    names = generator_names(config.generators.replicas)
    replicas, learner = build_colocated(
        config, model_path, names, placement, cores=deal_cores(generators.cpu_cores, len(names))
    )
    pool = _pool_for_good(config, replicas, timeline)
    turns = ColocatedTurns(pool, learner, timeout_s=timeout_s, canary=canary)
    publisher = RelabelPublisher(pool, turns, timeout_s=timeout_s, canary=canary)
    return Sides(pool, learner, publisher, turns)


def _taking_turns(
    config: Config, model_path: str, placement: Placement, canary: Canary | None, timeline: Timeline
) -> Sides:
    """A process for each generator and one for each learner rank, two to a device, of which one works."""
    generators, settings, sync = config.generators, config.learner, config.weight_sync
    names = generator_names(config.generators.replicas)
    slots = reserve_slots(len(names), placement)
    replicas = [
        RayReplica(name, config, generator_actor(config, model_path, cores=cores, options=slot))
        for name, cores, slot in zip(names, deal_cores(generators.cpu_cores, len(names)), slots, strict=True)
    ]
    pool = _pool_for_good(config, replicas, timeline)

    async def generators_sleep() -> None:
        """vLLM takes memory by what is free at its start: the learner comes when it has given that back."""
        await pool.until(lambda pool: all(member.state != "starting" for member in pool.members))

    actors = learner_actors(
        config, model_path, placement, cores=deal_cores(settings.cpu_cores, settings.ranks), options=slots
    )
    learner = RayLearner(config, actors, after=generators_sleep)
    publisher = WeightPublisher(
        learner,
        pool,
        backend=placement.handover_backend if sync.backend == "auto" else sync.backend,
        bucket_bytes=sync.bucket_bytes,
        timeout_s=sync.timeout_s,
        in_flight=True,
        kv="recompute",
    )
    turns = HandoverTurns(learner, pool, publisher, timeout_s=sync.timeout_s, canary=canary)
    return Sides(pool, learner, HandoverPublisher(turns, publisher, canary=canary), turns)


def _pool_for_good(config: Config, replicas: list[RayReplica], timeline: Timeline) -> GeneratorPool:
    """Of replicas that have their devices together with the learner: none is restarted, none joins."""
    return GeneratorPool(
        replicas,
        max_restarts=0,
        min_replicas=len(replicas),
        health_every_s=config.generators.health_every_s,
        health_timeout_s=config.generators.health_timeout_s,
        timeline=timeline,
    )
