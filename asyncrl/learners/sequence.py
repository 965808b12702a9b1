"""Sequences that are shared out over ranks (Ulysses, by DeepSpeed): each computes some of the columns.

Outside attention a rank has its columns of every row, all heads; inside, all columns of its heads. Two
all-to-alls a layer carry one to the other, and their gradients back. What a loss needs of a token, its
log-prob and its entropy, is then gathered, so that every one of these ranks computes the whole loss.

Invariants:
- Ranks that share sequences get the same micro-batches, and give the same loss and metrics for them.
- A rank's gradient is the part that its columns have in that loss: over these ranks they add up to the
  gradient, as they do over ranks with different samples. DeepSpeed need not know one from the other.
- Rows are padded on the right to a multiple of the ranks; under causal attention no real token sees that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.errors import ConfigError
from asyncrl.learners.collate import MicroBatch
from asyncrl.learners.policy import selected_logits

NAME = "asyncrl_ulysses"
"""Of the attention implementation, beside those of transformers."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which of a micro-batch's N trained tokens are predicted from this rank's columns."""

    owned: Tensor  # (N,) bool
    group: Any
    """The process group of the ranks that have the others."""

    def whole(self, values: Tensor) -> Tensor:
        """The values of all tokens, with the gradient of this rank's alone: (n,) -> (N,); collective."""
        found: Tensor = _Whole.apply(values, self.owned, self.group)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, slots=True)
class Columns:
    """One rank's columns of a micro-batch's rows: R rows of l."""

    input_ids: Tensor  # (R, l)
    positions: Tensor  # (n,) into the flattened columns: where the owned tokens are predicted
    position_ids: Tensor  # (R, l), places in the whole rows
    owned: Tensor  # (N,) bool, of all tokens those that are predicted here


def columns_of(input_ids: Tensor, positions: Tensor, index: int, size: int) -> Columns:
    """Those of rank ``index`` of ``size``, of inputs (R, L) and ``positions`` (N,) into them, flattened."""
    rows, width = input_ids.shape
    own = -(-width // size)  # columns a rank, rounded up
    start = index * own
    columns = pad(input_ids, (0, own * size - width))[:, start : start + own]
    row, column = positions // width, positions % width - start
    owned = (column >= 0) & (column < own)
    # Padding takes the last place: there may be none after it.
    places = torch.arange(start, start + own, device=input_ids.device).clamp(max=width - 1)
    return Columns(
        columns.contiguous(), (row * own + column)[owned], places.expand(rows, own).contiguous(), owned
    )


class SequenceParallel:
    """This rank's place among the ``size`` ranks of ``group``, which share every sequence."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._index = dist.get_rank(group)

    def install(self, model: Any) -> None:
        """Have the model's attention see whole sequences. Raises ConfigError for a model that cannot.

        Its layers have to attend to everything before a token, through the registry of transformers.
        """
        name = type(model).__name__
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
            kinds.add("sliding_attention")
        if kinds or not getattr(model, "_supports_attention_backend", False):
            found = f"layers of {', '.join(sorted(kinds))}" if kinds else "attention of its own"
            raise ConfigError(
                f"learner.sequence_parallel: found {self._size} with {name}, which has {found}; expected a "
                "model whose layers all attend to everything before a token, or sequence_parallel 1"
            )
        _register(self._attention(config))
        model.set_attn_implementation(NAME)

    def part_of(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with this rank's columns alone as inputs; every row is one sample."""
        own = columns_of(batch.input_ids, batch.positions, self._index, self._size)
        return replace(
            batch,
            input_ids=own.input_ids,
            positions=own.positions,
            position_ids=own.position_ids,
            part=Part(own.owned, self._group),
        )

    def logprobs(self, model: Any, token_ids: Tensor) -> Tensor:
        """Log-probs of tokens 1, 2, ... given those before: (T,) -> (T - 1,); collective."""
        everywhere = torch.arange(len(token_ids) - 1, device=token_ids.device)
        own = columns_of(token_ids[None, :-1], everywhere, self._index, self._size)
        logits = selected_logits(model, own.input_ids, own.positions, own.position_ids)
        logprobs, _ = token_logprobs(logits, token_ids[1:][own.owned], 1.0)
        return Part(own.owned, self._group).whole(logprobs)

    def _attention(self, config: Any) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        heads, group = config.num_attention_heads, self._group

        @cache
        def of_rows(rows: int) -> nn.Module:
            # One for each number of rows, which DeepSpeed's has to be told beforehand.
            found: nn.Module = UlyssesSPAttentionHF(
                attn=sdpa_attention_forward,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
                kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
                num_hidden_layers=config.num_hidden_layers,
                process_group=group,
                seq_length_is_variable=True,
            )
            return found

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
        ) -> Any:
            # Without a mask that attention is causal over the whole sequence; one of this rank's columns
            # would be too small, and transformers makes none for an implementation that it does not know.
            return of_rows(len(query))(module, query, key, value, None, **options)

        return attend


class _Whole(torch.autograd.Function):
    """Each rank has the values of its own tokens; the sum of all is the whole, to the bit."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, owned: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(owned)
        whole = values.new_zeros(owned.shape).masked_scatter_(owned, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (owned,) = ctx.saved_tensors
        return grad[owned], None, None


def _register(attend: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
