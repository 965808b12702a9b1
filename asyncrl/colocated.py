"""The Ray shell of a generator and a learner rank that share a process, and in it the parameters.

Invariants:
- Both sides are the ones that otherwise have a process each; here are only their ways in.
- Calls of the learner have a thread of their own, one after the other: rollouts, pushes and pings never wait
  for them. Writing a checkpoint has another.
- The generator starts once the learner rank stands, on its parameters.
- Whoever kills the process has killed both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl.config import Config
from asyncrl.generators.actor import LANES, ROLLOUT_LANE, GeneratorActor, RayReplica
from asyncrl.learners.base import LearnerRank
from asyncrl.learners.group import LearnerActor, RayLearner
from asyncrl.learners.ranks import STATE_LANE
from asyncrl.placement import Placement, rank_options

if TYPE_CHECKING:
    from asyncrl.weight_sync.sharing import SharedModel


class ColocatedActor:
    """Passes calls on to a ``GeneratorActor`` and a ``LearnerActor``, by the names of their methods."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        host: str,
        cores: tuple[int, ...] | None,
        folder: str,
    ) -> None:
        self._shared: Future[SharedModel] = Future()
        self._generator = GeneratorActor(config, model_path, folder, cores, self._shared)
        self._learner = LearnerActor(config, model_path, rank, host, cores, folder, self._learner_stands)

    def _learner_stands(self, rank: LearnerRank) -> None:
        self._shared.set_result(rank.share())

    @ray.method(concurrency_group="generate")
    async def generate(self, method: str, *args: Any) -> Any:
        return await getattr(self._generator, method)(*args)

    @ray.method(concurrency_group="control")
    async def control(self, method: str, *args: Any) -> Any:
        return await getattr(self._generator, method)(*args)

    @ray.method(concurrency_group="learn")
    def learn(self, method: str, *args: Any) -> Any:
        return getattr(self._learner, method)(*args)


_RemoteColocated: Any = ray.remote(concurrency_groups={**LANES, "learn": 1, STATE_LANE: 1})(ColocatedActor)


class Side:
    """One side of a ``ColocatedActor``, called as if it were an actor: ``side.method.remote(*args)``.

    ``way_in`` gives the actor's method that a side's method is called by.
    """

    def __init__(self, way_in: Callable[[str], Any]) -> None:
        self._way_in = way_in

    def __getattr__(self, method: str) -> _Method:
        return _Method(self._way_in(method), method)


class _Method:
    def __init__(self, way_in: Any, method: str) -> None:
        self._way_in = way_in
        self._method = method

    def options(self, **options: Any) -> _Method:
        return _Method(self._way_in.options(**options), self._method)

    def remote(self, *args: Any) -> Any:
        return self._way_in.remote(self._method, *args)


def build_colocated(
    config: Config,
    model_path: str,
    names: Sequence[str],
    placement: Placement,
    *,
    cores: Sequence[tuple[int, ...] | None],
) -> tuple[list[RayReplica], RayLearner]:
    """Replicas called ``names``, and the learner with a rank in the process of each.

    Each process is in the place of its rank, and pinned to its ``cores``.
    """
    host = placement.host("learner")
    actors = [
        _RemoteColocated.options(**options).remote(
            config, model_path, rank, host, cores[rank], str(Path.cwd())
        )
        for rank, options in enumerate(rank_options(placement, "learner", len(names)))
    ]
    replicas = [
        RayReplica(name, config, _generator_side(actor), shares=actor)
        for name, actor in zip(names, actors, strict=True)
    ]
    return replicas, RayLearner(config, [_learner_side(actor) for actor in actors], handles=actors)


def _generator_side(actor: Any) -> Side:
    return Side(lambda method: actor.generate if method in ROLLOUT_LANE else actor.control)


def _learner_side(actor: Any) -> Side:
    return Side(lambda method: actor.learn)
