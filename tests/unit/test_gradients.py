"""Gradients against central differences, and the limits in which formulas become one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings
from asyncrl.algorithms.preferences import PREFERENCE_LOSSES, answer_log_ratio, margins
from asyncrl.algorithms.values import clipped_value_loss

POLICY_GRADIENTS = {"cispo", "aipo", "topr"}
"""Losses -w A log pi whose weight has no gradient, though it depends on pi."""
NAN = float("nan")


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def loss_inputs(seed: int = 0, spread: float = 0.6) -> LossInputs:
    """3 answers of 5 tokens with a hole, an end, and NaN in both."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()

    def junk(values: Tensor) -> Tensor:
        return torch.where(mask, values, NAN)

    behaviour = -random(3, 5, seed=seed).abs() - 0.2
    proximal = behaviour + random(3, 5, seed=seed + 1, scale=spread)
    logprobs = proximal + random(3, 5, seed=seed + 2, scale=spread)
    advantages = random(3, 1, seed=seed + 3).expand(3, 5)
    return LossInputs(
        junk(logprobs).requires_grad_(), junk(proximal), junk(behaviour), junk(advantages), mask
    )


def gradient(name: str, inputs: LossInputs, settings: LossSettings | None = None) -> Tensor:
    """Of the sum over all tokens."""
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    loss = LOSSES[name](replace(inputs, logprobs=logprobs), settings or LossSettings()).loss.sum()
    (grad,) = torch.autograd.grad(loss, logprobs)
    return grad


def agrees_with_central_differences(function: Callable[[Tensor], Tensor], at: Tensor, mask: Tensor) -> None:
    """Moves the tokens of the mask alone."""

    def of_tokens(tokens: Tensor) -> Tensor:
        return function(at.detach().masked_scatter(mask, tokens))

    assert torch.autograd.gradcheck(of_tokens, at.detach()[mask].requires_grad_(), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - POLICY_GRADIENTS))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_losses(name: str, aggregation: str) -> None:
    inputs, counts = loss_inputs(), StepCounts(9, 3)

    def loss(logprobs: Tensor) -> Tensor:
        found = LOSSES[name](replace(inputs, logprobs=logprobs), LossSettings(m2po_tau=0.5)).loss
        return AGGREGATIONS[aggregation](found, inputs.mask, counts)

    agrees_with_central_differences(loss, inputs.logprobs, inputs.mask)


@pytest.mark.parametrize("name", sorted(POLICY_GRADIENTS))
def test_policy_gradients_are_their_weights(name: str) -> None:
    """-w A log pi is linear in log pi once w is fixed, so its value is gradient times log pi."""
    inputs = loss_inputs()
    loss = LOSSES[name](inputs, LossSettings()).loss.detach()
    product = gradient(name, inputs) * torch.where(inputs.mask, inputs.logprobs.detach(), 0.0)
    torch.testing.assert_close(product, loss, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS.keys() - {"k1+", "k3+"}))
def test_kl(name: str) -> None:
    inputs = loss_inputs()
    agrees_with_central_differences(
        lambda x: KL_ESTIMATORS[name](x, inputs.behaviour, inputs.mask).sum(), inputs.logprobs, inputs.mask
    )


def test_value_loss() -> None:
    inputs = loss_inputs()
    old, returns = inputs.proximal, inputs.behaviour
    agrees_with_central_differences(
        lambda x: clipped_value_loss(x, old, returns, inputs.mask).loss.sum(), inputs.logprobs, inputs.mask
    )


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_preferences(name: str) -> None:
    inputs = loss_inputs()

    def loss(logprobs: Tensor) -> Tensor:
        ratios = answer_log_ratio(logprobs, inputs.behaviour, inputs.mask)
        return PREFERENCE_LOSSES[name](margins(ratios, torch.tensor([0, 2]), torch.tensor([1, 1])), 0.3).sum()

    agrees_with_central_differences(loss, inputs.logprobs, inputs.mask)


def test_entropy() -> None:
    logits, targets = random(4, 7, seed=5), torch.tensor([0, 6, 3, 3])
    upstream = random(2, 4, seed=6)

    def weighted(x: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs(x, targets, 0.7, entropy_gradient=True)
        return logprobs @ upstream[0] + entropy @ upstream[1]

    assert torch.autograd.gradcheck(weighted, logits.requires_grad_(), eps=1e-6, atol=1e-7)


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_is_reinforce(name: str) -> None:
    """pi = p = b: the gradient of a token is -A."""
    inputs = loss_inputs()
    own = inputs.logprobs.detach()
    found = gradient(name, replace(inputs, proximal=own, behaviour=own))
    expected = -torch.where(inputs.mask, inputs.advantages, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_advantage_no_gradient(name: str) -> None:
    inputs = replace(loss_inputs(), advantages=torch.zeros(3, 1, dtype=torch.float64))
    assert not gradient(name, inputs, LossSettings(dppo_penalty=0.0)).any()


@pytest.mark.parametrize("name", ["aipo", "m2po", "dppo"])
def test_without_bounds_losses_are_importance_sampling(name: str) -> None:
    settings = LossSettings(aipo_cap=inf, m2po_tau=inf, dppo_threshold=1.0, dppo_penalty=0.0)
    inputs = loss_inputs()
    ratio = (inputs.logprobs.detach() - inputs.behaviour).exp()
    expected = torch.where(inputs.mask, -inputs.advantages * ratio, 0.0)
    torch.testing.assert_close(gradient(name, inputs, settings), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["tis", "icepop", "decoupled_ppo"])
def test_without_bounds_a_corrected_ppo_is_importance_sampling(name: str) -> None:
    """p/b * pi/p = pi/b, whatever p is."""
    inputs = loss_inputs()
    open_settings = CorrectionSettings(tis_cap=inf, icepop_low=0.0, icepop_high=inf, decoupled_cap=inf)
    weights = CORRECTIONS[name](inputs.proximal, inputs.behaviour, inputs.mask, open_settings).weights
    unclipped = LossSettings(clip_low=1.0, clip_high=inf, clip_dual=None)
    found = weights * gradient("ppo_clip", inputs, unclipped)
    ratio = (inputs.logprobs.detach() - inputs.behaviour).exp()
    expected = torch.where(inputs.mask, -inputs.advantages * ratio, 0.0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_correction_of_nothing_changes_nothing(name: str) -> None:
    """b = p: the weights are 1, so that what is left is ppo_clip."""
    inputs = loss_inputs()
    found = CORRECTIONS[name](inputs.proximal, inputs.proximal, inputs.mask, CorrectionSettings())
    assert torch.equal(found.weights, inputs.mask.double())
    assert not found.clipped.any()


def test_a_wide_soft_gate_is_the_ratio() -> None:
    """sapo: (4 / tau) sigmoid(tau (u - 1)) has slope 1 everywhere as tau falls to 0."""
    inputs = loss_inputs()
    soft = gradient("sapo", inputs, LossSettings(sapo_tau_positive=1e-6, sapo_tau_negative=1e-6))
    hard = gradient("ppo_clip", inputs, LossSettings(clip_low=1.0, clip_high=inf, clip_dual=None))
    torch.testing.assert_close(soft, hard, atol=1e-6, rtol=0)


def test_a_single_token_makes_a_sequence_of_its_own_ratio() -> None:
    """Where answers have one token, gspo, and the unclipped gmpo, are ppo_clip."""
    inputs = loss_inputs()
    mask = inputs.mask & (torch.arange(5) == 0)
    inputs = replace(inputs, mask=mask)
    tight = LossSettings(clip_low=0.1, clip_high=0.1, clip_dual=None)
    torch.testing.assert_close(gradient("gspo", inputs, tight), gradient("ppo_clip", inputs, tight))
    loose = LossSettings(clip_low=1.0, clip_high=inf, clip_dual=None)
    wide = LossSettings(clip_low=inf, clip_high=inf)
    torch.testing.assert_close(gradient("gmpo", inputs, wide), gradient("ppo_clip", inputs, loose))
