"""Whether a model computes the same when ranks share its work: asked of the model itself, at the start.

What DeepSpeed puts in place of attention or linear layers fits the models that it was made for. A model that
it does not fit (layers that carry a state from token to token, heads that are counted elsewhere) would be
trained wrongly, and nothing would show it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.config import Dtype
from asyncrl.errors import ConfigError
from asyncrl.learners.packed import TOLERANCE
from asyncrl.learners.policy import selected_logits

_LENGTH = 29
"""Tokens: a number that no small number of ranks divides."""


class Probe:
    """A short sequence, and its log-probs by ``model``, a prepared policy that is in one piece."""

    @torch.no_grad()
    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        vocabulary = int(model.config.get_text_config().vocab_size)
        # Spread over the vocabulary, and the same on every rank.
        self.token_ids = (torch.arange(_LENGTH + 1) * 7919 + 1) % vocabulary
        device = next(model.parameters()).device
        logits = selected_logits(
            model, self.token_ids[None, :-1].to(device), torch.arange(_LENGTH, device=device)
        )
        self._expected, _ = token_logprobs(logits, self.token_ids[1:].to(device), 1.0)

    def require(self, found: Tensor, key: str, size: int, dtype: Dtype) -> None:
        """Raise ConfigError, for the config's ``key``, unless these are its log-probs: (T - 1,) of T."""
        difference = float((found.cpu() - self._expected.cpu()).abs().mean())
        if difference <= TOLERANCE[dtype]:
            return
        raise ConfigError(
            f"{key}: found {size} with {self._name}, whose log-probs differ by {difference:.2g} on average "
            f"when {size} ranks share its work; expected at most {TOLERANCE[dtype]:g} in {dtype}: set it "
            "to 1"
        )
