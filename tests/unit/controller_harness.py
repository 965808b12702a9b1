"""The real controller over scripted parts, under a virtual clock; every event is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from asyncrl.checkpoint.saver import Saver
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.controller import Controller, Summary
from asyncrl.environments.base import Rollout, RolloutResult, single_turn
from asyncrl.evaluation import Evaluator
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.pool import GeneratorPool
from asyncrl.generators.scripted import ScriptedGenerator
from asyncrl.handover import HandoverPublisher, HandoverTurns
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.ledger import Retired
from asyncrl.pushes import Publisher
from asyncrl.roles.annotator import Annotator
from asyncrl.roles.base import Role
from asyncrl.roles.moving import MovingReference
from asyncrl.roles.reward_group import RewardModelGroup
from asyncrl.rollout import RolloutHost, Score
from asyncrl.run import make_canary
from asyncrl.simulate.clock import run_virtual
from asyncrl.turns import ColocatedTurns, NoTurns, Turns
from asyncrl.types import Metrics, ReadyGroup, Task
from asyncrl.waiting import Signal
from asyncrl.weight_sync.publish import WeightPublisher
from asyncrl.weight_sync.relabel import RelabelPublisher

BASE = {
    "model": {"path": "none"},
    "data": {"train": "none.jsonl", "max_prompt_tokens": 8},
    "reward": {"functions": ["exact_match"]},
    "rollout": {"group_size": 2, "groups_per_step": 2, "max_new_tokens": 64, "deadline_s": 10_000.0},
    "eval": {"every": 0},
    "learner": {"micro_batch_tokens": 100_000, "step_timeout_s": 10_000.0},
    "weight_sync": {"timeout_s": 10_000.0},
}


def config(*overrides: str) -> Config:
    return parse_config(BASE, overrides)


class Stream:
    """Tasks without text: the scripted engine looks at the key alone."""

    def task(self, ordinal: int) -> Task:
        return Task(ordinal, f"train-{ordinal}", "", (1, 2, 3))


def sample_reward(task: Task, result: RolloutResult) -> float:
    """1.0 or 0.0, mixed within each group."""
    return float((task.ordinal + int(result.token_ids.sum())) % 2)


@dataclass
class ScriptedScorer:
    """Rewards from a function of the task; what that raises is the sample's failure."""

    reward: Callable[[Task, RolloutResult], float] = sample_reward

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        return Score(self.reward(task, result))


@dataclass
class Log:
    """An Observer that keeps everything, and checks the conservation law after every retirement."""

    retired_: list[Retired] = field(default_factory=list)
    steps: list[Metrics] = field(default_factory=list)
    lines: list[Metrics] = field(default_factory=list)
    evaluations: list[Metrics] = field(default_factory=list)
    trained_groups: list[tuple[int, list[int]]] = field(default_factory=list)
    check: Callable[[], None] = lambda: None

    def retired(self, retired: Retired) -> None:
        self.retired_.append(retired)
        self.check()

    def stepped(self, record: Metrics) -> None:
        self.steps.append(record)

    def evaluated(self, result: Metrics) -> None:
        self.evaluations.append(result)

    def recorded(self, record: Metrics) -> None:
        self.lines.append(record)

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        self.trained_groups.append((step, [g.meta.ordinal for g in groups]))

    def phase(self, name: str) -> None:
        """Not looked at."""


class ScriptedCluster:
    """Nodes with room for a generator each, which come and go; ``Places`` of a pool.

    ``make`` makes what joins.
    """

    def __init__(self, make: Callable[[], ScriptedGenerator] = ScriptedGenerator) -> None:
        self.rooms = 0
        """Nodes that nobody is on."""
        self.engines: dict[str, ScriptedGenerator] = {}
        """The newest of each name whose node is there."""
        self._make = make
        self._changed = Signal()
        self._names = count()
        self._host: Callable[[ScriptedGenerator], RolloutHost]

    def open(
        self, generators: list[ScriptedGenerator], host: Callable[[ScriptedGenerator], RolloutHost]
    ) -> None:
        """Put those that a run starts with on a node each; what joins is appended to ``generators``."""
        self.engines = {f"generator {next(self._names)}": generator for generator in generators}
        self._generators = generators
        self._host = host

    def add(self) -> None:
        """Another node."""
        self.rooms += 1
        self._changed.notify()

    def remove(self, name: str) -> None:
        """The node of this generator goes away, and it with that."""
        self.engines.pop(name).die("its node went away")

    async def is_there(self, name: str) -> bool:
        return name in self.engines

    async def another(self) -> LocalReplica:
        await self._changed.until(lambda: self.rooms > 0)
        self.rooms -= 1
        name, engine = f"generator {next(self._names)}", self._make()
        self.engines[name] = engine
        self._generators.append(engine)
        return LocalReplica(name, self._host(engine))


@dataclass
class Outcome:
    summary: Summary
    log: Log
    learner: ScriptedLearner
    generators: list[ScriptedGenerator]
    controller: Controller


def run(
    settings: Config,
    generators: list[ScriptedGenerator] | None = None,
    learner: ScriptedLearner | None = None,
    *,
    scorer: ScriptedScorer | None = None,
    rollout: Rollout = single_turn,
    eval_tasks: Sequence[Task] = (),
    during: Callable[[Outcome], Any] | None = None,
    controller_class: type[Controller] = Controller,
    spare: Callable[[], ScriptedGenerator] | None = None,
    roles: Sequence[Role] = (),
    reward_model: RewardModelGroup | None = None,
    cluster: ScriptedCluster | None = None,
    saver: Saver | None = None,
) -> Outcome:
    """Run to the end, then check what has to hold of every run. ``during`` is awaited beside it.

    ``spare`` makes the generator that takes a dead one's place; without it the dead stay dead. In a
    ``cluster`` they leave with their nodes, and others join.
    """
    generators = generators or [ScriptedGenerator()]
    learner = learner or ScriptedLearner(max_staleness=settings.schedule.max_staleness, step_s=1.0)
    log = Log()

    async def main() -> Outcome:
        import asyncio

        loop = asyncio.get_running_loop()

        def host(generator: ScriptedGenerator) -> RolloutHost:
            return RolloutHost(generator, scorer or ScriptedScorer(), lambda ids: "", rollout=rollout)

        def restart(name: str) -> LocalReplica:
            assert spare is not None
            generators.append(spare())
            return LocalReplica(name, host(generators[-1]))

        if cluster is not None:
            cluster.open(generators, host)
        pool = GeneratorPool(
            [LocalReplica(f"generator {i}", host(g)) for i, g in enumerate(generators)],
            places=cluster,
            min_replicas=settings.generators.fewest,
            max_replicas=settings.generators.max or len(generators),
            below_min_s=settings.generators.below_min_s,
            restart=restart if spare is not None else None,
            max_restarts=settings.generators.max_restarts,
            health_every_s=settings.generators.health_every_s,
            health_timeout_s=settings.generators.health_timeout_s,
        )
        canary = make_canary(settings, map(Stream().task, count()))
        timeout_s = settings.weight_sync.timeout_s
        turns: Turns = NoTurns()
        publisher: Publisher
        bucket_bytes = 1 << 20
        if settings.placement.mode == "colocated" and settings.generators.backend == "vllm":
            pushes = WeightPublisher(
                learner,
                pool,
                backend="shm",
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                in_flight=True,
                kv="recompute",
                clock=loop.time,
            )
            turns = HandoverTurns(learner, pool, pushes, timeout_s=timeout_s, canary=canary)
            publisher = HandoverPublisher(turns, pushes, canary=canary)
        elif settings.placement.mode == "colocated":
            turns = ColocatedTurns(pool, learner, timeout_s=timeout_s, canary=canary)
            publisher = RelabelPublisher(pool, turns, timeout_s=timeout_s, canary=canary, clock=loop.time)
        else:
            publisher = WeightPublisher(
                learner,
                pool,
                backend="gloo",
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                in_flight=settings.schedule.in_flight_updates,
                kv=settings.schedule.kv_after_swap,
                canary=canary,
                clock=loop.time,
            )
        evaluator = Evaluator(pool, eval_tasks, settings, reward_model)
        annotator = Annotator(roles, reward_model)
        reference = next((role for role in roles if isinstance(role, MovingReference)), None)
        controller = controller_class(
            settings,
            Stream(),
            pool,
            learner,
            publisher,
            evaluator,
            log,
            annotator=annotator,
            reference=reference,
            turns=turns,
            saver=saver,
        )
        log.check = controller.ledger.check
        outcome = Outcome(None, log, learner, generators, controller)  # type: ignore[arg-type]
        beside = asyncio.ensure_future(during(outcome)) if during is not None else None
        outcome.summary = await controller.run()
        if beside is not None:
            await beside
        return outcome

    outcome = run_virtual(main())
    check(settings, outcome)
    return outcome


def check(settings: Config, outcome: Outcome) -> None:
    """What holds of every run that came to its end."""
    log, summary = outcome.log, outcome.summary
    bound, batch = settings.schedule.max_staleness, settings.rollout.groups_per_step
    if summary.stopped_by is None:
        assert summary.policy_version == settings.run.steps
        assert summary.counts["running"] == summary.counts["ready"] == summary.counts["training"] == 0
        assert outcome.controller.budget.outstanding == 0
    for line in log.lines:
        assert line.get("staleness/max", 0) <= bound
        if settings.schedule.pipeline_depth == 0 and settings.schedule.publish_every == 1:
            assert line.get("staleness/max", 0) == 0
        states = ("running", "ready", "training", "trained", "filtered", "dropped", "failed")
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in states)
        assert line["queue/outstanding"] <= (settings.schedule.pipeline_depth + 1) * batch
    ends = [r.ordinal for r in log.retired_]
    assert len(ends) == len(set(ends)), "an ordinal was retired twice"
    trained = [ordinal for lags in outcome.learner.ordinals for ordinal in lags]
    assert len(trained) == len(set(trained)), "an ordinal was trained twice"
    smallest = 1 if settings.algorithm.filter_zero_variance == "drop" else batch
    assert all(smallest <= len(ordinals) <= batch for ordinals in outcome.learner.ordinals)
