"""A second model over the parameters of one that is trained: an engine's own, beside the learner's.

Two models and not one, because an engine switches to evaluation mode and to an attention of its own, and
what it computes under inference mode, such as cached tables of positions, must not be met by autograd.

Invariants:
- Both hold the very same ``Parameter`` objects, tied ones included: an update in place is an update of both.
- Everything else is apart: modules, modes, buffers, hooks and config.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import nn


class SharedModel:
    """``model``, a copy of ``trained`` but for its parameters, which are those of ``trained``."""

    def __init__(self, trained: Any) -> None:
        self._trained = trained
        shared = {id(parameter): parameter for parameter in trained.parameters()}
        self.model: Any = copy.deepcopy(trained, shared)

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def addresses(self) -> dict[str, int]:
        """Where each parameter of ``model`` lies, by name."""
        return _addresses(self.model)

    def learner_addresses(self) -> dict[str, int]:
        """Where each parameter lies that the learner trains, by name."""
        return _addresses(self._trained)

    def address_checksum(self) -> str:
        """Equal for equal addresses: 32 hexadecimal digits."""
        text = repr(sorted(self.addresses().items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
