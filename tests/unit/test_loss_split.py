"""The gradient of a step does not depend on how the step was split into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.config import AlgorithmSection
from asyncrl.learners.base import RankStep
from asyncrl.learners.collate import collate
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.policy import prepare_policy, selected_logits
from asyncrl.types import Metrics
from tests.unit.recorded_batches import MAX_AGE, VOCABULARY, record_batch, shares

CPU = torch.device("cpu")


@cache
def policy() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return prepare_policy(LlamaForCausalLM(config).double())


@cache
def step() -> RankStep:
    (share,) = shares(record_batch(version=2, groups=3), version=2, ranks=1, micro_batch_tokens=10**6)
    return share


def gradient(
    micro_batches: tuple[tuple[int, ...], ...], aggregation: str, old_logprobs: str = "recompute"
) -> tuple[torch.Tensor, Metrics]:
    """Flat gradient of the whole model, and the step's metrics."""
    correction = "tis" if old_logprobs == "recompute" else "none"
    algorithm = AlgorithmSection.model_validate(
        {"aggregation": aggregation, "old_logprobs": old_logprobs, "correction": correction}
    )
    objective, tally = Objective(algorithm, temperature=0.8, max_staleness=MAX_AGE), Tally(CPU)
    model, share = policy(), step()
    counts = StepCounts(share.loss_tokens, share.sequences)
    model.zero_grad()
    for rows in micro_batches:
        batch = collate([share.samples[row] for row in rows], share.version, CPU)
        logits = selected_logits(model, batch.input_ids, batch.positions)
        objective(logits, batch, counts, tally).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return flat, tally.metrics(lambda _: None, lambda _: None)


@cache
def unsplit(aggregation: str, old_logprobs: str) -> tuple[torch.Tensor, Metrics]:
    return gradient((tuple(range(len(step().samples))),), aggregation, old_logprobs)


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Any order, any cuts, dummies in between."""
    order = draw(st.permutations(range(12)))
    cuts = sorted(draw(st.lists(st.integers(0, 12), max_size=8)))
    return tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 12], strict=True))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("old_logprobs", ["recompute", "behaviour"])
@given(split=splits())
@settings(max_examples=12, deadline=None)
def test_any_split_has_the_gradient_and_the_metrics_of_the_whole(
    aggregation: str, old_logprobs: str, split: tuple[tuple[int, ...], ...]
) -> None:
    expected, expected_metrics = unsplit(aggregation, old_logprobs)
    found, metrics = gradient(split, aggregation, old_logprobs)
    assert expected.abs().max() > 1e-4
    assert (found - expected).abs().max() <= 1e-12
    assert metrics == pytest.approx(expected_metrics, abs=1e-9)


def test_the_gradient_is_that_of_a_loss_written_out_by_hand() -> None:
    """Row by row, unpadded, from the whole logits; with u = 1 the gradient is -w A d log pi."""
    share, model = step(), policy()
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for sample in share.samples:
        t = sample.trajectory
        tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        logits = model(input_ids=tokens[None]).logits[0] / 0.8
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0][len(t.prompt_ids) - 1 :]
        weights = (logprobs.detach() - torch.from_numpy(t.logprobs).double()).exp().clamp(max=2.0)
        mask = torch.from_numpy(t.loss_mask)
        loss = loss - (sample.advantage * weights * logprobs)[mask].sum() / share.loss_tokens
    loss.backward()
    by_hand = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    # Advantages travel as float32.
    found, _ = unsplit("token-mean", "recompute")
    torch.testing.assert_close(found, by_hand, atol=1e-7, rtol=0)


def test_what_stands_in_the_padding_and_behind_the_mask_does_not_matter() -> None:
    share = step()
    batch = collate(share.samples, share.version, CPU)
    assert not bool(batch.mask.all())
    counts = StepCounts(share.loss_tokens, share.sequences)

    def run(fill: int, junk: float) -> torch.Tensor:
        inputs = batch.input_ids.clone()
        for row, sample in enumerate(share.samples):
            t = sample.trajectory
            inputs[row, len(t.prompt_ids) + len(t.token_ids) - 1 :] = fill
        behaviour = torch.where(batch.mask, batch.behaviour, junk)
        changed = replace(batch, input_ids=inputs, behaviour=behaviour)
        model = policy()
        model.zero_grad()
        logits = selected_logits(model, inputs, changed.positions)
        Objective(AlgorithmSection(), 1.0, MAX_AGE)(logits, changed, counts, Tally(CPU)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert (run(0, 0.0) - run(VOCABULARY - 1, float("nan"))).abs().max() <= 1e-15


def test_a_loss_that_is_not_finite_leaves_no_finite_gradient_behind() -> None:
    share = step()
    batch = collate(share.samples[:2], share.version, CPU)
    batch.advantages[1] = float("inf")
    model = policy()
    model.zero_grad()
    tally = Tally(CPU)
    logits = selected_logits(model, batch.input_ids, batch.positions)
    loss = Objective(AlgorithmSection(), 1.0, MAX_AGE)(logits, batch, StepCounts(10, 2), tally)
    loss.backward()
    assert not loss.isfinite()
    assert all(not p.grad.isfinite().any() for p in model.parameters() if p.grad is not None and p.ndim == 1)
    assert tally.metrics(lambda _: None, lambda _: None)["actor/nonfinite_losses"] == 1.0


def test_logprob_difference_is_measured_on_fresh_answers_alone() -> None:
    share = step()
    fresh = [
        bool((s.trajectory.versions[s.trajectory.loss_mask] == share.version).all()) for s in share.samples
    ]
    assert any(fresh)
    stale = [i for i, f in enumerate(fresh) if not f]
    _, metrics = gradient((tuple(stale),), "token-mean")
    assert "generator/logprob_diff_mean" not in metrics
    _, metrics = gradient((tuple(range(12)),), "token-mean")
    assert 0 < metrics["generator/logprob_diff_mean"] < metrics["generator/logprob_diff_max"]


def test_figures_by_age_add_up_to_those_of_all_tokens() -> None:
    _, metrics = gradient((tuple(range(6)), tuple(range(6, 12))), "token-mean")
    tokens = {
        age: sum(
            int((step().version - s.trajectory.versions[s.trajectory.loss_mask] == age).sum())
            for s in step().samples
        )
        for age in range(MAX_AGE + 1)
    }
    tokens = {age: count for age, count in tokens.items() if count}
    assert len(tokens) >= 2
    for name in ("kl", "weight_mean", "clip_fraction"):
        by_age = {age: metrics[f"rollout_corr/{name}_age{age}"] for age in tokens}
        whole = sum(tokens[age] * value for age, value in by_age.items()) / sum(tokens.values())
        assert whole == pytest.approx(metrics[f"rollout_corr/{name}"], rel=1e-9)
        assert len(set(by_age.values())) == len(by_age), "two ages have the same figure"


def test_an_age_that_no_token_has_has_no_figures() -> None:
    fresh = [
        i
        for i, s in enumerate(step().samples)
        if (s.trajectory.versions[s.trajectory.loss_mask] == step().version).all()
    ]
    _, metrics = gradient((tuple(fresh),), "token-mean")
    assert {name for name in metrics if "_age" in name} == {
        f"rollout_corr/{name}_age0" for name in ("kl", "weight_mean", "clip_fraction")
    }
    assert metrics["rollout_corr/kl_age0"] == pytest.approx(metrics["rollout_corr/kl"], rel=1e-12)


def test_correcting_a_ratio_to_the_behaviour_policy_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="corrects twice"):
        AlgorithmSection(old_logprobs="behaviour", correction="tis")
