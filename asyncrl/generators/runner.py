"""One Hugging Face causal LM over slots: its loading, and its two kinds of forward pass.

Invariants:
- The model is used through its own ``forward``, so any architecture works that takes
  ``position_ids`` and keeps plain keys and values; others are refused when loading.
- ``prefill`` writes keys and values and returns nothing: every token, the first included, is
  sampled from the logits of a ``decode``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from asyncrl.attention.slots import use_slot_attention
from asyncrl.errors import ConfigError
from asyncrl.generators.kv_cache import DecodeView, PrefillView, SlotKV
from asyncrl.generators.prefill import PrefillBatch

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
CausalLM = Any
"""A ``transformers.PreTrainedModel`` with a language modelling head (transformers is untyped)."""


def resolve_device(name: DeviceName | torch.device) -> torch.device:
    """``auto`` prefers CUDA, then MPS, then the CPU."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_model(path: str | Path, *, dtype: torch.dtype, trust_remote_code: bool) -> CausalLM:
    """The model of a Hugging Face folder or hub name, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)


def eos_ids(model: CausalLM) -> tuple[int, ...]:
    """The tokens that end an answer, by the generation config or else the model's config."""
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return ()


def check_model(model: CausalLM, max_sequence: int) -> None:
    """Refuse what fixed slots cannot serve, with what was found and what to change."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_sequence > positions:
        raise ConfigError(
            f"{name} has {positions} positions, but prompt and answer may take {max_sequence} tokens: "
            "lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{name}.forward takes no position_ids, which the torch generator needs")
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None:
        strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if strange:
            raise ConfigError(
                f"{name} has layers of type {', '.join(strange)}; the torch generator serves full attention"
            )
        window = window if "sliding_attention" in kinds else None
    if window is not None and window < max_sequence:
        raise ConfigError(
            f"{name} has a sliding window of {window} tokens, shorter than the {max_sequence} that prompt "
            "and answer may take: the torch generator serves full attention, so lower "
            "data.max_prompt_tokens or rollout.max_new_tokens"
        )


class ModelRunner:
    """``model`` with keys and values for ``slots`` sequences of up to ``max_sequence`` tokens."""

    def __init__(self, model: CausalLM, *, slots: int, max_sequence: int, device: torch.device) -> None:
        check_model(model, max_sequence)
        self.model = model.to(device).eval()
        use_slot_attention(self.model)
        self.device = device
        self.eos = eos_ids(model)
        # The head is dead weight in a prefill: base_model is the model without it.
        self._body = model.base_model
        dtype: torch.dtype = next(model.parameters()).dtype
        shapes, self.vocab_size = self._probe()
        self.kv = SlotKV(shapes, slots=slots, max_sequence=max_sequence, dtype=dtype, device=device)
        self._columns = torch.arange(max_sequence, device=device)
        self._rows = torch.arange(slots, device=device)
        self._visible = torch.zeros((), dtype=dtype, device=device)
        self._hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)

    def _probe(self) -> tuple[list[tuple[tuple[int, int], tuple[int, int]]], int]:
        """The shapes of keys and values of each layer and the vocabulary's size, by one forward pass."""
        cache = DynamicCache()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            logits = self.model(
                input_ids=token, position_ids=token, past_key_values=cache, use_cache=True
            ).logits
        shapes = [
            ((layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3]))
            for layer in cache.layers
        ]
        return shapes, logits.shape[-1]

    def prefill(self, batch: PrefillBatch, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """Keep the keys and values of the first ``batch.length`` tokens of ``rows``.

        ``tokens`` (batch.rows, batch.length) int64, of which the first ``len(rows)`` are kept.
        """
        view = PrefillView(self.kv, torch.tensor(rows, device=self.device))
        positions = self._columns[: batch.length].expand(batch.rows, -1)
        self._body(input_ids=tokens, position_ids=positions, past_key_values=view, use_cache=True)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Logits (B, V) after one more token of each of the first B slots.

        ``tokens`` (B, 1) and ``positions`` (B, 1) int64; attention runs over ``length`` positions.
        """
        count = len(tokens)
        view = DecodeView(self.kv, self._rows[:count], positions[:, 0], length)
        mask = torch.where(self._columns[:length] <= positions, self._visible, self._hidden)
        logits: torch.Tensor = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[:, None, None, :],
            past_key_values=view,
            use_cache=True,
        ).logits
        return logits[:, -1]

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probs (T - 1,) in float32 of all but the first of T tokens; uses no slot."""
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        inputs, targets = ids[:-1], ids[1:]
        logits = self.model(
            input_ids=inputs[None], position_ids=self._columns[None, : len(inputs)], use_cache=False
        ).logits[0]
        logprobs: torch.Tensor = logits.float().log_softmax(-1)  # (T - 1, V)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1)
