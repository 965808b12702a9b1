"""The KL to the reference as the controller sees it: its coefficient, and what it takes off rewards.

Invariants:
- The coefficient changes between two steps alone: all groups of an update are penalised by the same one,
  whenever they landed.
- It is adapted to the KL that a step measured: with KL in the loss that of the policy that was updated, with
  KL in the reward that of the policy that sampled.
- It stands while the policy does: in steps that were skipped, and in those of a critic's warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite

from asyncrl.algorithms.adaptive import AdaptiveCoefficient
from asyncrl.config import AlgorithmSection
from asyncrl.errors import InvariantError
from asyncrl.learners.base import StepResult
from asyncrl.types import Metrics, ReadyGroup

KL_SCALAR = "kl"
"""Name of the reference's scalar: the KL of each answer, summed over its trained tokens."""


class KLControl:
    """Coefficient and penalties of one run; says and does nothing with ``algorithm.kl: none``."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._where = algorithm.kl
        self._of_answers = algorithm.kl == "reward" and not algorithm.penalises_tokens
        self._adaptive: AdaptiveCoefficient | None = None
        if algorithm.kl_target is not None:
            self._adaptive = AdaptiveCoefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self._fixed = algorithm.kl_coef if algorithm.kl != "none" else 0.0

    @property
    def coefficient(self) -> float:
        """That of the next update. Controller state: a resumed run has to set it."""
        return self._fixed if self._adaptive is None else self._adaptive.value

    @coefficient.setter
    def coefficient(self, value: float) -> None:
        if self._adaptive is None:
            self._fixed = value
        else:
            self._adaptive.value = value

    def penalties(self, group: ReadyGroup) -> tuple[float, ...]:
        """What comes off the rewards of a group: coefficient times KL where whole answers pay it, else 0."""
        if not self._of_answers:
            return (0.0,) * len(group.meta.trajectories)
        return tuple(self.coefficient * kl for kl in _kl(group))

    def end_step(self, groups: Sequence[ReadyGroup], result: StepResult) -> Metrics:
        """Take in what an update measured; returns the metrics of its own coefficient.

        ``groups``: those that it trained, as they landed: with the tokens that were masked out since.
        """
        if self._where == "none":
            return {}
        metrics = {"actor/kl_coef": self.coefficient}
        if self._where == "loss":
            kl = result.metrics.get("actor/reference_kl")
        else:
            tokens = sum(group.meta.loss_tokens for group in groups)
            kl = fsum(k for group in groups for k in _kl(group)) / max(tokens, 1)
            metrics["actor/reference_kl"] = kl
        answers = sum(len(group.meta.trajectories) for group in groups)
        stood_still = result.skipped or result.metrics.get("critic/warmup", 0.0) > 0
        if self._adaptive is not None and kl is not None and isfinite(kl) and not stood_still:
            self._adaptive.update(kl, answers)
        return metrics


def _kl(group: ReadyGroup) -> tuple[float, ...]:
    for annotation in group.annotations:
        if KL_SCALAR in annotation.meta.scalars:
            return annotation.meta.scalars[KL_SCALAR]
    raise InvariantError(f"{group.meta.uid} landed without its KL to the reference")
