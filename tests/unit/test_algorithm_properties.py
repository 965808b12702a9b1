"""What must hold of every algorithm, whatever comes in: holes, junk, single tokens, nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isnan

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import ADVANTAGES, UNBASELINED, group_advantages
from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings
from asyncrl.algorithms.masks import whiten
from asyncrl.algorithms.preferences import answer_log_ratio
from asyncrl.algorithms.returns import WHITENED, discounted_returns, gae, outcome_rewards, token_advantages
from asyncrl.algorithms.values import clipped_value_loss, explained_variance
from asyncrl.errors import InvariantError

FIELDS = ("logprobs", "proximal", "behaviour", "advantages")
HOLES = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]]).bool()
"""Tool tokens inside answers, an early end, a single token."""
BATCH_WIDE = WHITENED - {"gae"}
Function = Callable[[LossInputs], Tensor]
"""Inputs to a result for each token (B, T)."""


def of_loss(name: str) -> Function:
    return lambda inputs: LOSSES[name](inputs, LossSettings(m2po_tau=0.3)).loss


def of_correction(name: str) -> Function:
    settings = CorrectionSettings(mask_low=0.8, mask_high=1.25)
    return lambda inputs: CORRECTIONS[name](inputs.proximal, inputs.behaviour, inputs.mask, settings).weights


def of_kl(name: str) -> Function:
    return lambda inputs: KL_ESTIMATORS[name](inputs.logprobs, inputs.proximal, inputs.mask)


def of_batch_wide(name: str) -> Function:
    def advantages(inputs: LossInputs) -> Tensor:
        scalars = torch.arange(1.0, len(inputs.mask) + 1, dtype=torch.float64)[:, None]
        return token_advantages(name, scalars, inputs.mask, 0.9)

    return advantages


FUNCTIONS: dict[str, Function] = {
    **{f"loss {name}": of_loss(name) for name in LOSSES},
    **{f"correction {name}": of_correction(name) for name in CORRECTIONS},
    **{f"kl {name}": of_kl(name) for name in KL_ESTIMATORS},
    **{f"advantage {name}": of_batch_wide(name) for name in sorted(BATCH_WIDE)},
    "whiten": lambda inputs: whiten(inputs.logprobs, inputs.mask),
    "gae": lambda inputs: gae(inputs.proximal, inputs.logprobs, inputs.mask, 0.9, 0.8)[0],
    "returns": lambda inputs: discounted_returns(inputs.logprobs, inputs.mask, 0.9),
    "value loss": lambda inputs: (
        clipped_value_loss(inputs.logprobs, inputs.proximal, inputs.behaviour, inputs.mask).loss
    ),
    "answer log-ratio": lambda inputs: answer_log_ratio(inputs.logprobs, inputs.proximal, inputs.mask),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


def some(mask: Tensor) -> LossInputs:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    behaviour = -draw(*mask.shape).abs() - 0.1
    proximal = behaviour + 0.4 * draw(*mask.shape)
    logprobs = proximal + 0.4 * draw(*mask.shape)
    return LossInputs(logprobs, proximal, behaviour, draw(len(mask), 1).expand(mask.shape), mask)


def run(name: str, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of its sum where it has one."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    found = FUNCTIONS[name](replace(inputs, logprobs=logprobs))
    if not found.requires_grad:
        return found, torch.zeros_like(logprobs)
    (grad,) = torch.autograd.grad(found.sum(), logprobs)
    return found.detach(), grad


@functions
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_junk_outside_the_mask_reaches_nothing(name: str, junk: float) -> None:
    inputs = some(HOLES)
    dirty = replace(inputs, **{f: torch.where(HOLES, getattr(inputs, f), junk) for f in FIELDS})
    for found, expected in zip(run(name, dirty), run(name, inputs), strict=True):
        assert expected.isfinite().all()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith(("loss", "correction"))])
@pytest.mark.parametrize("field", ["logprobs", "proximal", "behaviour", "advantages"])
def test_a_nan_inside_the_mask_is_seen(name: str, field: str) -> None:
    """Where a function looks at it at all: a step that hides one would train on a fault."""
    inputs = some(HOLES)
    values = getattr(inputs, field).clone()
    other, values[0, 1] = values.clone(), torch.nan
    other[0, 1] += 0.1
    clean, moved = run(name, inputs), run(name, replace(inputs, **{field: other}))
    if all(torch.equal(a, b) for a, b in zip(clean, moved, strict=True)):
        return  # nothing that this function depends on, or a clip decides either way
    found = torch.cat([part.flatten() for part in run(name, replace(inputs, **{field: values}))])
    assert not found.isfinite().all()


@functions
def test_tool_tokens_are_as_if_they_were_not_there(name: str) -> None:
    """Answers with holes, and the same tokens moved together, have the same results a token."""
    inputs = some(HOLES)
    order = (~HOLES).int().argsort(dim=-1, stable=True)  # trained tokens first, in their order
    together = {f: getattr(inputs, f).gather(-1, order) for f in FIELDS}
    moved = LossInputs(**together, mask=HOLES.gather(-1, order))
    for found, expected in zip(run(name, moved), run(name, inputs), strict=True):
        if expected.shape == HOLES.shape:
            expected = expected.gather(-1, order)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@functions
@pytest.mark.parametrize("width", [4, 0], ids=["all masked", "no token at all"])
def test_nothing_to_train_is_nothing(name: str, width: int) -> None:
    inputs = some(torch.zeros(2, width, dtype=torch.bool))
    inputs = replace(inputs, advantages=torch.ones(2, 1, dtype=torch.float64))
    for found in run(name, inputs):
        assert found.isfinite().all()
        assert not found.any()
    for aggregate in AGGREGATIONS.values():
        assert aggregate(torch.full((2, width), torch.nan), inputs.mask, StepCounts(0, 0)) == 0.0


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"answer log-ratio"}))
def test_an_empty_answer_beside_others_changes_none_of_them(name: str) -> None:
    inputs = some(torch.cat([HOLES, torch.zeros(1, 6, dtype=torch.bool)]))
    alone = LossInputs(**{f: getattr(inputs, f)[:3] for f in FIELDS}, mask=HOLES)
    for found, expected in zip(run(name, inputs), run(name, alone), strict=True):
        assert not found[3].any()
        torch.testing.assert_close(found[:3], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shares_of_a_step_add_up(aggregation: str) -> None:
    loss, counts = some(HOLES).logprobs, StepCounts(int(HOLES.sum()), 3, length_norm=6.0)
    whole = AGGREGATIONS[aggregation](loss, HOLES, counts)
    parts = [AGGREGATIONS[aggregation](loss[i : i + 1], HOLES[i : i + 1], counts) for i in range(3)]
    torch.testing.assert_close(sum(parts), whole, atol=1e-15, rtol=0)


# ---------------------------------------------------------------------- rewards


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - UNBASELINED))
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3e5])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_one_answer_or_equal_rewards_have_exactly_no_advantage(name: str, reward: float, size: int) -> None:
    assert group_advantages(name, [reward] * size, range(1, size + 1)) == (0.0,) * size


def test_without_a_group_baseline_the_reward_itself_goes_on() -> None:
    assert group_advantages("reinforce_plus_plus", [0.5]) == (0.5,)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(InvariantError, match="1 of 3 rewards"):
        group_advantages(name, [0.0, bad, 1.0])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_reward_of_zero_counts_as_one(name: str) -> None:
    """0.0 is a reward like any other: leaving it out would change the others' advantages."""
    with_zero, without = group_advantages(name, [1.0, 3.0, 0.0]), group_advantages(name, [1.0, 3.0])
    assert len(with_zero) == 3
    if name not in UNBASELINED:
        assert with_zero[:2] != without
    shifted = group_advantages(name, [2.0, 4.0, 1.0])
    if name not in UNBASELINED:
        assert shifted == pytest.approx(with_zero)


def test_opo_weighs_by_length_and_takes_answers_without_tokens() -> None:
    # Baseline (3 * 1 + 1 * 0) / 4 = 0.75.
    assert group_advantages("opo", [1.0, 0.0], [3, 1]) == pytest.approx((0.25, -0.75))
    assert group_advantages("opo", [1.0, 0.0], [0, 0]) == (1.0, 0.0)


def test_the_best_of_a_tie_leads_by_nothing() -> None:
    assert group_advantages("grpo_passk", [1.0, 1.0, 0.0]) == (0.0, 0.0, 0.0)


def test_a_batch_of_one_token_whitens_to_zero() -> None:
    one = torch.full((1, 1), 7.0, dtype=torch.float64)
    # The mean divides by n + 1e-8.
    assert whiten(one, torch.ones(1, 1, dtype=torch.bool)).abs() < 1e-2
    assert not whiten(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)).any()


def test_an_outcome_is_put_on_the_last_trained_token() -> None:
    found = outcome_rewards(torch.tensor([[1.0], [2.0], [3.0]]), HOLES)
    assert found.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 2, 0], [0, 0, 3, 0, 0, 0]]


def test_explained_variance() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    returns = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5.0, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 4), returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert isnan(explained_variance(returns, torch.ones(1, 4), mask))
