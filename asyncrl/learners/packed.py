"""Whether a model keeps sequences apart that share a row or a prompt, asked of the model at the start.

Attention layers do, where they build their mask from position ids that start again at 0. A layer that
carries a state from token to token (state spaces, linear attention, convolutions) does not, nor does a
model that has no use for positions: its answers would leak into each other, and nothing would show it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.attention.shared_rows import SharedRows, use_masks
from asyncrl.errors import ConfigError
from asyncrl.learners.policy import selected_logits

log = logging.getLogger(__name__)

LENGTHS = (11, 17)
"""Of the two sequences that are run together and apart, in tokens."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest mean difference of log-probs, over the vocabulary and the tokens of the second sequence, from those
that it has alone: rounding, which in bfloat16 grows with the layers (0.06 with 30 of them)."""
LEAK = 1e-4
"""Largest one where only the tokens beside it are others: what is masked has no share, in any dtype."""


@torch.no_grad()
def packing_differences(model: Any, vocabulary: int, device: torch.device) -> tuple[float, float]:
    """Mean differences of the second sequence's log-probs: behind one and alone, behind two others.

    ``model`` is a prepared policy or an engine around one. Collective.
    """
    first, second = LENGTHS
    tokens = _tokens(first + second, vocabulary, device)
    places = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
    behind = torch.arange(first, first + second, device=device)
    together = _logprobs(model, tokens, behind, places)
    alone = _logprobs(model, tokens[first:], behind - first, None)
    beside_others = _logprobs(model, _with_others(tokens, 0, first, vocabulary), behind, places)
    return _difference(together, alone), _difference(together, beside_others)


@torch.no_grad()
def sharing_differences(model: Any, vocabulary: int, device: torch.device) -> tuple[float, float]:
    """Likewise of the second answer to a prompt: behind the first one and alone, and behind two others.

    The larger of both ways that attention may take: which one it is, is a matter of each batch's lengths.
    """
    first, second = LENGTHS
    prompt = first
    tokens = _tokens(prompt + first + second, vocabulary, device)
    own = torch.cat([tokens[:prompt], tokens[prompt + first :]])
    places = torch.cat([torch.arange(prompt + first), prompt + torch.arange(second)]).to(device)
    segments = np.repeat(np.arange(3), (prompt, first, second))[None]
    unfolded = SharedRows.of(segments, device)
    behind = torch.arange(prompt + first, prompt + first + second, device=device)
    alone = _logprobs(model, own, behind - first, None)
    others = _with_others(tokens, prompt, prompt + first, vocabulary)
    apart = leak = 0.0
    for rows in (unfolded, replace(unfolded, unfold=None, fold=None)):
        together = _logprobs(model, tokens, behind, places, rows)
        beside_others = _logprobs(model, others, behind, places, rows)
        apart = max(apart, _difference(together, alone))
        leak = max(leak, _difference(together, beside_others))
    return apart, leak


def require_exact_packing(model: Any, dtype: str, device: torch.device) -> None:
    """Raises ConfigError for a model that cannot take several sequences in a row; collective."""
    name, config = _named(model)
    try:
        apart, leak = packing_differences(model, int(config.vocab_size), device)
    except TypeError as error:
        raise ConfigError(
            f"learner.packing: found true with {name}, which takes no position_ids: {error}; expected a "
            "model of attention layers, or learner.packing false"
        ) from error
    _require_small("learner.packing", f"{name}, whose log-probs of a sequence", apart, leak, dtype)


def require_exact_sharing(model: Any, dtype: str, device: torch.device) -> None:
    """Raises ConfigError for a model whose answers cannot share a prompt; collective."""
    name, config = _named(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) and not kinds:
        kinds.add("sliding_attention")
    if kinds - {"full_attention"}:
        raise ConfigError(
            f"learner.shared_prompts: found true with {name}, which has layers of "
            f"{', '.join(sorted(kinds - {'full_attention'}))}; expected full_attention alone, whose mask "
            "answers can share: set learner.shared_prompts to false"
        )
    try:
        apart, leak = _sharing_unfolded_or_masked(model, int(config.vocab_size), dtype, device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"learner.shared_prompts: found true with {name}, which does not take position_ids and an "
            f"attention_mask: {error}; expected a model of attention layers, or learner.shared_prompts false"
        ) from error
    _require_small("learner.shared_prompts", f"{name}, whose log-probs of an answer", apart, leak, dtype)


def _sharing_unfolded_or_masked(
    model: Any, vocabulary: int, dtype: str, device: torch.device
) -> tuple[float, float]:
    """``sharing_differences``, with masks where those are what the model needs."""
    module = getattr(model, "module", model)
    try:
        apart, leak = sharing_differences(model, vocabulary, device)
        if apart <= TOLERANCE[dtype] and leak <= LEAK:
            return apart, leak
    except (TypeError, ValueError):
        if not use_masks(module):
            raise
    else:
        if not use_masks(module):
            return apart, leak
    log.info("%s takes shared prompts with a mask over each row", type(module).__name__)
    return sharing_differences(model, vocabulary, device)


def _require_small(key: str, whose: str, apart: float, leak: float, dtype: str) -> None:
    for found, limit, what in (
        (apart, TOLERANCE[dtype], "when another one stands before it in the row"),
        (leak, LEAK, "when it is another one that stands before it in the row"),
    ):
        if not found <= limit:
            raise ConfigError(
                f"{key}: found true with {whose} differ by {found:.2g} on average {what}; expected at most "
                f"{limit:g} in {dtype}: set {key} to false"
            )


def _named(model: Any) -> tuple[str, Any]:
    module = getattr(model, "module", model)
    return type(module).__name__, module.config.get_text_config()


def _tokens(count: int, vocabulary: int, device: torch.device) -> Tensor:
    """Spread over the vocabulary, and the same on every rank: parameters may be gathered for it."""
    return (torch.arange(count, device=device) * 7919 + 1) % vocabulary


def _with_others(tokens: Tensor, start: int, end: int, vocabulary: int) -> Tensor:
    """``tokens`` with others from ``start`` to ``end``."""
    others = tokens.clone()
    others[start:end] = (tokens[start:end] + vocabulary // 2) % vocabulary
    return others


def _difference(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().mean())


def _logprobs(
    model: Any, tokens: Tensor, positions: Tensor, places: Tensor | None, shared: SharedRows | None = None
) -> Tensor:
    """(L,), (N,) -> (N, V)."""
    row = None if places is None else places[None]
    return selected_logits(model, tokens[None], positions, row, shared).float().log_softmax(-1)
