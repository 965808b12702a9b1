"""The critic without an engine: estimates, explained variance, the value model, and both updates as one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.values import clipped_value_loss, explained_variance
from asyncrl.config_load import parse_config
from asyncrl.errors import BadStepsError, InvariantError, LearnerError
from asyncrl.learners.actor_critic import ActorCritic
from asyncrl.learners.advantages import batch_wide, gae_estimates
from asyncrl.learners.base import StepResult, TrainSample
from asyncrl.learners.collate import collate
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.learners.value import load_value_model
from asyncrl.plan import placement_rows
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import Batch
from tests.unit.recorded_batches import batch_of, gae_by_definition, record_batch, shares, with_values
from tests.unit.test_algorithm_wiring import AllSum
from tests.unit.test_collate import sample
from tests.unit.test_config import VALUES, errors
from tests.unit.tiny_models import tiny_gpt2, tiny_llama

CPU = torch.device("cpu")
NAN = float("nan")


def answer(reward: float, values: list[float], mask: list[bool] | None = None, **fields: Any) -> TrainSample:
    tokens = list(range(1, len(values) + 1))
    mask = mask or [True] * len(values)
    bare = sample([5, 6], tokens, mask, [0] * len(values))
    return replace(bare, advantage=reward, values=np.array(values, np.float32), **fields)


# ---------------------------------------------------------------------- estimates


def test_a_tool_token_inside_an_answer_takes_no_time_and_its_value_reaches_nothing() -> None:
    found = gae_estimates([answer(4.0, [1.0, 2.0, NAN, 3.0], [True, True, False, True])], 0.5, 0.5)
    # delta: 0.5 * 2 - 1 = 0, 0.5 * 3 - 2 = -0.5, 4 - 3 = 1; each A is its delta + 0.25 times the next.
    assert found.advantages.tolist() == [[-0.0625, -0.25, 0.0, 1.0]]
    assert found.returns.tolist() == [[0.9375, 1.75, 0.0, 4.0]]
    assert found.values.tolist() == [[1.0, 2.0, 0.0, 3.0]]


def test_the_kl_comes_off_the_reward_of_each_token() -> None:
    kl = np.array([1.0, NAN, 3.0], np.float32)
    found = gae_estimates([answer(4.0, [0.0, 0.0, 0.0], [True, False, True], kl=kl)], 1.0, 1.0, 0.5)
    assert found.returns.tolist() == [[2.0, 0.0, 2.5]]


def test_nothing_is_expected_after_an_answer_that_was_cut_off() -> None:
    whole = answer(1.0, [0.3, 0.6])
    cut_off = replace(whole, trajectory=replace(whole.trajectory, finish_reason="length"))
    ((a, b), (c, d)) = gae_estimates([whole, cut_off], 0.9, 0.9).advantages.tolist()
    assert (a, b) == (c, d)
    assert b == pytest.approx(1.0 - 0.6)


def test_the_critic_of_perfect_foresight_leaves_no_advantage() -> None:
    found = gae_estimates([answer(0.7, [0.7] * 5), answer(0.0, [0.0] * 3)], 1.0, 0.9)
    assert found.advantages.abs().max() < 1e-6
    assert found.mask.sum() == 8


def test_single_tokens_empty_answers_and_no_samples() -> None:
    found = gae_estimates([answer(2.0, [0.5]), answer(2.0, [])], 1.0, 1.0)
    assert found.advantages.tolist() == [[1.5], [0.0]]
    assert gae_estimates([], 1.0, 1.0).mask.tolist() == [[False]]


def test_a_sample_without_values_is_refused() -> None:
    with pytest.raises(InvariantError, match="sample 3 of ordinal 17 has no values of a critic, expected 2"):
        gae_estimates([sample([5], [1, 2], [True, True], [0, 0])], 1.0, 1.0)


def test_estimates_are_those_of_the_definition_and_whitened_over_the_ranks() -> None:
    groups, reduce = record_batch(2), AllSum(2)
    ranks = [with_values(share) for share in shares(groups, 2, 2, 80, "gae")]
    assert all(share.samples for share in ranks)
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda r: batch_wide(ranks[r].samples, "gae", 0.95, reduce.of(r), CPU, lam=0.9), range(2)
            )
        )
    samples = [s for of_rank in found for s in of_rank]
    expected = np.concatenate([gae_by_definition(s, 0.95, 0.9) for s in samples])
    expected = (expected - expected.mean()) / np.sqrt(expected.var(ddof=1) + 1e-8)
    mine = np.concatenate([s.token_advantages[s.trajectory.loss_mask] for s in samples])
    assert any(not s.trajectory.loss_mask.all() for s in samples)
    np.testing.assert_allclose(mine, expected, atol=1e-6)
    outside = np.concatenate([s.token_advantages[~s.trajectory.loss_mask] for s in samples])
    assert not outside.any()


# ---------------------------------------------------------------------- value loss, explained variance


def test_the_clip_ignores_a_value_that_has_moved_far_enough_towards_its_return() -> None:
    values = torch.tensor([[0.5, 0.5, -0.5]], requires_grad=True)
    old, returns = torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 1.0]])
    found = clipped_value_loss(values, old, returns, torch.ones(1, 3, dtype=torch.bool), 0.2)
    # Beyond the clip towards the return: the clipped error, larger, has no gradient. Away from it: pulled.
    torch.testing.assert_close(found.loss, torch.tensor([[0.32, 0.125, 1.125]]))
    found.loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 0.5, -1.5]]))
    assert found.clipped.tolist() == [[True, False, False]]


def test_explained_variance_spans_the_ranks() -> None:
    torch.manual_seed(0)
    values, returns, mask = torch.randn(4, 6), torch.randn(4, 6) + 3.0, torch.rand(4, 6) < 0.7
    values[~mask] = NAN
    reduce = AllSum(2)
    with ThreadPoolExecutor(2) as pool:
        halves = (slice(0, 1), slice(1, 4))
        found = pool.map(
            lambda r: explained_variance(
                values[halves[r]], returns[halves[r]], mask[halves[r]], reduce.of(r)
            ),
            range(2),
        )
    of_all = 1.0 - (returns - values)[mask].double().var() / returns[mask].double().var()
    assert list(found) == pytest.approx([float(of_all)] * 2)


def test_returns_that_do_not_vary_explain_nothing() -> None:
    mask = torch.ones(1, 7, dtype=torch.bool)
    assert isnan(explained_variance(torch.randn(1, 7), torch.full((1, 7), 0.1), mask))
    assert isnan(explained_variance(torch.ones(1, 7), torch.ones(1, 7), torch.zeros_like(mask)))


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_values_are_those_of_the_state_before_each_trained_token(make: Any, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    model = load_value_model(str(tmp_path), dtype=torch.float32, trust_remote_code=False, checkpointing=False)
    samples = [
        sample([5, 6], [7, 8, 9], [True, False, True], [0, 0, 0]),
        sample([9], [3], [True], [0]),
    ]
    batch = collate(samples, 0, CPU)
    assert model(batch.input_ids, batch.positions).tolist() == [0.0, 0.0, 0.0]
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias)
    found = model(batch.input_ids, batch.positions)
    assert found.dtype == torch.float32
    contexts = [[5, 6], [5, 6, 7, 8], [9]]
    for value, context in zip(found, contexts, strict=True):
        hidden = model.transformer(input_ids=torch.tensor([context])).last_hidden_state[0, -1]
        torch.testing.assert_close(value, hidden @ model.head.weight[0] + model.head.bias[0])


# ---------------------------------------------------------------------- both updates as one


class ScriptedCritic:
    """Takes ``step_s`` a step; the calls of ``bad_steps`` are not finite."""

    def __init__(self, step_s: float = 0.0, bad_steps: Collection[int] = ()) -> None:
        self.versions: list[int] = []
        self._step_s, self._bad_steps = step_s, frozenset(bad_steps)

    async def step(self, batch: Batch) -> StepResult:
        await asyncio.sleep(self._step_s)
        self.versions.append(batch.version)
        skipped = len(self.versions) - 1 in self._bad_steps
        return StepResult(skipped, {"critic/vf_loss": 0.5}, self._step_s)


def batch(version: int) -> Batch:
    return batch_of(record_batch(version), version, "gae")


def test_policy_and_critic_are_updated_at_the_same_time() -> None:
    policy, critic = ScriptedLearner(max_staleness=2, step_s=2.0), ScriptedCritic(step_s=3.0)

    async def main() -> tuple[StepResult, float]:
        learner = ActorCritic(policy, critic, warmup_steps=0, max_bad_steps=3)
        await learner.start()
        result = await learner.step(batch(0))
        return result, asyncio.get_running_loop().time()

    result, seconds = run_virtual(main())
    assert seconds == pytest.approx(3.0)
    assert (result.skipped, result.train_s) == (False, 3.0)
    assert (policy.version, critic.versions) == (1, [0])
    expected = {
        "critic/vf_loss": 0.5,
        "critic/warmup": 0.0,
        "timing_s/policy_update": 2.0,
        "timing_s/critic_update": 3.0,
    }
    assert expected.items() <= result.metrics.items()
    assert "actor/pg_loss" in result.metrics


async def test_in_the_warm_up_the_critic_alone_is_trained() -> None:
    policy, critic = ScriptedLearner(max_staleness=2, version=2), ScriptedCritic(bad_steps=[1])
    learner = ActorCritic(policy, critic, warmup_steps=2, max_bad_steps=3)
    await learner.start()
    results = [await learner.step(batch(version)) for version in (0, 1, 1, 2)]
    assert critic.versions == [0, 1, 1, 2]
    assert [b.version for b in policy.batches] == [2]
    # Where the critic alone is trained, a step that changed nothing is one that was skipped.
    assert [r.skipped for r in results] == [False, True, False, False]
    assert [r.metrics["critic/warmup"] for r in results] == [1.0, 1.0, 1.0, 0.0]
    assert [r.metrics.get("actor/lr") for r in results[:3]] == [0.0] * 3


async def test_a_critic_that_is_not_finite_does_not_hold_the_policy_but_ends_the_run_in_time() -> None:
    policy, critic = ScriptedLearner(max_staleness=2), ScriptedCritic(bad_steps=[0, 2, 3])
    learner = ActorCritic(policy, critic, warmup_steps=0, max_bad_steps=1)
    await learner.start()
    for version in range(3):
        assert not (await learner.step(batch(version))).skipped
    with pytest.raises(BadStepsError, match=r"2 updates of the critic in a row .*max_bad_steps = 1"):
        await learner.step(batch(3))


async def test_a_death_of_either_ends_the_step() -> None:
    learner = ActorCritic(
        ScriptedLearner(max_staleness=2, dies_at=0), ScriptedCritic(), warmup_steps=0, max_bad_steps=3
    )
    await learner.start()
    with pytest.RaisesGroup(LearnerError):
        await learner.step(batch(0))


# ---------------------------------------------------------------------- the config


def test_a_critic_is_there_where_the_advantage_needs_it() -> None:
    assert not parse_config(VALUES).has_critic
    alone = ["rollout.group_size=1", "rollout.min_group=1", "critic.ranks=2", "critic.cpu_cores=[0,1]"]
    config = parse_config(VALUES, ["algorithm.preset=ppo", *alone])
    assert config.has_critic
    rows = dict(placement_rows(config))
    assert "core 1" in rows["critic 1"]
    assert not any("critic" in name for name, _ in placement_rows(parse_config(VALUES, alone[2:])))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("critic.warmup_steps=100", ["critic.warmup_steps: found 100", "run.steps 100"]),
        ("critic.micro_batch_tokens=127", ["critic.micro_batch_tokens: found 127", "64 + 64 = 128"]),
        ("critic.ranks=9", ["rollout.groups_per_step: found 8", "9 * 1 = 9"]),
    ],
)
def test_what_is_refused_of_a_critic(override: str, parts: list[str]) -> None:
    (line,) = errors("algorithm.preset=ppo", override)
    for part in parts:
        assert part in line
    parse_config(VALUES, [override])  # no critic, no quarrel
