"""A reference beside the learner: weights in host memory that take the policy's place for a forward pass.

Invariants:
- Outside ``held`` the parameters are the policy's, to the bit, also after an error inside it.
- Each rank holds its own part of the weights, as it lies in its memory: no rank holds more of the reference
  than of the policy, and an exchange sends nothing.
- Averages are kept in float32, whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.algorithms.averaging import update_average
from asyncrl.learners.engine import TrainingEngine


class ResidentReference:
    """The weights that ``engine``'s model has now; with ``every`` they follow it, every so many versions.

    ``engine`` is built and has made no update. ``ema``: the share of the old reference that stays whenever it
    follows, None for none.
    """

    def __init__(self, engine: TrainingEngine, *, every: int = 0, ema: float | None = None) -> None:
        self.version = 0
        """The policy version whose weights it took last; 0: it is the start model."""
        self._engine = engine
        self._every = every
        self._decay = 0.0 if ema is None else ema
        self._kept = [_to_host(place) for place in engine.local_parameters()]
        self._average = self._kept
        if ema is not None and any(kept.dtype != torch.float32 for kept in self._kept):
            self._average = [kept.float() for kept in self._kept]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block, the model computes what the reference does. Without gradients alone."""
        exchanged: list[tuple[Tensor, Tensor]] = []
        try:
            for place, kept in zip(self._engine.local_parameters(), self._kept, strict=True):
                _exchange(place, kept)
                exchanged.append((place, kept))
            self._engine.drop_gathered()
            yield
        finally:
            for place, kept in exchanged:
                _exchange(place, kept)
            self._engine.drop_gathered()

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Take the weights of the policy, which is at ``version``, or their average, if that is due."""
        if not self._every or version == self.version or version % self._every:
            return
        places = self._engine.local_parameters()
        for place, mean, kept in zip(places, self._average, self._kept, strict=True):
            update_average([mean], [place.to(mean.device)], self._decay)
            if mean is not kept:
                kept.copy_(mean)
        self.version = version


def _to_host(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor)


@torch.no_grad()
def _exchange(place: Tensor, kept: Tensor) -> None:
    policy = place.clone()
    place.copy_(kept)
    kept.copy_(policy)
