"""Formulas that no reference vectors exist for, on 2 x 3 tokens worked by hand.

The two answers, the last token of the second one masked (its values are NaN):

    ======  =====  =====  =====     =====  =====  ======
    token   1,1    1,2    1,3       2,1    2,2    2,3
    ======  =====  =====  =====     =====  =====  ======
    pi      0.4    0.2    0.5       0.4    0.2    masked
    b       0.2    0.4    0.5       0.1    0.4    masked
    pi/b    2      1/2    1         4      1/2
    A       1      1      1         -2     -2
    ======  =====  =====  =====     =====  =====  ======
"""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.adaptive import AdaptiveCoefficient
from asyncrl.algorithms.averaging import update_average
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings
from asyncrl.algorithms.kl import KL_ESTIMATORS, with_kl_penalty
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings
from asyncrl.algorithms.pairs import pairs_in_group
from asyncrl.algorithms.preferences import answer_log_ratio, dpo, ipo, margins
from asyncrl.algorithms.ratios import log_linear_proximal
from asyncrl.algorithms.returns import discounted_returns, gae, outcome_rewards
from asyncrl.algorithms.shaping import RewardShaping, overlong

NAN = float("nan")
LN2 = log(2.0)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def tokens(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


PI = tokens([0.4, 0.2, 0.5], [0.4, 0.2, NAN]).log()
B = tokens([0.2, 0.4, 0.5], [0.1, 0.4, NAN]).log()


def inputs() -> LossInputs:
    advantages = tokens([1, 1, 1], [-2, -2, NAN])
    return LossInputs(PI.clone().requires_grad_(), B, B, advantages, MASK)


def run(name: str, settings: LossSettings, at: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradient of each token, and which ones were clipped."""
    result = LOSSES[name](at, settings)
    result.loss.sum().backward()
    assert at.logprobs.grad is not None
    return result.loss.detach(), at.logprobs.grad, result.clipped


def same(found: Tensor, *rows: list[float]) -> None:
    torch.testing.assert_close(found, tokens(*rows), atol=1e-12, rtol=0)


def test_aipo() -> None:
    # w = min(pi/b, 3) = 2, 1/2, 1; 3, 1/2. Loss -w A log pi, gradient -w A.
    loss, grad, clipped = run("aipo", LossSettings(aipo_cap=3.0), inputs())
    same(loss, [-2 * log(0.4), -0.5 * log(0.2), -log(0.5)], [6 * log(0.4), log(0.2), 0])
    same(grad, [-2, -0.5, -1], [6, 1, 0])
    assert clipped.tolist() == [[False, False, False], [True, False, False]]


def test_topr() -> None:
    # A > 0: w = 1. A < 0: w = clip(pi/b, 0, 1) = 1, 1/2.
    loss, grad, clipped = run("topr", LossSettings(), inputs())
    same(loss, [-log(0.4), -log(0.2), -log(0.5)], [2 * log(0.4), log(0.2), 0])
    same(grad, [-1, -1, -1], [2, 1, 0])
    assert clipped.tolist() == [[False, False, False], [True, False, False]]


def test_dppo() -> None:
    # pi - b = 0.2, -0.2, 0; 0.3, -0.2. Beyond 0.15 in the direction of A: 1,1 and 2,2.
    # Loss -keep A pi/b + 0.1 (log pi/b)^2, gradient -keep A pi/b + 0.2 log pi/b.
    settings = LossSettings(dppo_threshold=0.15, dppo_penalty=0.1)
    loss, grad, clipped = run("dppo", settings, inputs())
    same(loss, [0.1 * LN2**2, -0.5 + 0.1 * LN2**2, -1], [8 + 0.4 * LN2**2, 0.1 * LN2**2, 0])
    same(grad, [0.2 * LN2, -0.5 - 0.2 * LN2, -1], [8 + 0.4 * LN2, -0.2 * LN2, 0])
    assert clipped.tolist() == [[True, False, False], [False, True, False]]


def test_m2po() -> None:
    # (log pi/b)^2 in units of (ln 2)^2 = 0.4805: 1, 1, 0; 4, 1. Means of the smallest 1, 2, ... of them:
    # 0, 0.240, 0.320, 0.360, 0.673. Under 0.4: all but the largest. Loss and gradient -A pi/b.
    loss, grad, clipped = run("m2po", LossSettings(m2po_tau=0.4), inputs())
    same(loss, [-2, -0.5, -1], [0, 1, 0])
    same(grad, [-2, -0.5, -1], [0, 1, 0])
    assert clipped.tolist() == [[False, False, False], [True, False, False]]


def test_m2po_drops_equal_values_together() -> None:
    # Under 0.3 are two of them, but the second is one of three that are equal: only 1,3 stays.
    loss, _, _ = run("m2po", LossSettings(m2po_tau=0.3), inputs())
    same(loss, [0, 0, -1], [0, 0, 0])


def test_m2po_takes_the_limit_of_the_whole_step_where_there_is_one() -> None:
    limit = torch.tensor(0.1, dtype=torch.float64)
    loss, _, _ = run("m2po", LossSettings(m2po_tau=100.0), replace(inputs(), m2po_limit=limit))
    same(loss, [0, 0, -1], [0, 0, 0])


def test_decoupled_ppo() -> None:
    # p/b = 2, 1/2, 1; 4, 1/2, so that with cap 3 the weights are 2, 1/2, 1; 0, 1/2.
    # pi/p = 1.5, 1, 0.5; 0.5, 1.5, clipped to [0.8, 1.2]:
    #   A =  1: max(-u, -clip u)   = -1.2 (clipped), -1, -0.5
    #   A = -2: max(2u, 2 clip u)  = 1.6 (clipped), 3
    # Weighted: -2.4, -0.5, -0.5; 0, 1.5. The gradient is that of -w A u where nothing is clipped.
    proximal = PI
    logprobs = (proximal + tokens([1.5, 1, 0.5], [0.5, 1.5, NAN]).log()).requires_grad_()
    result = LOSSES["ppo_clip"](replace(inputs(), logprobs=logprobs, proximal=proximal), LossSettings())
    settings = CorrectionSettings(decoupled_cap=3.0)
    correction = CORRECTIONS["decoupled_ppo"](proximal, B, MASK, settings)
    same(correction.weights, [2, 0.5, 1], [0, 0.5, 0])
    loss = correction.weights * result.loss
    loss.sum().backward()
    same(loss.detach(), [-2.4, -0.5, -0.5], [0, 1.5, 0])
    assert logprobs.grad is not None
    same(logprobs.grad, [0, -0.5, -0.5], [0, 1.5, 0])
    assert correction.clipped.tolist() == [[False, False, False], [True, False, False]]


def test_seq_mask_drops_answers_by_their_geometric_mean() -> None:
    # p/b = 2, 1/2, 1 with mean (2 * 1/2 * 1)^(1/3) = 1; 4, 1/2 with mean sqrt(2) = 1.41.
    found = CORRECTIONS["seq_mask"](PI, B, MASK, CorrectionSettings(mask_low=0.8, mask_high=1.25))
    same(found.weights, [1, 1, 1], [0, 0, 0])
    assert found.clipped.tolist() == [[False, False, False], [True, True, False]]
    # The other way round the mean is 0.71: as far from 1, and the lower bound is the one that acts.
    found = CORRECTIONS["seq_mask"](B, PI, MASK, CorrectionSettings(mask_low=0.8, mask_high=10.0))
    same(found.weights, [1, 1, 1], [0, 0, 0])


def test_token_mask_drops_tokens_by_their_own_ratio() -> None:
    found = CORRECTIONS["token_mask"](PI, B, MASK, CorrectionSettings(mask_low=0.6, mask_high=2.5))
    same(found.weights, [1, 0, 1], [0, 0, 0])


def test_icepop_and_truncation_by_token_and_by_answer() -> None:
    settings = CorrectionSettings(tis_cap=1.5, icepop_low=0.4, icepop_high=3.0)
    same(CORRECTIONS["icepop"](PI, B, MASK, settings).weights, [2, 0.5, 1], [0, 0.5, 0])
    same(CORRECTIONS["tis"](PI, B, MASK, settings).weights, [1.5, 0.5, 1], [1.5, 0.5, 0])
    # Products: 2 * 1/2 * 1 = 1 and 4 * 1/2 = 2, of which 1.5 is left.
    same(CORRECTIONS["tis_sequence"](PI, B, MASK, settings).weights, [1, 1, 1], [1.5, 1.5, 0])


def test_log_linear_proximal() -> None:
    # From log b = -1 to log pi = -3 with alpha = (age - 1) / age = -, 0, 1/2; 3/4, 0, -.
    logprobs, behaviour = tokens([-3, -3, -3], [-3, -3, NAN]), tokens([-1, -1, -1], [-1, -1, -1])
    found = log_linear_proximal(logprobs, behaviour, torch.tensor([[0, 1, 2], [4, 1, -1]]))
    same(found, [-1, -1, -2], [-2.5, -1, -1])


def test_straight_through_kl() -> None:
    # log pi - log ref = ln 2, -ln 2, 0; ln 4, -ln 2. k3 = ref/pi - 1 - log(ref/pi) in value:
    # 1/2 - 1 + ln 2, 2 - 1 - ln 2, 0; 1/4 - 1 + ln 4, 1 - ln 2. The gradient of k2 is log pi - log ref.
    logprobs = PI.clone().requires_grad_()
    found = KL_ESTIMATORS["k3+"](logprobs, B, MASK)
    found.sum().backward()
    same(found.detach(), [LN2 - 0.5, 1 - LN2, 0], [2 * LN2 - 0.75, 1 - LN2, 0])
    assert logprobs.grad is not None
    same(logprobs.grad, [LN2, -LN2, 0], [2 * LN2, -LN2, 0])

    logprobs.grad = None
    found = KL_ESTIMATORS["k1+"](logprobs, B, MASK)
    found.sum().backward()
    same(found.detach(), [LN2, -LN2, 0], [2 * LN2, -LN2, 0])
    same(logprobs.grad, [LN2, -LN2, 0], [2 * LN2, -LN2, 0])


def test_kl_in_the_reward() -> None:
    rewards = tokens([0, 0, 1], [0, 0.5, 0])
    kl = KL_ESTIMATORS["k1"](PI, B, MASK)
    same(with_kl_penalty(rewards, kl, 0.1), [-0.1 * LN2, 0.1 * LN2, 1], [-0.2 * LN2, 0.5 + 0.1 * LN2, 0])


def test_adaptive_coefficient() -> None:
    coefficient = AdaptiveCoefficient(value=0.1, target=0.05, horizon=100.0)
    # 0.5 / 0.05 - 1 = 9, at most 0.2: 0.1 (1 + 0.2 * 50 / 100).
    assert coefficient.update(0.5, samples=50) == pytest.approx(0.11)
    # 0 / 0.05 - 1 = -1, at least -0.2: 0.11 (1 - 0.2 * 50 / 100).
    assert coefficient.update(0.0, samples=50) == pytest.approx(0.099)
    # 0.0525 / 0.05 - 1 = 0.05: 0.099 (1 + 0.05 * 100 / 100).
    assert coefficient.update(0.0525, samples=100) == pytest.approx(0.10395)
    assert coefficient.update(0.05, samples=100) == pytest.approx(0.10395)


def test_moving_average() -> None:
    average, current = [tokens([1, 2, 3])], [tokens([3, 6, 3])]
    update_average(average, current, decay=0.75)
    same(average[0], [1.5, 3, 3])
    update_average(average, current, decay=0.0)
    same(average[0], [3, 6, 3])
    with pytest.raises(ValueError, match="zip"):
        update_average(average, [], decay=0.5)


def test_shaping_of_rewards() -> None:
    # Up to 20 tokens with a buffer of 5: the penalty rises from 0 at 15 to 1 at 20.
    assert [overlong(n, 20, 5) for n in (0, 15, 17, 20, 21)] == [0, 0, pytest.approx(0.4), 1, 1]
    shaping = RewardShaping(
        max_tokens=20, clip=(-1.0, 1.0), length_penalty=0.2, overlong_buffer=5, overlong_penalty=0.5
    )
    # 3 clipped to 1, less 0.2 * 10 / 20; 0, less 0.2 * 17 / 20 and 0.5 * 2 / 5; -7 to -1, less 0.2 and 0.5.
    found = shaping.shaped([3.0, 0.0, -7.0], [10, 17, 20])
    assert found == pytest.approx((0.9, -0.37, -1.7))
    assert RewardShaping(max_tokens=20).shaped([3.25], [20]) == (3.25,)


def test_returns_and_estimates_skip_what_a_tool_wrote() -> None:
    # The first answer's second token is a tool's: its reward and value are not there.
    mask = torch.tensor([[True, False, True], [True, True, False]])
    rewards = outcome_rewards(tokens([1], [2]), mask)
    same(rewards, [0, 0, 1], [0, 2, 0])
    same(discounted_returns(rewards, mask, 0.5), [0.5, 0, 1], [1, 2, 0])
    # gamma = lambda = 1/2. Answer 1: delta = 1 - 0.4 = 0.6, then 0 + 0.5 * 0.4 - 0.2 = 0 and A = 0.6 / 4.
    # Answer 2: delta = 2 - 1 = 1, then 0.5 * 1 - 0.5 = 0 and A = 1 / 4.
    values = tokens([0.2, NAN, 0.4], [0.5, 1, NAN])
    advantages, returns = gae(torch.where(mask, rewards, NAN), values, mask, 0.5, 0.5)
    same(advantages, [0.15, 0, 0.6], [0.25, 1, 0])
    same(returns, [0.35, 0, 1], [0.75, 2, 0])


def test_preferences_between_the_answers_of_a_group() -> None:
    assert pairs_in_group([0.5, 1.0, 0.0, 1.0]) == [(1, 2)]
    assert pairs_in_group([0.5, 1.0, 0.0], "all") == [(0, 2), (1, 0), (1, 2)]
    assert pairs_in_group([1.0, 1.0]) == pairs_in_group([1.0, 1.0], "all") == pairs_in_group([0.0]) == []
    # log pi/ref of the answers: ln 2 - ln 2 + 0 = 0 and ln 4 - ln 2 = ln 2. The second is the better one.
    logprobs = PI.clone().requires_grad_()
    ratios = answer_log_ratio(logprobs, B, MASK)
    margin = margins(ratios, torch.tensor([1]), torch.tensor([0]))
    # h = ln 2. DPO with beta 2: -log sigmoid(2 ln 2) = -log(4/5). IPO: (ln 2 - 1/4)^2.
    assert dpo(margin, 2.0).tolist() == pytest.approx([log(5 / 4)])
    assert ipo(margin, 2.0).tolist() == pytest.approx([(LN2 - 0.25) ** 2])
    # The gradient by h is -beta sigmoid(-beta h) = -2/5, on each token of the better answer.
    dpo(margin, 2.0).sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, [0.4, 0.4, 0.4], [-0.4, -0.4, 0])
