"""Learning from pairs of answers to one prompt: online DPO and IPO.

Shapes: P pairs, each a better and a worse answer of one group. A log-prob here is that of a whole
answer: the sum over its tokens.

Invariants:
- At pi = ref every margin is 0, whatever the answers' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.losses import LossInputs, LossSettings, TokenLoss
from asyncrl.algorithms.masks import masked
from asyncrl.algorithms.ratios import log_difference

PreferenceLoss = Callable[[Tensor, float], Tensor]
"""(margins (P,), beta) -> a loss a pair (P,)"""


def answer_log_ratio(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """log pi(answer) - log ref(answer): (B, T) -> (B,)."""
    return log_difference(logprobs, reference, mask).sum(-1)


def margins(log_ratios: Tensor, better: Tensor, worse: Tensor) -> Tensor:
    """How much more pi than ref prefers the better answer: (B,), indices (P,) and (P,) -> (P,)."""
    return log_ratios[better] - log_ratios[worse]


def dpo(margin: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta h) of the margin h (DPO, 2305.18290; online, 2402.04792)."""
    return -logsigmoid(beta * margin)


def ipo(margin: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2: pulls the margin to a finite place (IPO, 2310.12036)."""
    return (margin - 1.0 / (2.0 * beta)).square()


PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {"dpo": dpo, "ipo": ipo}


def pair_weights(margin: Tensor, loss: PreferenceLoss, beta: float) -> Tensor:
    """-dL/dh of each pair's loss L by its margin h, (P,): what its better answer's log pi is worth.

    The gradient of a pair's loss is -w (grad log pi(better) - grad log pi(worse)) with this w, so that its
    two answers may be differentiated apart from each other.
    """
    with torch.enable_grad():
        h = margin.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(h, beta).sum(), h)
    return -gradient


def weighted_answers(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A log pi, where A is an answer's ``pair_weights``: a better one's w, a worse one's -w, 0 outside."""
    logprobs = masked(inputs.logprobs, inputs.mask)
    return TokenLoss(
        loss=masked(-inputs.advantages * logprobs, inputs.mask),
        clipped=torch.zeros_like(inputs.mask),
        kl=log_difference(inputs.proximal, inputs.logprobs.detach(), inputs.mask),
    )
