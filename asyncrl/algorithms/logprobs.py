"""Log-probs and entropies of chosen tokens, without ever holding a second (N, V) tensor in fp32.

Invariants:
- Arithmetic is in float32, or float64 where the logits are.
- Memory beside logits and their gradient is ``ROWS`` rows of the vocabulary, whatever N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 256
"""Rows of logits that are worked on at a time."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of each distribution.

    ``logits`` (N, V), ``targets`` (N,) int64 -> two (N,) tensors; the entropy carries a gradient only
    where that is asked for.
    """
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, entropy_gradient
    )
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Recomputes the softmax in the backward pass: cheaper than keeping it."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(logits)
        logprobs = logits.new_empty(len(logits), dtype=dtype)
        entropy = torch.empty_like(logprobs)
        normaliser = torch.empty_like(logprobs)
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            scaled = logits[rows].to(dtype) / temperature  # (R, V)
            log_z = scaled.logsumexp(-1, keepdim=True)  # (R, 1)
            chosen = scaled.gather(-1, targets[rows, None])
            logprobs[rows] = (chosen - log_z).squeeze(-1)
            normaliser[rows] = log_z.squeeze(-1)
            # H = log Z - E[x]: one pass, and no log of a probability that underflowed.
            entropy[rows] = log_z.squeeze(-1) - (scaled * (scaled - log_z).exp()).sum(-1)
        ctx.save_for_backward(logits, targets, normaliser, entropy)
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normaliser, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            scale = grad[rows, None] / ctx.temperature  # (R, 1)
            scaled = logits[rows].to(normaliser.dtype) / ctx.temperature
            # d log p(y) / dx = (1[y] - softmax(x)) / T
            logprobs = scaled - normaliser[rows, None]
            if ctx.entropy_gradient:
                # d H / dx = -softmax(x) (log softmax(x) + H) / T
                factor = entropy_grad[rows, None] / ctx.temperature  # (R, 1)
                bonus = (logprobs + entropy[rows, None]).mul_(logprobs.exp()).mul_(-factor)
            block = logprobs.exp_().mul_(-scale)
            block.scatter_add_(-1, targets[rows, None], scale)
            if ctx.entropy_gradient:
                block += bonus
            out[rows] = block.to(out.dtype)
        return out, None, None, None


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
