"""From the controller's scalars to the learner's loss: what is computed where, and that it is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.algorithms.losses import m2po_limit
from asyncrl.algorithms.masks import whiten
from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection
from asyncrl.errors import NothingTrainableError
from asyncrl.generators.scripted import ScriptedGenerator, log_normal_length
from asyncrl.learners.advantages import batch_wide, from_user
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.learners.collate import collate
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.rollout import GroupRequest, RolloutHost
from asyncrl.types import SamplingParams, Task
from tests.unit.controller_harness import ScriptedScorer, config, run
from tests.unit.recorded_batches import MAX_AGE, VOCABULARY, record_batch, shares

CPU = torch.device("cpu")
FAST = {"length": log_normal_length(20.0, 0.8), "token_s": 0.01}


def step(advantage: str = "grpo", ranks: int = 1) -> list[RankStep]:
    groups = record_batch(version=2, groups=3)
    return shares(groups, version=2, ranks=ranks, micro_batch_tokens=10**6, advantage=advantage)


def by_token(samples: tuple[TrainSample, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (B, T) as the loss sees them, and the mask."""
    batch = collate(samples, 2, CPU)
    return torch.where(batch.mask, batch.advantages, 0.0), batch.mask


# ---------------------------------------------------------------------- the learner's part


def test_scalars_stay_scalars() -> None:
    (share,) = step()
    assert batch_wide(share.samples, "grpo", 1.0, lambda _: None, CPU) == share.samples
    assert collate(share.samples, 2, CPU).advantages.shape == (12, 1)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_spans_the_step(name: str) -> None:
    (share,) = step(name)
    found, mask = by_token(batch_wide(share.samples, name, 1.0, lambda _: None, CPU))
    scalars = torch.tensor([[s.advantage] for s in share.samples])
    torch.testing.assert_close(found, whiten(scalars, mask), atol=1e-6, rtol=0)
    assert found[mask].mean().abs() < 1e-6
    assert found[mask].std() == pytest.approx(1.0, abs=1e-6)


class AllSum:
    """What an all-reduce does, between threads."""

    def __init__(self, ranks: int) -> None:
        self._parts = [torch.zeros(())] * ranks
        self._barrier = Barrier(ranks, timeout=30)

    def of(self, rank: int) -> Callable[[torch.Tensor], None]:
        def all_sum(values: torch.Tensor) -> None:
            self._parts[rank] = values.clone()
            self._barrier.wait()
            values.copy_(torch.stack(self._parts).sum(0))
            self._barrier.wait()

        return all_sum


def test_ranks_whiten_together() -> None:
    name = "reinforce_plus_plus"
    (whole,) = step(name)
    expected = {
        (s.ordinal, s.trajectory.sample): s.token_advantages
        for s in batch_wide(whole.samples, name, 0.9, lambda _: None, CPU)
    }
    ranks, reduce = step(name, ranks=2), AllSum(2)
    assert all(share.samples for share in ranks)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda rank: batch_wide(ranks[rank].samples, name, 0.9, reduce.of(rank), CPU), range(2)
        )
    for sample in [s for samples in found for s in samples]:
        reference = expected.pop((sample.ordinal, sample.trajectory.sample))
        np.testing.assert_allclose(sample.token_advantages, reference, atol=1e-6)
    assert not expected


def test_discounting_counts_trained_tokens_alone() -> None:
    (share,) = step("reinforce_plus_plus")
    sample = next(s for s in share.samples if s.advantage == 1.0 and not s.trajectory.loss_mask.all())
    mask = sample.trajectory.loss_mask
    steps_left = mask[::-1].cumsum()[::-1] - 1
    others = [replace(s, advantage=0.0) for s in share.samples if s is not sample]
    found = batch_wide((sample, *others), "reinforce_plus_plus", 0.5, lambda _: None, CPU)[0].token_advantages
    assert found is not None
    # Whitened, so up to a factor and an offset; two tokens fix them.
    powers = 0.5 ** steps_left[mask].astype(np.float64)
    slope = (found[mask][-1] - found[mask][0]) / (powers[-1] - powers[0])
    np.testing.assert_allclose(found[mask], found[mask][-1] + slope * (powers - powers[-1]), atol=1e-4)


def test_a_users_advantage_sees_whole_groups_and_trained_lengths() -> None:
    (share,) = step("mine.py:advantage")
    assert {s.advantage for s in share.samples} == {0.0, 1.0}
    seen = []

    def function(rewards: list[float], lengths: list[int]) -> list[float]:
        seen.append((tuple(rewards), tuple(lengths)))
        return [r - n for r, n in zip(rewards, lengths, strict=True)]

    found = from_user(share.samples, function)
    assert len(seen) == 3
    assert [s.advantage for s in found] == [
        s.trajectory.reward - int(s.trajectory.loss_mask.sum()) for s in share.samples
    ]


def test_the_learner_loads_a_users_functions_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def advantage(rewards, lengths):\n    return [7.0 for _ in rewards]\n")
    learner = PolicyRank(
        model=ModelSection(path="none"),
        learner=LearnerSection(device="cpu"),
        algorithm=AlgorithmSection(advantage="mine.py:advantage"),
        model_path="none",
        temperature=1.0,
        max_staleness=MAX_AGE,
        total_steps=1,
        master=("127.0.0.1", 1),
        folder=tmp_path,
    )
    assert {s.advantage for s in learner._with_advantages(step()[0])} == {7.0}


# ---------------------------------------------------------------------- the objective


def logits_of(share: RankStep) -> torch.Tensor:
    tokens = sum(int(s.trajectory.loss_mask.sum()) for s in share.samples)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, VOCABULARY, dtype=torch.float64, generator=generator)


def evaluate(
    algorithm: AlgorithmSection, splits: list[range], *, folder: Path | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient by logits of the whole step, in micro-batches of these rows."""
    (share,) = step()
    objective, tally = Objective(algorithm, 1.0, MAX_AGE, folder), Tally(CPU)
    logits, counts = logits_of(share).requires_grad_(), StepCounts(share.loss_tokens, share.sequences, 8.0)
    batches, start = [], 0
    for rows in splits:
        batch = collate([share.samples[row] for row in rows], share.version, CPU)
        batches.append((logits[start : start + len(batch.targets)], batch))
        start += len(batch.targets)
    limit = None
    if objective.needs_preview:
        limit = objective.limit(torch.cat([objective.preview(x, batch) for x, batch in batches]))
    loss = torch.stack([objective(x, batch, counts, tally, limit) for x, batch in batches]).sum()
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


LOSSES = [
    {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    {"loss": "cispo"},
    {"loss": "gmpo", "aggregation": "seq-mean"},
    {"loss": "sapo", "old_logprobs": "behaviour", "correction": "none"},
    {"loss": "aipo", "correction": "none"},
    {"loss": "topr", "correction": "none"},
    {"loss": "dppo", "correction": "none"},
    {"loss": "m2po", "correction": "none", "m2po_tau": 0.3},
    {"old_logprobs": "log_linear", "correction": "decoupled_ppo"},
    {"correction": "seq_mask"},
    {"correction": "tis_sequence", "aggregation": "seq-mean-token-sum-norm"},
    {"correction": "icepop", "entropy_coef": 0.1},
]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: "-".join(map(str, s.values())))
def test_any_split_of_a_step_has_the_same_loss_and_gradient(settings: dict) -> None:
    algorithm = AlgorithmSection.model_validate(settings)
    loss, grad = evaluate(algorithm, [range(12)])
    assert grad.abs().max() > 1e-5
    split_loss, split_grad = evaluate(algorithm, [range(1), range(1, 6), range(6, 6), range(6, 12)])
    torch.testing.assert_close(split_loss, loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(split_grad, grad, atol=1e-12, rtol=0)


def test_the_entropy_bonus_is_the_mean_entropy_off_the_loss() -> None:
    plain, plain_grad = evaluate(AlgorithmSection(), [range(12)])
    found, grad = evaluate(AlgorithmSection(entropy_coef=0.1), [range(12)])
    logits = logits_of(step()[0]).requires_grad_()
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    (entropy_grad,) = torch.autograd.grad(entropy, logits)
    torch.testing.assert_close(found, plain - 0.1 * entropy.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(grad, plain_grad - 0.1 * entropy_grad, atol=1e-12, rtol=0)


def test_a_users_loss_is_trained_with(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from asyncrl.algorithms.losses import ppo_clip\n"
        "from dataclasses import replace\n"
        "def loss(inputs, settings):\n"
        "    found = ppo_clip(inputs, settings)\n"
        "    return replace(found, loss=2 * found.loss)\n"
    )
    loss, grad = evaluate(AlgorithmSection(), [range(12)])
    found, found_grad = evaluate(AlgorithmSection(loss="mine.py:loss"), [range(12)], folder=tmp_path)
    torch.testing.assert_close(found, 2 * loss)
    torch.testing.assert_close(found_grad, 2 * grad)


def test_padding_between_ranks_does_not_move_a_limit() -> None:
    squares = torch.tensor([0.5, 0.0, 1.5, 0.1], dtype=torch.float64)
    padded = torch.cat([squares, torch.full((3,), torch.inf, dtype=torch.float64)])
    for tau in (0.01, 0.3, 10.0):
        assert m2po_limit(padded, tau) == m2po_limit(squares, tau)


# ---------------------------------------------------------------------- the controller's part


def test_advantages_are_made_from_shaped_rewards_and_logs_from_scored_ones() -> None:
    settings = config("run.steps=3", "algorithm.advantage=dr_grpo", "algorithm.length_penalty=0.5")
    outcome = run(settings, [ScriptedGenerator(**FAST)])
    items = [item for batch in outcome.learner.batches for item in batch.items]
    for item in items:
        answers = item.meta.trajectories
        shaped = [a.reward - 0.5 * a.response_tokens / 64 for a in answers]
        assert item.advantages == pytest.approx(group_advantages("dr_grpo", shaped))
        assert set(item.meta.rewards) <= {0.0, 1.0}
    assert any(len(set(item.meta.rewards)) == 1 and any(item.advantages) for item in items)


def test_opo_weighs_by_trained_lengths() -> None:
    outcome = run(config("run.steps=3", "algorithm.advantage=opo"), [ScriptedGenerator(**FAST)])
    mixed = [
        item
        for batch in outcome.learner.batches
        for item in batch.items
        if len(set(item.meta.rewards)) > 1 and len({a.response_tokens for a in item.meta.trajectories}) > 1
    ]
    assert mixed
    for item in mixed:
        lengths = [a.loss_tokens for a in item.meta.trajectories]
        assert item.advantages == pytest.approx(group_advantages("opo", item.meta.rewards, lengths))
        assert sum(item.advantages) != pytest.approx(0.0)


def flat_every_third(task: Task, result) -> float:
    return 1.0 if task.ordinal % 3 == 0 else float(result.token_ids.sum() % 97)


def test_dropped_groups_leave_their_step_smaller() -> None:
    settings = config("run.steps=12", "algorithm.filter_zero_variance=drop")
    outcome = run(settings, [ScriptedGenerator(**FAST)], scorer=ScriptedScorer(flat_every_third))
    sizes = [len(batch.items) for batch in outcome.learner.batches]
    assert len(sizes) == 12
    assert set(sizes) == {1, 2}
    filtered = [r.ordinal for r in outcome.log.retired_ if r.state == "filtered"]
    assert filtered
    assert all(o % 3 == 0 for o in filtered)
    assert not any(i.meta.ordinal % 3 == 0 for batch in outcome.learner.batches for i in batch.items)


def test_a_step_that_lost_all_of_its_groups_takes_others() -> None:
    settings = config("run.steps=5", "algorithm.filter_zero_variance=drop", "rollout.groups_per_step=1")
    outcome = run(settings, [ScriptedGenerator(**FAST)], scorer=ScriptedScorer(flat_every_third))
    assert [len(batch.items) for batch in outcome.learner.batches] == [1] * 5
    assert outcome.summary.policy_version == 5


def test_nothing_but_dropped_groups_ends_in_a_clear_error() -> None:
    settings = config("run.steps=5", "algorithm.filter_zero_variance=drop", "run.max_unusable_groups=20")
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [ScriptedGenerator(**FAST)], scorer=ScriptedScorer(lambda task, result: 1.0))
    assert caught.group_contains(NothingTrainableError, match="filtered: zero_variance")


# ---------------------------------------------------------------------- truncation


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_answers_that_were_cut_off_are_not_trained(mask_truncated: bool) -> None:
    engine = ScriptedGenerator(length=lambda request: 64 if request.key.sample % 2 else 10, token_s=1e-3)

    async def group():
        host = RolloutHost(engine, ScriptedScorer(), lambda ids: "", mask_truncated=mask_truncated)
        await engine.start()
        request = GroupRequest(Task(0, "t", "", (1, 2)), 0, 4, SamplingParams(16), 0, 100.0)
        meta, _ = await host.run_group(request)
        return meta

    meta = asyncio.run(group())
    assert [t.finish_reason for t in meta.trajectories] == ["stop", "length"] * 2
    assert [t.response_tokens for t in meta.trajectories] == [10, 16] * 2
    assert [t.loss_tokens for t in meta.trajectories] == [10, 0 if mask_truncated else 16] * 2
    assert len(meta.rewards) == 4
