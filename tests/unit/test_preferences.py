"""Online DPO and IPO: which answers make a pair, and the gradient of pairs that are split up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.algorithms.names import PREFERENCE_NAMES
from asyncrl.algorithms.pairs import pair_signs
from asyncrl.algorithms.preferences import PREFERENCE_LOSSES, pair_weights
from asyncrl.config import AlgorithmSection
from asyncrl.errors import InvariantError
from asyncrl.generators.scripted import ScriptedGenerator, log_normal_length
from asyncrl.learners.base import RankStep
from asyncrl.learners.collate import collate
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.preferences import Preferences
from asyncrl.types import Metrics
from tests.unit.controller_harness import config, run
from tests.unit.recorded_batches import MAX_AGE, VOCABULARY, record_batch, shares, with_reference

CPU = torch.device("cpu")
BETA = 0.3


def test_the_best_and_the_worst_make_a_pair_and_ties_none() -> None:
    assert pair_signs([0.5, 1.0, 0.0, 1.0], [1, 1, 1, 1]) == (0.0, 1.0, -1.0, 0.0)
    assert pair_signs([1.0, 1.0], [1, 1]) == (0.0, 0.0)
    assert pair_signs([1.0], [1]) == (0.0,)
    # An answer of which nothing is trained teaches nothing: the next best takes its place.
    assert pair_signs([1.0, 0.5, 0.0], [0, 4, 2]) == (0.0, 1.0, -1.0)
    assert pair_signs([1.0, 0.0], [0, 4]) == (0.0, 0.0)


def test_the_config_knows_the_losses() -> None:
    assert set(PREFERENCE_NAMES) == PREFERENCE_LOSSES.keys()


@pytest.mark.parametrize("name", PREFERENCE_NAMES)
def test_weights_are_the_derivative_by_the_margin(name: str) -> None:
    h = torch.tensor([-3.0, 0.0, 0.4, 20.0], dtype=torch.float64)
    loss, epsilon = PREFERENCE_LOSSES[name], 1e-6
    central = (loss(h + epsilon, BETA) - loss(h - epsilon, BETA)) / (2 * epsilon)
    torch.testing.assert_close(pair_weights(h, loss, BETA), -central, atol=1e-8, rtol=1e-6)


def section(name: str) -> AlgorithmSection:
    return AlgorithmSection.model_validate({"loss": name, "correction": "none", "preference_beta": BETA})


def step(name: str) -> RankStep:
    (share,) = shares(record_batch(version=2, groups=5), version=2, ranks=1, micro_batch_tokens=10**6)
    return with_reference(share, {"loss": name})


def logits_of(share: RankStep) -> torch.Tensor:
    tokens = sum(int(s.trajectory.loss_mask.sum()) for s in share.samples)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_()


def as_the_learner(name: str, micro_batches: list[range]) -> tuple[torch.Tensor, Metrics]:
    """Gradient by logits, and metrics, in two passes over micro-batches of these rows."""
    share, algorithm = step(name), section(name)
    objective, preferences, tally = Objective(algorithm, 1.0, MAX_AGE), Preferences(algorithm), Tally(CPU)
    logits, spans, start = logits_of(share), [], 0
    for rows in micro_batches:
        batch = collate([share.samples[row] for row in rows], 2, CPU)
        spans.append(logits[start : start + len(batch.targets)])
        start += len(batch.targets)
    ratios = []
    for rows, span in zip(micro_batches, spans, strict=True):
        batch = collate([share.samples[row] for row in rows], 2, CPU)
        ratios.append(preferences.log_ratios(objective.logprobs(span, batch), batch)[: len(rows)])
    members = [row for rows in micro_batches for row in rows]
    samples, sums = preferences.weigh(share.samples, members, torch.cat(ratios))
    tally.add(**sums)
    counts = StepCounts(share.loss_tokens, int(sums["pairs"]))
    losses = [
        objective(span, collate([samples[row] for row in rows], 2, CPU), counts, tally)
        for rows, span in zip(micro_batches, spans, strict=True)
    ]
    (grad,) = torch.autograd.grad(torch.stack(losses).sum(), logits)
    return grad, tally.metrics(lambda _: None, lambda _: None)


def directly(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient, loss and margins by plain autograd over all pairs at once."""
    share = step(name)
    logits, start, ratios = logits_of(share), 0, []
    for sample in share.samples:
        mask = torch.from_numpy(sample.trajectory.loss_mask)
        targets = torch.from_numpy(sample.trajectory.token_ids)[mask].long()
        log_pi = logits[start : start + len(targets)].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ratios.append((log_pi - torch.from_numpy(sample.reference)[mask].double()).sum())
        start += len(targets)
    groups = sorted({s.ordinal for s in share.samples})
    signed = [(s.ordinal, s.advantage, r) for s, r in zip(share.samples, ratios, strict=True) if s.advantage]
    h = torch.stack(
        [sum(a * r for o, a, r in signed if o == g) for g in groups if any(o == g for o, *_ in signed)]
    )
    loss = (-logsigmoid(BETA * h) if name == "dpo" else (h - 1 / (2 * BETA)) ** 2).mean()
    (grad,) = torch.autograd.grad(loss, logits)
    return grad, loss.detach(), h.detach()


SPLITS: dict[str, list[range]] = {
    "whole": [range(20)],
    "one by one": [range(i, i + 1) for i in range(20)],
    "with a dummy": [range(7), range(7, 7), range(7, 20)],
}


@pytest.mark.parametrize("name", PREFERENCE_NAMES)
@pytest.mark.parametrize("split", SPLITS)
def test_a_pair_has_its_exact_gradient_in_whatever_micro_batches(name: str, split: str) -> None:
    expected, loss, h = directly(name)
    grad, metrics = as_the_learner(name, SPLITS[split])
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(grad, expected, atol=1e-7, rtol=0)
    assert metrics["actor/preference_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["actor/preference_margin"] == pytest.approx(h.mean().item(), rel=1e-6)
    assert metrics["actor/preference_accuracy"] == pytest.approx((h > 0).double().mean().item())


def test_no_pair_is_no_gradient_and_no_figures() -> None:
    share = step("dpo")
    ties = [replace(sample, advantage=0.0) for sample in share.samples]
    ratios = torch.zeros(len(ties), dtype=torch.float64)
    samples, sums = Preferences(section("dpo")).weigh(ties, range(len(ties)), ratios)
    assert samples == ties
    tally = Tally(CPU)
    tally.add(**sums)
    objective, batch = Objective(section("dpo"), 1.0, MAX_AGE), collate(samples, 2, CPU)
    logits = logits_of(share)
    (grad,) = torch.autograd.grad(objective(logits, batch, StepCounts(1, 0), tally), logits)
    assert not grad.any()
    assert not [m for m in tally.metrics(lambda _: None, lambda _: None) if "preference" in m]


def test_answers_without_a_reference_are_refused() -> None:
    samples = [replace(sample, reference=None) for sample in step("dpo").samples]
    batch = collate(samples, 2, CPU)
    with pytest.raises(InvariantError, match="without the reference's log-probs"):
        Preferences(section("dpo")).log_ratios(torch.zeros(batch.mask.shape), batch)


def test_the_controller_names_the_pair_of_each_group() -> None:
    settings: Any = config(
        "run.steps=3", "algorithm.loss=dpo", "algorithm.correction=none", "rollout.group_size=4"
    )
    outcome = run(settings, [ScriptedGenerator(length=log_normal_length(20.0, 0.8))])
    items = [item for batch in outcome.learner.batches for item in batch.items]
    for item in items:
        lengths = [a.loss_tokens for a in item.meta.trajectories]
        assert item.advantages == pair_signs(item.meta.rewards, lengths)
    assert any(any(item.advantages) for item in items)
