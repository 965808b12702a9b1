"""Choosing tokens: inverse-CDF sampling, vectorised over rows.

Invariants:
- Nothing here is random: each row brings its own uniform draw.
- A row's token and log-prob depend on that row alone: every operation here works row by row.
- A log-prob is that of the distribution sampled from, temperature and truncation included. For a
  greedy row (temperature 0), whose distribution would be a point, it is that at temperature 1.
- A token of probability 0 is never chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each of B rows samples, as tensors. None where no row needs the work in question."""

    temperature: torch.Tensor | None
    """(B, 1) float32, 1.0 for greedy rows; None: 1.0 for all."""
    greedy: torch.Tensor | None
    """(B,) bool; None: no row is greedy."""
    truncated: torch.Tensor | None
    """(F,) int64, the rows with top_k or top_p; None: no row."""
    top_k: torch.Tensor
    """(F, 1) int64; 0 is off."""
    top_p: torch.Tensor
    """(F, 1) float32; 1.0 is off."""

    @classmethod
    def of(cls, rows: Sequence[SamplingParams | None], device: torch.device) -> RowSampling:
        """From the parameters of each row, in order; None is an idle row, where anything will do."""
        heat = [row.temperature if row and row.temperature > 0 else 1.0 for row in rows]
        greedy = [row is not None and row.temperature == 0 for row in rows]
        cut = [i for i, row in enumerate(rows) if row and (row.top_k > 0 or row.top_p < 1)]
        cut_rows = [row for row in (rows[i] for i in cut) if row is not None]
        return cls(
            temperature=None
            if all(value == 1.0 for value in heat)
            else torch.tensor(heat, dtype=torch.float32, device=device)[:, None],
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            truncated=torch.tensor(cut, device=device) if cut else None,
            top_k=torch.tensor([row.top_k for row in cut_rows], dtype=torch.int64, device=device)[:, None],
            top_p=torch.tensor([row.top_p for row in cut_rows], dtype=torch.float32, device=device)[:, None],
        )


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set what top_k and then top_p exclude to -inf. All (F, V); ``top_k`` and ``top_p`` (F, 1).

    top_p keeps the smallest set of likeliest tokens, of those that top_k left, whose mass reaches
    top_p (nucleus sampling: Holtzman et al., 2020). The likeliest token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    ordered = ordered.masked_fill((top_p < 1) & (mass_before >= top_p), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, ordered)


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, rows: RowSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token a row: token ids (B,) int64 and their log-probs (B,) float32.

    ``logits`` (B, V) of any float dtype, ``uniforms`` (B,) float32. The token is the first whose
    cumulative probability exceeds the row's draw.
    """
    scores = logits.float()
    if rows.temperature is not None:
        scores = scores / rows.temperature
    if rows.truncated is not None:
        scores = scores.clone() if scores is logits else scores
        scores[rows.truncated] = truncate(scores[rows.truncated], rows.top_k, rows.top_p)
    cdf = scores.softmax(dim=-1).cumsum(dim=-1)
    total = cdf[:, -1:]  # 1 up to rounding; the threshold must stay below it
    threshold = torch.minimum(uniforms[:, None] * total, total * (1 - 2**-23))
    tokens = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, scores.argmax(dim=-1), tokens)
    tokens = tokens.clamp_(max=scores.shape[-1] - 1)  # NaN logits only; reported by the caller
    logprobs = scores.log_softmax(dim=-1).gather(-1, tokens[:, None])
    return tokens, logprobs.squeeze(-1)
