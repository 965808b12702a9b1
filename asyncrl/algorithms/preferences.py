"""Learning from pairs of answers to one prompt: online DPO and IPO.

Shapes: P pairs, each a better and a worse answer of one group. A log-prob here is that of a whole
answer: the sum over its tokens.

Invariants:
- A pair's answers have different rewards: ties make no pair.
- At pi = ref every margin is 0, whatever the answers' lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.ratios import log_difference

PreferenceLoss = Callable[[Tensor, float], Tensor]
"""(margins (P,), beta) -> a loss a pair (P,)"""


def pairs_in_group(
    rewards: Sequence[float], which: Literal["extremes", "all"] = "extremes"
) -> list[tuple[int, int]]:
    """(better, worse) by index. ``extremes``: the best against the worst; ``all``: every two that differ.

    Of equal rewards the first counts. A group of one, or of equal rewards, makes no pair.
    """
    indices = range(len(rewards))
    if which == "all":
        return [(i, j) for i in indices for j in indices if rewards[i] > rewards[j]]
    if not rewards or max(rewards) == min(rewards):
        return []
    return [(rewards.index(max(rewards)), rewards.index(min(rewards)))]


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
