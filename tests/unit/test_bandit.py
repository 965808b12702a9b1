"""Corrections on a five-armed bandit, by exact enumeration: no sampling, no tolerance for noise.

One policy b pulls, another one pi learns. The mean over b's pulls of a corrected gradient is the sum
over all arms of b times the gradient of that arm, and is compared with the on-policy gradient of the
expected reward, by the logits of pi: pi_k (r_k - E r).
"""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings

REWARDS = torch.tensor([0.0, 1.0, 0.3, -0.5, 2.0], dtype=torch.float64)
LOGITS = torch.tensor([0.2, -0.4, 1.1, 0.0, -0.9], dtype=torch.float64)
PI = LOGITS.softmax(0)
B = torch.tensor([0.35, 0.05, 0.2, 0.3, 0.1], dtype=torch.float64)
BASELINE = 0.4
"""Any constant: it must not matter."""
ON_POLICY = PI * (REWARDS - PI @ REWARDS)
OPEN = CorrectionSettings(
    tis_cap=inf, icepop_low=0.0, icepop_high=inf, mask_low=0.0, mask_high=inf, decoupled_cap=inf
)


def mean_gradient(
    arms: Tensor,
    loss: str = "ppo_clip",
    correction: str = "none",
    settings: CorrectionSettings = OPEN,
    loss_settings: LossSettings | None = None,
) -> Tensor:
    """The gradient of expected reward that b's pulls ``arms`` (N, T) show, by the logits of pi: (5,)."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, behaviour = logits.log_softmax(0)[arms], B.log()[arms]  # (N, T)
    advantages = REWARDS[arms].prod(-1, keepdim=True) - BASELINE
    mask = torch.ones_like(arms, dtype=torch.bool)
    inputs = LossInputs(logprobs, logprobs.detach(), behaviour, advantages, mask)
    weights = CORRECTIONS[correction](inputs.proximal, behaviour, mask, settings).weights
    result = LOSSES[loss](inputs, loss_settings or LossSettings())
    chances = behaviour.exp().prod(-1)  # (N,) of b to pull them
    (grad,) = torch.autograd.grad(-(chances * (weights * result.loss).sum(-1)).sum(), logits)
    return grad


ONCE = torch.arange(5)[:, None]
TWICE = torch.tensor(list(product(range(5), repeat=2)))


def of_pulls(chances: Tensor) -> Tensor:
    """The gradient if arm a were pulled with weight ``chances[a]``: sum of c_a A_a (e_a - pi)."""
    pulls = chances * (REWARDS - BASELINE)
    return pulls - PI * pulls.sum()


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> bool:
    return bool((found - expected).abs().max() <= tolerance)


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "icepop", "decoupled_ppo"])
def test_open_weights_give_the_on_policy_gradient(correction: str) -> None:
    assert close(mean_gradient(ONCE, correction=correction), ON_POLICY)


def test_without_weights_it_is_another_gradient() -> None:
    assert not close(mean_gradient(ONCE), ON_POLICY, 0.05)
    assert close(mean_gradient(ONCE), of_pulls(B))


@pytest.mark.parametrize("loss", ["aipo", "dppo", "m2po"])
def test_losses_that_correct_by_themselves_give_the_on_policy_gradient(loss: str) -> None:
    settings = LossSettings(aipo_cap=inf, dppo_threshold=1.0, dppo_penalty=0.0, m2po_tau=inf)
    assert close(mean_gradient(ONCE, loss, loss_settings=settings), ON_POLICY)


def test_truncation_leaves_what_the_cap_lets_through() -> None:
    settings = CorrectionSettings(tis_cap=1.2)
    expected = of_pulls(torch.minimum(PI, 1.2 * B))
    assert close(mean_gradient(ONCE, correction="tis", settings=settings), expected)
    assert not close(expected, ON_POLICY, 0.01)


@pytest.mark.parametrize(
    ("correction", "settings", "low", "high", "weight"),
    [
        ("icepop", CorrectionSettings(icepop_low=0.5, icepop_high=2.0), 0.5, 2.0, PI),
        ("decoupled_ppo", CorrectionSettings(decoupled_cap=2.0), 0.0, 2.0, PI),
        ("token_mask", CorrectionSettings(mask_low=0.5, mask_high=2.0), 0.5, 2.0, B),
        ("seq_mask", CorrectionSettings(mask_low=0.5, mask_high=2.0), 0.5, 2.0, B),
    ],
)
def test_bands_leave_the_arms_inside(
    correction: str, settings: CorrectionSettings, low: float, high: float, weight: Tensor
) -> None:
    ratio = PI / B
    inside = (ratio >= low) & (ratio <= high)
    assert 0 < inside.sum() < 5
    expected = of_pulls(torch.where(inside, weight, 0.0))
    assert close(mean_gradient(ONCE, correction=correction, settings=settings), expected)


def test_topr_tapers_bad_arms_alone() -> None:
    bad = REWARDS < BASELINE
    expected = of_pulls(torch.where(bad, torch.minimum(PI, B), B))
    assert close(mean_gradient(ONCE, "topr"), expected)


def test_answers_of_two_pulls_need_the_weight_of_the_whole_answer() -> None:
    """The reward is the product of both pulls', so the first one's worth depends on who does the second."""
    on_policy = 2 * (PI @ REWARDS) * ON_POLICY  # of (E r)^2
    assert close(mean_gradient(TWICE, correction="tis_sequence"), on_policy)
    assert not close(mean_gradient(TWICE, correction="tis"), on_policy, 0.01)
