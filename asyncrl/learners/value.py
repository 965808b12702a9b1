"""The critic's model: the transformer of any Hugging Face causal LM under a head of one number a position.

Invariants:
- The head starts at zero, so that a critic that has learned nothing values everything at 0, on every rank
  and for every seed.
- Values are computed where they are wanted, and in float32 whatever the transformer's dtype: bfloat16 has
  eight bits, too few to tell 0.500 from 0.503.
- Dropout is off: a value is a function of weights and tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.learners.policy import switch_dropout_off


class ValueHead(nn.Module):
    """A linear layer, H -> 1, that starts at zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N,) float32."""
        values = functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        return values.squeeze(-1)


class ValueModel(nn.Module):
    """``transformer`` gives hidden states, ``head`` makes values of them."""

    def __init__(self, transformer: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.head = ValueHead(hidden_size, next(transformer.parameters()).dtype)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Values at ``positions``, indices into the flattened inputs: (B, L), (N,) -> (N,) float32."""
        hidden = self.transformer(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, L, H)
        values: Tensor = self.head(hidden.flatten(0, 1).index_select(0, positions))
        return values


def load_value_model(
    path: str, *, dtype: torch.dtype, trust_remote_code: bool, checkpointing: bool
) -> ValueModel:
    """The transformer of a Hugging Face folder or name, in training mode, under a new head."""
    from transformers import AutoModel

    transformer: Any = AutoModel.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    transformer.train()  # gradient checkpointing is off in evaluation mode
    switch_dropout_off(transformer)
    if checkpointing:
        transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return ValueModel(transformer, transformer.config.get_text_config().hidden_size)
