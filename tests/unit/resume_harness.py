"""A run of scripted parts in legs, as a process after the other makes it, over real files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.resume import Resumed, prepare
from asyncrl.checkpoint.saver import Saver
from asyncrl.checkpoint.state import RunState
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.config_load import dump_config, parse_config
from asyncrl.controller import Controller, Summary
from asyncrl.environments.base import RolloutResult
from asyncrl.evaluation import Evaluator
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.pool import GeneratorPool
from asyncrl.generators.scripted import ScriptedGenerator
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.ledger import Frontier
from asyncrl.rollout import RolloutHost
from asyncrl.run_folder import RunFolder
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import Metrics, Task
from asyncrl.weight_sync.publish import WeightPublisher

from .controller_harness import BASE, Log, ScriptedScorer, Stream, sample_reward

OF = Origin("data", {})
EVAL_TASKS = [Task(i, f"eval-{i}", "", (1, 2)) for i in range(2)]


def best_at_six(task: Task, result: RolloutResult) -> float:
    """As any reward in training; in evaluations, version 6 is the best."""
    if task.uid.startswith("eval"):
        return -abs(float(result.versions[0]) - 6.0)
    return sample_reward(task, result)


def state_at(step: int, **changes: Any) -> RunState:
    """Of a run that has just begun, but for what ``changes``."""
    begun = RunState(
        step=step,
        version=step,
        frontier=Frontier(0, (), {}),
        kl_coefficient=None,
        moments={},
        lengths={},
        bad_steps=0,
        unusable={},
        elapsed_s=1.0,
        seed=0,
        data="data",
        models={},
        learner=True,
    )
    return replace(begun, **changes)


class Killed(BaseException):
    """What a SIGKILL is under the virtual clock: nothing runs after it, neither handlers nor cleaning up."""


@dataclass
class Written(Log):
    """An Observer that writes the run's real files, and sets ``reached`` once ``stop_at_step`` is through."""

    files: RunFolder = field(kw_only=True)
    stop_at_step: int | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def stepped(self, record: Metrics) -> None:
        self.files.check()
        super().stepped(record)
        if record["step"] == self.stop_at_step:
            self.reached.set()

    def retired(self, retired: Any) -> None:
        super().retired(retired)
        self.files.retired(retired)

    def recorded(self, record: Metrics) -> None:
        super().recorded(record)
        self.files.metrics(record)


def config_in(folder: Path, *overrides: str) -> Config:
    return parse_config(BASE, [f"run.dir={folder}", "run.name=r", "checkpoint.every=1", *overrides])


@dataclass
class Leg:
    """One process's part of a run."""

    summary: Summary | None
    learner: ScriptedLearner
    resumed: Resumed | None
    controller: Controller


def leg(
    config: Config,
    *,
    killed_after_s: float | None = None,
    stop_at_step: int | None = None,
    stop_after_s: float | None = None,
    start_s: float = 0.0,
    poisoned: Mapping[str, str] | None = None,
) -> Leg:
    """Run until the end, or until virtual time ``killed_after_s``: then all stops as it is.

    ``stop_at_step`` and ``stop_after_s``: when SIGTERM comes. ``start_s``: how long the learner starts.
    ``poisoned``: prompts that are known to kill generators.
    """
    config.run.folder.mkdir(parents=True, exist_ok=True)
    resumed = prepare(config, OF)
    learner = ScriptedLearner(
        max_staleness=config.schedule.max_staleness, step_s=1.0, push_s=0.25, copy_s=0.125, start_s=start_s
    )
    files = RunFolder(config.run.folder, resolve=list, rollouts_every=0, trace_bytes=1 << 20)
    observer = Written(files=files, stop_at_step=stop_at_step)
    built: list[Controller] = []

    async def main() -> Summary | None:
        loop = asyncio.get_running_loop()
        generator = ScriptedGenerator()
        host = RolloutHost(generator, ScriptedScorer(best_at_six), lambda ids: "")
        pool = GeneratorPool([LocalReplica("generator 0", host)])
        publisher = WeightPublisher(
            learner,
            pool,
            backend="gloo",
            bucket_bytes=1 << 20,
            timeout_s=1000.0,
            in_flight=True,
            kv="keep",
            clock=loop.time,
        )
        saver = Saver(
            config.checkpoint,
            CheckpointStore(config.run.folder / "checkpoints"),
            learner,
            resolve=list,
            lines_on_disk=files.on_disk,
            config_text=dump_config(config),
            of=OF,
            last_step=None if resumed is None or resumed.elsewhere else resumed.state.step,
        )
        controller = Controller(
            config,
            Stream(),
            pool,
            learner,
            publisher,
            Evaluator(pool, EVAL_TASKS if config.eval.every else (), config),
            observer,
            saver=saver,
            resumed=resumed,
            timeline=files.timeline,
        )
        observer.check = controller.ledger.check
        controller._books.poisoned.update(poisoned or {})
        built.append(controller)
        run = asyncio.ensure_future(controller.run())
        if stop_at_step is not None:
            await observer.reached.wait()
            controller.request_stop("SIGTERM")
        if stop_after_s is not None:
            loop.call_later(stop_after_s, controller.request_stop, "SIGTERM")
        if killed_after_s is None:
            return await run
        await asyncio.wait([run], timeout=killed_after_s)
        if run.done():
            return run.result()
        files._thread.shutdown(wait=True)  # what was handed to the system is written, after a kill as well
        raise Killed

    try:
        summary = run_virtual(main())
        files.close()
    except Killed:
        summary = None
        files._metrics.close()
        files._ledger.close()
    except BaseException:
        with suppress(OSError):
            files.close()
        raise
    return Leg(summary, learner, resumed, built[0])


def lines(config: Config, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.folder / name).read_text().splitlines()]


def assert_one_history(config: Config) -> None:
    """Every ordinal has one line, every step has one line, and the books of the last line agree."""
    ends = lines(config, "ledger.jsonl")
    assert sorted(end["ordinal"] for end in ends) == list(range(len(ends)))
    metrics = lines(config, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(config.run.steps + 1))
    times = [line["time"] for line in metrics]
    assert times == sorted(times)
    last = metrics[-1]
    assert last["policy_version"] == config.run.steps
    assert last["model/checksum"] == f"scripted-{config.run.steps}"
    assert last["ledger/submitted"] == len(ends)
    assert last["ledger/trained"] == config.run.steps * config.rollout.groups_per_step
    evaluated = [line["step"] for line in metrics if "eval/reward_mean" in line]
    assert not config.eval.every or {0, config.run.steps} <= set(evaluated)
