"""Attention where a row holds a prompt and all of its answers: each answer sees the prompt and itself.

Everything else of a model works on tokens one by one, so that a shared prompt is computed once. Attention
alone unfolds the rows into sequences, each a prompt and one answer, and folds what comes out. It then costs
what it costs without sharing, whatever the number of answers, and needs no mask: one over a whole row
would grow with the square of it.

Invariants:
- Registered beside the implementations of transformers, under ``NAME``; without rows to share, it is their
  ``sdpa``, masks included.
- What a padding token gets is another token's, and is seen by none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "asyncrl_shared_rows"


@dataclass(frozen=True, slots=True)
class SharedRows:
    """R rows of L tokens, and the B sequences of at most T tokens that they hold."""

    segments: Tensor
    """(R, L) int64: 0 a prompt, k its k-th answer, -1 padding."""
    unfold: Tensor
    """(B, T) int64: where each token of a sequence is, in the flattened rows."""
    fold: Tensor
    """(R * L,) int64: where each token of the rows is, in the flattened sequences."""

    @staticmethod
    def of(segments: NDArray[np.int64], device: torch.device) -> SharedRows:
        sequences = list(_sequences(segments))
        longest = max((len(places) for places in sequences), default=1)
        unfold = np.zeros((max(len(sequences), 1), longest), np.int64)
        fold = np.zeros(segments.size, np.int64)
        # Backwards, so that what the sequences of a row share is that of the first.
        for number, places in reversed(list(enumerate(sequences))):
            unfold[number, : len(places)] = places
            fold[places] = number * longest + np.arange(len(places))

        def to_device(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return SharedRows(to_device(segments), to_device(unfold), to_device(fold))

    def mask(self, dtype: torch.dtype) -> Tensor:
        """The same as a mask, for implementations that know no rows: (R, 1, L, L), added to the scores.

        A token sees what comes before it of its own segment and of segment 0; padding sees itself and padding
        before it.
        """
        of_query, of_key = self.segments[:, :, None], self.segments[:, None, :]
        seen = ((of_key == of_query) | ((of_key == 0) & (of_query > 0))).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=self.segments.device)
        return mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    def arguments(self, model: Any) -> dict[str, Tensor]:
        """What ``model`` is called with, besides tokens and positions."""
        if model.config.get_text_config()._attn_implementation != NAME:
            return {"attention_mask": self.mask(model.dtype)}
        # The mask says to transformers that none is to be made; it is not looked at.
        nothing = torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=self.unfold.device)
        return {"attention_mask": nothing, "shared_unfold": self.unfold, "shared_fold": self.fold}


def _sequences(segments: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Places in flattened rows of each prompt with each of its answers, alone where they have no token."""
    width = segments.shape[1]
    for number, row in enumerate(segments):
        prompt = np.flatnonzero(row == 0)
        answers = [answer for answer in np.unique(row) if answer > 0]
        for columns in [np.flatnonzero(row == answer) for answer in answers] or [prompt[:0]]:
            places = number * width + np.concatenate([prompt, columns])
            if len(places):
                yield places


def shared_rows_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_unfold: Tensor | None = None,
    shared_fold: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention (R, L, heads, head_dim) of queries (R, heads, L, head_dim); see ``SharedRows``."""
    if shared_unfold is None or shared_fold is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    rows, _, width, _ = query.shape
    sequences, longest = shared_unfold.shape

    def unfolded(heads: Tensor) -> Tensor:
        flat = heads.transpose(1, 2).flatten(0, 1)  # (R * L, heads, head_dim)
        found = flat.index_select(0, shared_unfold.flatten())
        return found.view(sequences, longest, *found.shape[1:]).transpose(1, 2)

    options["is_causal"] = True
    mixed, _ = sdpa_attention_forward(
        module, unfolded(query), unfolded(key), unfolded(value), None, scaling=scaling, **options
    )
    folded = mixed.flatten(0, 1).index_select(0, shared_fold)
    return folded.view(rows, width, *folded.shape[1:]), None


def use_shared_rows(model: Any) -> None:
    """Switch a transformers model from ``sdpa``; one with another implementation takes a mask."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, shared_rows_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    # Without this flag a model's attention layers may not be handed what it was called with.
    if model.config._attn_implementation == "sdpa" and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(NAME)
