"""Random schedules through the real controller: no bound broken, no deadlock, the books balanced.

``controller_harness.run`` checks what has to hold of each run and after each retirement; a deadlock is an
error of the virtual clock. The rule itself is tried on far more schedules in test_schedule_properties.py.
"""

from __future__ import annotations

import random

import pytest

from asyncrl.config import Config
from asyncrl.errors import RewardRaisedError
from asyncrl.generators.scripted import Failure, ScriptedGenerator, log_normal_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.types import Task

from .controller_harness import Outcome, ScriptedScorer, config, run

SCHEDULES = 400


def random_settings(rng: random.Random) -> Config:
    depth, every = rng.randint(0, 4), rng.randint(1, 3)
    return config(
        f"run.steps={rng.randint(3, 10)}",
        "run.max_unusable_groups=100000",
        f"rollout.groups_per_step={rng.randint(1, 4)}",
        f"rollout.group_size={rng.randint(2, 4)}",
        f"schedule.pipeline_depth={depth}",
        f"schedule.publish_every={every}",
        f"schedule.max_staleness={depth + every - 1 + rng.randint(0, 3)}",
        f"schedule.at_bound={rng.choice(['wait', 'drop'])}",
        f"schedule.in_flight_updates={rng.choice(['true', 'false'])}",
        f"algorithm.filter_zero_variance={rng.choice(['none', 'drop', 'refill'])}",
        f"reward.on_error={rng.choice(['fail', 'drop'])}",
        f"eval.every={rng.choice([0, 0, 2])}",
        "rollout.max_attempts=8",
        "learner.max_bad_steps=100",
    )


def random_run(seed: int) -> Outcome:
    rng = random.Random(seed)
    settings = random_settings(rng)
    failing = rng.choice([0.0, 0.0, 0.1, 0.5])

    def reward(task: Task, result: object) -> float:
        if task.uid.startswith("train") and rng.random() < failing:
            raise RewardRaisedError("scripted")
        return float(rng.random() < 0.5)

    replicas = rng.randint(1, 3)
    sigma = rng.choice([0.0, 0.6, 1.2])
    deaths = {rng.randint(0, 30)} if replicas > 1 and rng.random() < 0.3 else set()
    generators = [
        ScriptedGenerator(
            slots=rng.choice([2, 8, 64]),
            length=log_normal_length(rng.choice([4, 16]), sigma),
            token_s=rng.choice([0.01, 0.1]),
            swap_s=rng.choice([0.0, 0.2]),
            receive_s=rng.choice([0.0, 1.0]),
            # The first replica alone may die, so that one is always left.
            failure=lambda r, n=n: Failure("die", 2) if n == 0 and r.key.ordinal in deaths else None,
        )
        for n in range(replicas)
    ]
    learner = ScriptedLearner(
        max_staleness=settings.schedule.max_staleness,
        step_s=rng.choice([0.1, 1.0, 3.0]),
        push_s=rng.choice([0.0, 0.3, 2.5]),
        bad_steps={rng.randint(0, 10)} if rng.random() < 0.2 else (),
    )
    held_out = [Task(i, f"eval-{i}", "", (1, 2)) for i in range(rng.choice([0, 3]))]
    return run(settings, generators, learner, scorer=ScriptedScorer(reward), eval_tasks=held_out)


@pytest.mark.parametrize("part", range(4))
def test_random_schedules_break_no_bound_and_lose_nothing(part: int) -> None:
    seen = {"dropped": 0, "failed": 0, "filtered": 0, "lag": 0, "deaths": 0}
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        try:
            outcome = random_run(seed)
        except BaseException as error:
            error.add_note(f"schedule seed {seed}")
            raise
        for state in ("dropped", "failed", "filtered"):
            seen[state] += outcome.summary.counts[state]
        seen["lag"] += sum(lag or 0 for lags in outcome.learner.lags for lag in lags)
        seen["deaths"] += sum(not m.alive for m in outcome.controller._pool.members)
    assert all(seen.values()), f"these schedules did not try everything: {seen}"
