"""Attention over slots: grouped-query decoding without copying keys and values.

Invariants:
- Registered beside the implementations of transformers, under ``NAME``; whatever is not one-token
  decoding goes to their ``sdpa``, masks included, so a model set to it behaves as before.
- Query head h reads key-value head h // group, as everywhere in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.attention import shared_rows

NAME = "asyncrl_slots"


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention (B, T, heads, head_dim) of queries (B, heads, T, head_dim).

    For T = 1, the query heads of a group are laid out as positions of their key-value head. All
    see the same mask (B, 1, 1, L), so that is the same sum, and the keys and values (B, kv_heads,
    L, head_dim), which are most of what decoding reads, need not be repeated for each head.
    """
    rows, heads, width, kv_heads = query.shape[0], query.shape[1], query.shape[3], key.shape[1]
    if query.shape[2] > 1 or heads == kv_heads:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, width)
    mixed = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(rows, 1, heads, value.shape[3]), None


def use_slot_attention(model: Any) -> None:
    """Switch a transformers model from ``sdpa``; one that needs another implementation keeps it."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, slot_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    # Without this flag a model's attention layers may not go through the registry.
    ours = ("sdpa", shared_rows.NAME)  # which is that of a copy of the learner's model
    if model.config._attn_implementation in ours and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(NAME)
