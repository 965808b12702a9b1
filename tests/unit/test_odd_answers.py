"""Answers at the edge, from the rollout through the controller to the gradient of real micro-batches.

The controller, the rollout host, the codec, the planner, the objective and the model are the real ones;
engine and clock are scripted. Each step's gradient is held to a formula over answers that are run one at a
time, with nothing padded, packed or masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.algorithms.masks import alone
from asyncrl.config import Config
from asyncrl.environments.base import ModelClient, Rollout, RolloutResult, single_turn
from asyncrl.errors import RewardValueError
from asyncrl.generators.scripted import ScriptedGenerator
from asyncrl.learners.advantages import batch_wide
from asyncrl.learners.base import StepResult, TrainSample
from asyncrl.learners.collate import collate
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.packing import plan_step
from asyncrl.learners.policy import prepare_policy, selected_logits
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.queues.codec import decode_group
from asyncrl.types import Batch, Task

from .controller_harness import Outcome, ScriptedScorer, config, run
from .tiny_models import VOCAB, tiny_llama

CPU = torch.device("cpu")


@dataclass
class Step:
    samples: list[TrainSample]
    gradient: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    metrics: dict[str, float]


@dataclass
class Gradients:
    """What each step of a run computes, by the learner's parts, and what it should."""

    config: Config
    model: Any = field(default_factory=lambda: prepare_policy(tiny_llama().double()))
    steps: list[Step] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        settings = self.config
        samples = [
            TrainSample(item.meta.ordinal, trajectory, advantage)
            for item in batch.items
            for trajectory, advantage in zip(
                decode_group(item.payload).trajectories, item.advantages, strict=True
            )
        ]
        samples = list(batch_wide(samples, settings.algorithm.advantage, 1.0, alone, CPU))
        (plan,) = plan_step(batch, 1, 100, layout=settings.learner.layout)
        objective = Objective(settings.algorithm, 1.0, settings.schedule.max_staleness, Path())
        tally, counts = Tally(CPU), StepCounts(plan.loss_tokens, plan.sequences)
        self.model.zero_grad()
        for rows in plan.micro_batches:
            of_rows = collate([samples[row] for row in rows], batch.version, CPU, settings.learner.layout)
            logits = selected_logits(self.model, of_rows.input_ids, of_rows.positions, of_rows.position_ids)
            objective(logits, of_rows, counts, tally).backward()
        found = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        metrics = tally.metrics(alone, alone)
        self.model.zero_grad()
        tokens = sum(int(s.trajectory.loss_mask.sum()) for s in samples)
        for sample in samples:
            if sample.trajectory.loss_mask.any():
                (-self.weighted_logprobs(sample) / tokens).backward()
        expected = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.steps.append(Step(samples, found, expected, metrics))

    def weighted_logprobs(self, sample: TrainSample) -> torch.Tensor:
        """Sum over the trained tokens of min(p/b, 2) A log pi."""
        t = sample.trajectory
        ids = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, len(t.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[len(t.prompt_ids) :, None])[:, 0]
        weights = (logprobs.detach() - torch.tensor(t.logprobs)).exp().clamp(max=2.0)
        advantage = (
            torch.tensor(sample.advantage)
            if sample.token_advantages is None
            else torch.tensor(sample.token_advantages)
        )
        return (weights * advantage * logprobs)[torch.tensor(t.loss_mask)].sum()


class ComputingLearner(ScriptedLearner):
    """Hands each batch to ``gradients``; its weights are scripted, and never move."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(max_staleness=gradients.config.schedule.max_staleness, step_s=1.0)
        self._gradients = gradients

    async def step(self, batch: Batch) -> StepResult:
        self._gradients.add(batch)
        return await super().step(batch)


def trained(
    *overrides: str, reward: Any = None, rollout: Rollout = single_turn, length: Any = None
) -> tuple[Outcome, list[Step]]:
    """Run, and hold every step's gradient to its formula."""
    settings = config("run.steps=4", "rollout.max_new_tokens=12", *overrides)
    gradients = Gradients(settings)
    engine = ScriptedGenerator(
        length=length or (lambda request: 1 + (3 * request.key.ordinal + 5 * request.key.sample) % 11),
        vocab_size=VOCAB,
    )
    scorer = ScriptedScorer() if reward is None else ScriptedScorer(reward)
    outcome = run(settings, [engine], ComputingLearner(gradients), scorer=scorer, rollout=rollout)
    assert len(gradients.steps) == 4
    for step in gradients.steps:
        for name, expected in step.expected.items():
            assert (step.gradient[name] - expected).abs().max() < 1e-7, name
        assert all(np.isfinite(value) for value in step.metrics.values())
    return outcome, gradients.steps


def changed(change: Any) -> Rollout:
    """Single turns, with the arrays of some answers changed: ``change(task, sample) -> slice, mask``."""

    async def rollout(task: Task, client: ModelClient) -> RolloutResult:
        found = await single_turn(task, client)
        keep, mask = change(task, found)
        return RolloutResult(
            prompt_ids=found.prompt_ids,
            token_ids=found.token_ids[keep],
            loss_mask=mask[keep],
            logprobs=np.where(mask, found.logprobs, 0.0).astype(np.float32)[keep],
            versions=found.versions[keep],
            finish_reason=found.finish_reason,
        )

    return rollout


def by_length(task: Task, result: RolloutResult) -> float:
    return float(len(result.token_ids) % 3)


def nonzero(steps: list[Step]) -> list[bool]:
    return [any(g.abs().max() > 1e-4 for g in step.gradient.values()) for step in steps]


PACKING = pytest.mark.parametrize("packing", [False, True])


@PACKING
@pytest.mark.parametrize("group_size", [1, 4])
def test_a_group_of_one_trains_where_the_baseline_is_not_the_group(packing: bool, group_size: int) -> None:
    _, steps = trained(
        f"rollout.group_size={group_size}",
        "rollout.min_group=1",
        "algorithm.preset=reinforce_plus_plus",
        f"learner.packing={packing}",
        reward=lambda task, result: float(len(result.token_ids)),
    )
    assert all(nonzero(steps))
    assert all(len(step.samples) == 2 * group_size for step in steps)


def test_equal_rewards_have_exactly_no_gradient() -> None:
    _, steps = trained("rollout.group_size=4", reward=lambda task, result: 0.1)
    for step in steps:
        assert all((g == 0).all() for g in step.gradient.values())


@PACKING
def test_empty_and_single_token_and_masked_answers_and_tool_tokens(packing: bool) -> None:
    def change(task: Task, found: RolloutResult) -> tuple[slice, np.ndarray]:
        length = len(found.token_ids)
        mask = np.ones(length, np.bool_)
        kind = length % 5
        if kind == 0:
            mask[:] = False  # nothing of it is trained
        elif kind == 1:
            return slice(0, 0), mask  # the policy ended at once, and no token was kept
        elif kind == 2:
            return slice(0, 1), mask
        elif kind == 3:
            mask[1:-1] = False  # a tool wrote what is in the middle
        return slice(None), mask

    _, steps = trained(
        "rollout.group_size=8", f"learner.packing={packing}", reward=by_length, rollout=changed(change)
    )
    answers = [s.trajectory for step in steps for s in step.samples]
    assert {0, 1} < {len(t.token_ids) for t in answers}
    assert any(len(t.token_ids) > 1 and not t.loss_mask.any() for t in answers)
    assert any(
        t.loss_mask[0] and t.loss_mask[-1] and not t.loss_mask.all() for t in answers if len(t.loss_mask)
    )
    assert all(nonzero(steps))
    for step in steps:
        # Answers without a token still count in their group's mean.
        by_group: dict[int, list[float]] = {}
        for sample in step.samples:
            by_group.setdefault(sample.ordinal, []).append(sample.advantage)
        assert all(sum(of_group) == pytest.approx(0.0, abs=1e-9) for of_group in by_group.values())


def test_groups_of_which_nothing_is_trained_are_dropped_by_name() -> None:
    def change(task: Task, found: RolloutResult) -> tuple[slice, np.ndarray]:
        return slice(None), np.full(len(found.token_ids), task.ordinal % 3 != 0)

    outcome, _ = trained("rollout.group_size=4", reward=by_length, rollout=changed(change))
    dropped = [r for r in outcome.log.retired_ if r.state == "dropped"]
    assert dropped
    assert all(r.reason == "no_trained_token" and r.ordinal % 3 == 0 for r in dropped)


def test_a_reward_that_is_no_number_costs_its_sample_and_a_zero_counts() -> None:
    """As the reward pool raises it for NaN, inf and None of all functions."""

    def reward(task: Task, result: RolloutResult) -> float:
        value = {0: float("nan"), 1: 0.0}.get(len(result.token_ids) % 4, 1.0)
        if not np.isfinite(value):
            raise RewardValueError(f"found {value}")
        return value

    outcome, steps = trained("rollout.group_size=6", "reward.on_error=drop", reward=reward)
    metas = [item.meta for batch in outcome.learner.batches for item in batch.items]
    assert any(meta.failures for meta in metas)
    assert all(f.kind == "RewardValueError" for meta in metas for f in meta.failures)
    assert {r for meta in metas for r in meta.rewards} == {0.0, 1.0}
    assert any(nonzero(steps))


# ---------------------------------------------------------------------- a greedy answer as baseline


def greedy_length(request: Any) -> int:
    return 4 if request.sampling.temperature == 0.0 else 5 + (request.key.ordinal + request.key.sample) % 3


@PACKING
@pytest.mark.parametrize("group_size", [1, 3])
def test_rewards_are_compared_with_the_greedy_answers(packing: bool, group_size: int) -> None:
    outcome, steps = trained(
        f"rollout.group_size={group_size}",
        "rollout.min_group=1",
        "algorithm.advantage=remax",
        f"learner.packing={packing}",
        reward=lambda task, result: float(len(result.token_ids)),
        length=greedy_length,
    )
    for batch in outcome.learner.batches:
        for item in batch.items:
            greedy = decode_group(item.payload).baseline
            assert greedy is not None
            assert item.meta.baseline is not None
            assert (len(greedy.token_ids), greedy.sample) == (4, group_size)
            assert not greedy.loss_mask.any()
            assert item.meta.baseline.reward == 4.0
            assert len(item.meta.trajectories) == group_size
            assert item.advantages == tuple(len_ - 4.0 for len_ in item.meta.rewards)
    assert all(len(s.trajectory.token_ids) > 4 for step in steps for s in step.samples)
    assert all(nonzero(steps))


@pytest.mark.parametrize(("on_error", "state"), [("fail", "failed"), ("drop", "dropped")])
def test_a_group_whose_greedy_answer_failed_follows_on_error(on_error: str, state: str) -> None:
    def reward(task: Task, result: RolloutResult) -> float:
        if len(result.token_ids) == 4 and task.ordinal % 3 == 0:
            raise RewardValueError("the greedy answer cannot be scored")
        return float(len(result.token_ids))

    outcome, _ = trained(
        "algorithm.advantage=remax", f"reward.on_error={on_error}", reward=reward, length=greedy_length
    )
    ends = [r for r in outcome.log.retired_ if r.state not in ("trained",)]
    assert ends
    assert {r.state for r in ends} == {state}
    assert all(r.ordinal % 3 == 0 for r in ends)
    reasons = {
        "failed": "RewardValueError: the greedy answer cannot be scored",
        "dropped": "no_greedy_answer",
    }
    assert {r.reason for r in ends} == {reasons[state]}


def test_equal_rewards_have_signal_beside_another_greedy_one() -> None:
    outcome, steps = trained(
        "algorithm.advantage=remax",
        "algorithm.filter_zero_variance=refill",
        reward=lambda task, result: float(len(result.token_ids) == 4) if task.ordinal % 2 else 1.0,
        length=greedy_length,
    )
    filtered = {r.ordinal % 2 for r in outcome.log.retired_ if r.state == "filtered"}
    assert filtered == {0}
    assert {s.advantage for step in steps for s in step.samples} == {-1.0}
