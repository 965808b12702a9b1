"""One simulated run: the real controller, pool, publisher, budget, queue and ledger over scripted parts.

Invariants:
- No second model of the system: all that is not here or in ``parts.py`` is what trains.
- A run is a pure function of its config: equal configs give equal lines.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.controller import Controller, Summary
from asyncrl.evaluation import Evaluator
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner
from asyncrl.ledger import Retired
from asyncrl.observer import Observer
from asyncrl.pushes import Publisher
from asyncrl.run_folder import RunFolder
from asyncrl.simulate.clock import run_virtual
from asyncrl.simulate.lengths import make_lengths
from asyncrl.simulate.parts import Contention, ReplicaMaker, SimulatedTasks, make_learner
from asyncrl.simulate.workload import SimulationConfig
from asyncrl.timeline import Timeline
from asyncrl.turns import ColocatedTurns, NoTurns, Turns
from asyncrl.types import Metrics, ReadyGroup
from asyncrl.weight_sync.publish import WeightPublisher
from asyncrl.weight_sync.relabel import RelabelPublisher

_OBJECTS_BETWEEN_COLLECTIONS = 100_000


@dataclass(slots=True)
class Recorder:
    """Keeps the lines of metrics, and writes files where there is a folder for them; an Observer."""

    files: RunFolder | None = None
    lines: list[Metrics] = field(default_factory=list)

    def retired(self, retired: Retired) -> None:
        if self.files is not None:
            self.files.retired(retired)

    def stepped(self, record: Metrics) -> None:
        if self.files is not None:
            self.files.check()

    def evaluated(self, result: Metrics) -> None:
        """A simulation has nothing to evaluate."""

    def recorded(self, record: Metrics) -> None:
        self.lines.append(record)
        if self.files is not None:
            self.files.metrics(record)

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        """There are no payloads to keep."""

    def phase(self, name: str) -> None:
        """Simulated actors start at once."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """How a simulated run ended, and what it cost to simulate."""

    summary: Summary
    lines: list[Metrics]
    """The lines of metrics.jsonl, the one before the first step included."""
    trajectories: int
    """Answers of all groups that were retired."""
    cpu_s: float
    """Processor time of this process: controller and scripted parts together."""


def simulate(config: SimulationConfig, *, out: Path | None = None) -> SimulatedRun:
    """Run the config to its end in virtual time; with ``out``, its files go into that folder.

    Raises ConfigError for a workload that cannot be had, and whatever would end a real run.
    """
    files = None if out is None else _open(out, config)
    recorder = Recorder(files=files)
    before = time.process_time()
    try:
        with rare_collections():
            summary = run_virtual(run_simulated(config, recorder, None if files is None else files.timeline))
    finally:
        if files is not None:
            files.close()
    cpu_s = time.process_time() - before
    counts = summary.counts
    groups = sum(counts[state] for state in ("trained", "filtered", "dropped", "failed"))
    return SimulatedRun(summary, recorder.lines, groups * config.rollout.group_size, cpu_s)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cycles less often: of all that lives long here, looking took a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _OBJECTS_BETWEEN_COLLECTIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def run_simulated(config: SimulationConfig, observer: Observer, timeline: Timeline | None) -> Summary:
    """The run itself, on whatever loop this is awaited on."""
    workload = config.workload
    lengths = make_lengths(workload.lengths, config.rollout.group_size)
    tasks = SimulatedTasks(workload.generation.prompt_tokens)
    contention = Contention(workload.contention)
    maker = ReplicaMaker(config, tasks, lengths, contention)
    learner = make_learner(config, contention)
    pool, publisher, turns = _sides(config, maker, learner, timeline)
    evaluator = Evaluator(pool, (), config)
    controller = Controller(
        config, tasks, pool, learner, publisher, evaluator, observer, turns=turns, timeline=timeline
    )
    return await controller.run()


def _sides(
    config: SimulationConfig, maker: ReplicaMaker, learner: Learner, timeline: Timeline | None
) -> tuple[GeneratorPool, Publisher, Turns]:
    """The generators, and what passes weights and turns to them, as ``placement.mode`` says."""
    generators, sync = config.generators, config.weight_sync
    colocated = config.placement.mode == "colocated"
    pool = GeneratorPool(
        [maker.make(f"generator {i}") for i in range(generators.replicas)],
        restart=None if colocated else maker.restart,
        max_restarts=0 if colocated else generators.max_restarts,
        health_every_s=generators.health_every_s,
        health_timeout_s=generators.health_timeout_s,
        timeline=timeline,
    )
    clock = asyncio.get_running_loop().time
    if colocated:
        turns = ColocatedTurns(pool, learner, timeout_s=sync.timeout_s)
        relabel = RelabelPublisher(pool, turns, timeout_s=sync.timeout_s, clock=clock)
        return pool, relabel, turns
    publisher = WeightPublisher(
        learner,
        pool,
        backend="gloo",
        bucket_bytes=sync.bucket_bytes,
        timeout_s=sync.timeout_s,
        in_flight=config.schedule.in_flight_updates,
        kv=config.schedule.kv_after_swap,
        clock=clock,
    )
    return pool, publisher, NoTurns()


def _open(folder: Path, config: SimulationConfig) -> RunFolder:
    """metrics.jsonl, ledger.jsonl and trace.json, in virtual time."""
    folder.mkdir(parents=True, exist_ok=True)
    return RunFolder(folder, resolve=_nothing, rollouts_every=0, trace_bytes=config.log.trace_mb << 20)


def _nothing(payloads: Sequence[Any]) -> list[bytes]:
    raise AssertionError(f"asked for {len(payloads)} payloads; a simulated run keeps no rollouts")
