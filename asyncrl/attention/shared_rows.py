"""Attention where a row holds a prompt and all of its answers: each answer sees the prompt and itself.

Everything else of a model works on tokens one by one, so that a shared prompt is computed once. Attention
alone can go two ways, and takes the cheaper one:

- unfolded: rows become sequences, each a prompt and one answer, and what comes out is folded again. That
  costs what it costs without sharing, and no mask. Best where answers are not much shorter than prompts: a
  row's square grows with the number of answers.
- masked: the rows as they are. Best where many short answers share a long prompt, of which each would
  otherwise need a copy of keys and values.

Invariants:
- Registered beside the implementations of transformers, under ``NAME``; masked, or without rows to share, it
  is their ``sdpa``.
- Unfolded, there are at most ``MOST_COPIES`` times the tokens that the rows have.
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
MOST_COPIES = 4
"""Memory of unfolded keys and values, in those of the rows."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """R rows of L tokens, and the B sequences of at most T tokens that they hold."""

    segments: Tensor
    """(R, L) int64: 0 a prompt, k its k-th answer, -1 padding."""
    unfold: Tensor | None
    """(B, T) int64: where each token of a sequence is, in the flattened rows; None: masked is cheaper."""
    fold: Tensor | None
    """(R * L,) int64: where each token of the rows is, in the flattened sequences."""

    @staticmethod
    def of(segments: NDArray[np.int64], device: torch.device) -> SharedRows:
        sequences = list(_sequences(segments))
        longest = max((len(places) for places in sequences), default=1)

        def to_device(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        # Half of the scores of a sequence are computed, and all of those under a mask.
        copies, scores = len(sequences) * longest, len(sequences) * longest**2 / 2
        if copies > MOST_COPIES * segments.size or scores > segments.size * segments.shape[1]:
            return SharedRows(to_device(segments), None, None)
        unfold = np.zeros((max(len(sequences), 1), longest), np.int64)
        fold = np.zeros(segments.size, np.int64)
        # Backwards, so that what the sequences of a row share is that of the first.
        for number, places in reversed(list(enumerate(sequences))):
            unfold[number] = places[-1]  # padding, spread over the places that gradients go to
            unfold[number, : len(places)] = places
            fold[places] = number * longest + np.arange(len(places))
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
        ours = model.config.get_text_config()._attn_implementation == NAME
        if not ours or self.unfold is None or self.fold is None:
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
        if attention_mask is not None and attention_mask.numel() < query.shape[2]:
            raise ValueError("the model did not hand its attention what says which tokens share a row")
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    rows, _, width, _ = query.shape
    sequences, longest = shared_unfold.shape

    def unfolded(heads: Tensor) -> Tensor:
        flat = heads.transpose(1, 2).flatten(0, 1)  # (R * L, heads, head_dim)
        # In float32, because of the backward pass: it adds up the gradients of all answers there.
        found = flat.float() if flat.dtype.itemsize < 4 else flat
        found = found.index_select(0, shared_unfold.flatten()).to(flat.dtype)
        return found.view(sequences, longest, *found.shape[1:]).transpose(1, 2)

    options["is_causal"] = True
    mixed, _ = sdpa_attention_forward(
        module, unfolded(query), unfolded(key), unfolded(value), None, scaling=scaling, **options
    )
    folded = mixed.flatten(0, 1).index_select(0, shared_fold)
    return folded.view(rows, width, *folded.shape[1:]), None


def use_shared_rows(model: Any) -> None:
    """Switch a transformers model from ``sdpa``; one with another implementation takes a mask.

    Whether its layers hand on what they are called with shows when it runs: see ``use_masks``.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, shared_rows_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    # Without this flag a model's attention layers may not be handed what it was called with.
    if model.config._attn_implementation == "sdpa" and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(NAME)


def use_masks(model: Any) -> bool:
    """Switch a model back, to masks over the rows; False where it takes them already."""
    if model.config._attn_implementation != NAME:
        return False
    model.set_attn_implementation("sdpa")
    return True
