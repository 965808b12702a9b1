"""Exponential moving averages of parameters: a reference policy that follows the trained one slowly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def update_average(average: Iterable[Tensor], current: Iterable[Tensor], decay: float) -> None:
    """average <- decay average + (1 - decay) current, in place, tensor by tensor.

    Decay 0 is a copy (a periodic refresh), 1 leaves the average as it is. In bfloat16 a step below
    2^-8 of a value rounds to nothing: keep the average in float32. Raises ValueError where the two
    hold a different number of tensors.
    """
    for mean, value in zip(average, current, strict=True):
        mean.lerp_(value.to(mean.dtype), 1.0 - decay)
