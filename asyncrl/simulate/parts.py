"""The scripted parts of a simulated run: engines, learner, rewards and prompts after a workload.

Invariants:
- Whatever decides is the real thing: ``RolloutHost`` over the engines, and the pool and publisher above.
- What a part does is a pure function of the workload, the seed and the moment.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np

from asyncrl.environments.base import ModelClient, RolloutResult
from asyncrl.errors import RewardRaisedError
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.scripted import ScriptedGenerator
from asyncrl.learners.packing import plan_step
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.rollout import RolloutHost, Score
from asyncrl.simulate.draws import uniform
from asyncrl.simulate.lengths import LengthOf
from asyncrl.simulate.workload import (
    ContentionSection,
    GenerationSection,
    RewardsSection,
    SimulationConfig,
)
from asyncrl.types import Batch, GenerationRequest, Group, Task
from asyncrl.waiting import now

_REWARD, _REWARD_ERROR, _DEATH = 11, 12, 13


class SimulatedTasks:
    """Prompts without text, all of one length."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = (0,) * prompt_tokens
        self._ids = np.zeros(prompt_tokens, dtype=np.int32)

    def task(self, ordinal: int) -> Task:
        return Task(ordinal, f"task-{ordinal}", "", self._prompt)

    async def roll_out(self, task: Task, client: ModelClient) -> RolloutResult:
        """As ``single_turn``, with one array for all prompts."""
        completion = await client.complete(task.prompt_ids)
        return RolloutResult(
            prompt_ids=self._ids,
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), np.bool_),
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
        )


class SimulatedScorer:
    """Rewards of 1 and 0, after a while."""

    def __init__(self, rewards: RewardsSection, errors: float, seed: int) -> None:
        self._rewards = rewards
        self._errors = errors
        self._seed = seed
        self._calls = 0

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        self._calls += 1
        call = self._calls
        begun = now()
        if self._rewards.score_s:
            await asyncio.sleep(self._rewards.score_s)
        if self._errors and uniform(self._seed, task.ordinal, call, _REWARD_ERROR) < self._errors:
            raise RewardRaisedError(f"scoring an answer to {task.uid} fails, as the workload asks")
        reward = float(uniform(self._seed, task.ordinal, call, _REWARD) < self._rewards.mean)
        span = ("reward worker", begun, now()) if self._rewards.score_s else None
        return Score(reward, span=span)


def token_seconds(token_s: Mapping[int, float] | float, running: int) -> float:
    """Time of one more token of each of ``running`` sequences: between the points of the table, linear."""
    if not isinstance(token_s, Mapping):
        return token_s
    points = sorted(token_s)
    right = bisect_left(points, running)
    if right == 0:
        return token_s[points[0]]
    if right == len(points):
        return token_s[points[-1]]
    low, high = points[right - 1], points[right]
    share = (running - low) / (high - low)
    return (1 - share) * token_s[low] + share * token_s[high]


def prefill_seconds(generation: GenerationSection) -> Callable[[GenerationRequest], float] | None:
    """What the prompt of a request takes; None where none takes any time."""
    seconds = generation.prefill_token_s * generation.prompt_tokens
    if not seconds:
        return None
    if generation.prompt_once:
        return lambda request: seconds if request.key.sample == 0 else 0.0
    return lambda request: seconds


def computed_tokens(config: SimulationConfig) -> Callable[[Batch], int]:
    """Tokens of an update's forward passes, padding included, in the micro-batches of ``config``."""
    learner, mini_batches = config.learner, config.algorithm.mini_batches

    def tokens(batch: Batch) -> int:
        plans = plan_step(batch, learner.replicas, learner.micro_batch_tokens, mini_batches, learner.layout)
        return sum(plan.computed_tokens for plan in plans)

    return tokens


def batch_tokens(batch: Batch) -> int:
    """Tokens of prompts and answers, as if no padding were computed."""
    trajectories = (t for item in batch.items for t in item.meta.trajectories)
    return sum(t.prompt_tokens + t.response_tokens for t in trajectories)


class Contention:
    """What learner and engines cost each other where both are at work."""

    def __init__(self, section: ContentionSection) -> None:
        self._section = section
        self._engines: list[ScriptedGenerator] = []

    def add(self, engine: ScriptedGenerator) -> None:
        if self._section.update > 1 or self._section.token > 1:  # else nobody has to be told anything
            self._engines = [other for other in self._engines if other.is_alive] + [engine]

    def of_update(self) -> float:
        """How many times as long an update takes that begins now."""
        return self._section.update if any(engine.is_sampling for engine in self._engines) else 1.0

    def updating(self, begins: bool) -> None:
        """An update begins, or is over."""
        for engine in self._engines:
            engine.slow_down(self._section.token if begins else 1.0)


def make_learner(config: SimulationConfig, contention: Contention) -> ScriptedLearner:
    """The learner of the workload; it keeps no batch."""
    push, costs = config.workload.push, config.workload.learner
    token_s = costs.token_s * (costs.ranks or config.learner.ranks) / config.learner.ranks
    tokens = computed_tokens(config) if costs.padded else batch_tokens
    return ScriptedLearner(
        max_staleness=config.schedule.max_staleness,
        step_s=lambda batch: (costs.step_s + token_s * tokens(batch)) * contention.of_update(),
        stepping=contention.updating,
        computed=tokens if costs.padded else None,
        push_s=push.send_s,
        copy_s=push.copy_s,
        bad_steps=config.workload.failures.bad_steps,
        keeps_batches=False,
    )


class ReplicaMaker:
    """Makes replicas, those that take a dead one's place included. Needs a running loop."""

    def __init__(
        self, config: SimulationConfig, tasks: SimulatedTasks, length_of: LengthOf, contention: Contention
    ) -> None:
        workload = config.workload
        self._config = config
        self._tasks = tasks
        self._length_of = length_of
        self._contention = contention
        self._made = 0
        self._shared = config.placement.mode == "colocated"
        pace = [token_seconds(workload.generation.token_s, n) for n in range(config.generators.slots + 1)]
        self._token_s = pace[1]
        self._slowdown = [seconds / pace[1] for seconds in pace]
        self._prefill = prefill_seconds(workload.generation)

    def make(self, name: str, start_s: float = 0.0) -> LocalReplica:
        """A replica that is up after ``start_s`` and dies when its time has come."""
        workload, seed = self._config.workload, self._config.run.seed
        length_of = self._length_of
        engine = ScriptedGenerator(
            slots=self._config.generators.slots,
            length=lambda request: length_of(request.key),
            token_s=self._token_s,
            slowdown=self._slowdown.__getitem__,
            prefill_s=self._prefill,
            start_s=start_s,
            swap_s=0.0 if self._shared else workload.push.pause_s,
            recompute_s=workload.push.recompute_s,
            shared=self._shared,
            sleep_s=workload.turns.sleep_s,
            wake_s=workload.turns.wake_s,
        )
        self._contention.add(engine)
        self._made += 1
        mean_life_s = workload.failures.mean_life_s
        if mean_life_s is not None:
            life_s = -mean_life_s * math.log(uniform(seed, self._made, _DEATH))
            asyncio.get_running_loop().call_later(start_s + life_s, engine.die)
        scorer = SimulatedScorer(workload.reward, workload.failures.reward_errors, seed + self._made)
        host = RolloutHost(engine, scorer, _no_text, rollout=self._tasks.roll_out, encode=_no_payload)
        return LocalReplica(name, host)

    def restart(self, name: str) -> LocalReplica:
        """What takes the place of a dead replica."""
        return self.make(name, self._config.workload.failures.restart_s)


def _no_text(token_ids: object) -> str:
    return ""


def _no_payload(group: Group) -> bytes:
    """Nothing reads what simulated learners are sent."""
    return b""
