"""Whether a model keeps sequences apart that share a row or a prompt, asked of the model at the start.

Attention layers do, where they build their mask from position ids that start again at 0. A layer that
carries a state from token to token (state spaces, linear attention, convolutions) does not, nor does a
model that has no use for positions: its answers would leak into each other, and nothing would show it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.learners.policy import selected_logits

LENGTHS = (11, 17)
"""Of the two sequences that are run together and apart, in tokens."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference of log-probs, over the vocabulary and the tokens of the second sequence."""


@torch.no_grad()
def packing_difference(model: Any, vocabulary: int, device: torch.device) -> float:
    """Mean difference of the second sequence's log-probs behind another one and alone; collective.

    ``model`` is a prepared policy or an engine around one.
    """
    # Spread over the vocabulary, and the same on every rank: parameters may be gathered for it.
    tokens = (torch.arange(sum(LENGTHS), device=device) * 7919 + 1) % vocabulary
    first, second = LENGTHS
    places = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
    behind = torch.arange(first, first + second, device=device)
    together = _logprobs(model, tokens, behind, places)
    alone = _logprobs(model, tokens[first:], behind - first, None)
    return float((together - alone).abs().mean())


def require_exact_packing(model: Any, dtype: str, device: torch.device) -> None:
    """Raises ConfigError for a model that cannot take several sequences in a row; collective."""
    module = getattr(model, "module", model)
    name = type(module).__name__
    try:
        difference = packing_difference(model, int(module.config.get_text_config().vocab_size), device)
    except TypeError as error:
        raise ConfigError(
            f"learner.packing: found true with {name}, which takes no position_ids: {error}; expected a "
            "model of attention layers, or learner.packing false"
        ) from error
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"learner.packing: found true with {name}, whose log-probs of a sequence differ by "
            f"{difference:.2g} on average when another one stands before it in the row; expected at most "
            f"{TOLERANCE[dtype]:g} in {dtype}: set learner.packing to false"
        )


@torch.no_grad()
def sharing_difference(model: Any, vocabulary: int, device: torch.device) -> float:
    """Mean difference of the second answer's log-probs behind a shared prompt and its own; collective."""
    first, second = LENGTHS
    prompt = first
    tokens = (torch.arange(prompt + first + second, device=device) * 7919 + 1) % vocabulary
    own = torch.cat([tokens[:prompt], tokens[prompt + first :]])
    places = torch.cat([torch.arange(prompt + first), prompt + torch.arange(second)]).to(device)
    segments = torch.cat([torch.full((n,), k) for k, n in enumerate((prompt, first, second))]).to(device)
    behind = torch.arange(prompt + first, prompt + first + second, device=device)
    together = _logprobs(model, tokens, behind, places, segments)
    alone = _logprobs(model, own, behind - first, None)
    return float((together - alone).abs().mean())


def require_exact_sharing(model: Any, dtype: str, device: torch.device) -> None:
    """Raises ConfigError for a model whose answers cannot share a prompt; collective."""
    module = getattr(model, "module", model)
    name, config = type(module).__name__, module.config.get_text_config()
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
        difference = sharing_difference(model, int(config.vocab_size), device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"learner.shared_prompts: found true with {name}, which does not take position_ids and an "
            f"attention_mask: {error}; expected a model of attention layers, or learner.shared_prompts false"
        ) from error
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"learner.shared_prompts: found true with {name}, whose log-probs of an answer differ by "
            f"{difference:.2g} on average when it shares its prompt; expected at most {TOLERANCE[dtype]:g} "
            f"in {dtype}: set learner.shared_prompts to false"
        )


def _logprobs(
    model: Any, tokens: Tensor, positions: Tensor, places: Tensor | None, segments: Tensor | None = None
) -> Tensor:
    """(L,), (N,) -> (N, V)."""
    rows = (None if column is None else column[None] for column in (places, segments))
    return selected_logits(model, tokens[None], positions, *rows).float().log_softmax(-1)
