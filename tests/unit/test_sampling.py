"""Draws are counter-based, tokens follow the softmax, and log-probs are those sampled from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.generators.draws import uniform_draws
from asyncrl.generators.sampling import RowSampling, sample_tokens, truncate
from asyncrl.types import DrawKey, SamplingParams

CPU = torch.device("cpu")
PLAIN = SamplingParams(max_new_tokens=1)


def rows_of(*params: SamplingParams | None) -> RowSampling:
    return RowSampling.of(params, CPU)


def test_a_draw_does_not_depend_on_how_many_are_taken():
    key = DrawKey(seed=3, ordinal=5, sample=7, attempt=2)
    assert np.array_equal(uniform_draws(key, 1000)[:17], uniform_draws(key, 17))


def test_each_part_of_the_key_gives_draws_of_its_own():
    base = uniform_draws(DrawKey(1, 2, 3, 4), 64)
    others = [DrawKey(9, 2, 3, 4), DrawKey(1, 9, 3, 4), DrawKey(1, 2, 9, 4), DrawKey(1, 2, 3, 9)]
    for other in others:
        assert not np.intersect1d(base, uniform_draws(other, 64)).size


# The first three draws of DrawKey(0, 1, 2, 3).
PINNED = [0.47440657, 0.88963544, 0.68405795]


def test_draws_are_pinned_so_that_old_runs_can_be_repeated():
    assert uniform_draws(DrawKey(0, 1, 2, 3), 3).tolist() == pytest.approx(PINNED, abs=1e-7)


def test_sampled_tokens_follow_the_softmax():
    torch.manual_seed(0)
    logits, temperature, count = torch.randn(12) * 2, 0.7, 40_000
    uniforms = torch.from_numpy(uniform_draws(DrawKey(0, 0, 0), count))
    params = SamplingParams(max_new_tokens=1, temperature=temperature)
    tokens, _ = sample_tokens(logits.expand(count, -1), uniforms, rows_of(*[params] * count))
    expected = (logits / temperature).softmax(-1) * count
    observed = tokens.bincount(minlength=12)
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.3  # 0.999 quantile at 11 degrees of freedom


def test_logprobs_are_those_of_the_tempered_distribution():
    torch.manual_seed(1)
    logits = torch.randn(6, 30) * 3
    heats = [0.5, 1.0, 2.0, 0.5, 1.3, 1.0]
    rows = rows_of(*(SamplingParams(max_new_tokens=1, temperature=t) for t in heats))
    tokens, logprobs = sample_tokens(logits, torch.rand(6), rows)
    truth = torch.log_softmax(logits.double() / torch.tensor(heats).double()[:, None], dim=-1)
    torch.testing.assert_close(logprobs.double(), truth.gather(1, tokens[:, None])[:, 0], atol=1e-6, rtol=0)


def test_greedy_takes_the_likeliest_at_its_logprob_at_temperature_one():
    torch.manual_seed(2)
    logits = torch.randn(4, 20)
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    tokens, logprobs = sample_tokens(logits, torch.rand(4), rows_of(greedy, PLAIN, greedy, None))
    best = logits.log_softmax(-1).max(-1)
    assert tokens[[0, 2]].tolist() == best.indices[[0, 2]].tolist()
    torch.testing.assert_close(logprobs[[0, 2]], best.values[[0, 2]])


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.999999, 1.0])
def test_a_token_of_probability_zero_is_never_chosen(draw: float):
    logits = torch.full((1, 9), -math.inf)
    logits[0, 3], logits[0, 6] = 0.0, -2.0
    tokens, logprobs = sample_tokens(logits, torch.tensor([draw]), rows_of(PLAIN))
    assert tokens.item() in (3, 6)
    assert logprobs.isfinite().all()


def test_top_k_and_top_p_keep_what_they_should_and_renormalise():
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
    kept = truncate(probs.log(), torch.tensor([[3]]), torch.tensor([[0.8]]))
    # of {0.4, 0.3, 0.15} renormalised (0.47, 0.35, 0.18), 0.8 needs the first two
    assert kept.isfinite().tolist() == [[False, True, False, True, False]]
    params = SamplingParams(max_new_tokens=1, top_k=3, top_p=0.8)
    count = 500
    tokens, logprobs = sample_tokens(
        probs.log().expand(count, -1), torch.linspace(0, 1, count), rows_of(*[params] * count)
    )
    assert set(tokens.tolist()) == {1, 3}
    assert logprobs[tokens == 1].exp().tolist() == pytest.approx([4 / 7] * int((tokens == 1).sum()))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1.0), st.integers(0, 20))
def test_truncation_keeps_the_smallest_sufficient_set(seed: int, top_p: float, top_k: int):
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 3
    kept = truncate(logits, torch.tensor([[top_k]]), torch.tensor([[top_p]])).isfinite()[0]
    ranked = logits[0].softmax(-1).sort(descending=True)
    allowed = top_k or 20
    mass = ranked.values[:allowed] / ranked.values[:allowed].sum()
    count = int(kept.sum())
    assert kept[ranked.indices[:count]].all()
    assert 1 <= count <= allowed
    if top_p < 1:
        assert mass[: count - 1].sum() < top_p + 1e-5
        assert mass[:count].sum() >= top_p - 1e-5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    logits, uniforms = torch.randn(count, 65, generator=generator), torch.rand(count, generator=generator)
    kinds = [
        PLAIN,
        SamplingParams(max_new_tokens=1, temperature=0.6),
        SamplingParams(max_new_tokens=1, top_p=0.7),
        SamplingParams(max_new_tokens=1, temperature=0.0),
        SamplingParams(max_new_tokens=1, top_k=5, temperature=1.2),
    ]
    params = [kinds[i % len(kinds)] for i in range(count)]
    tokens, logprobs = sample_tokens(logits, uniforms, rows_of(*params))
    for i in range(count):
        token, logprob = sample_tokens(logits[i : i + 1], uniforms[i : i + 1], rows_of(params[i]))
        assert token.item() == tokens[i].item()
        assert logprob.numpy().tobytes() == logprobs[i : i + 1].numpy().tobytes()


def test_plain_rows_pay_for_nothing_else():
    rows = rows_of(PLAIN, None, PLAIN)
    assert (rows.temperature, rows.greedy, rows.truncated) == (None, None, None)


def test_the_callers_logits_are_left_alone():
    logits = torch.randn(2, 10)
    before = logits.clone()
    sample_tokens(logits, torch.rand(2), rows_of(SamplingParams(max_new_tokens=1, top_k=2), PLAIN))
    assert torch.equal(logits, before)
