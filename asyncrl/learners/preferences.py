"""Learning from pairs, whatever the micro-batches that their answers are in.

A pair's loss is a function of its margin, to which both answers add their log-ratio. So the log-ratios
are computed first, without gradients, and then each answer alone is weighed by the loss's derivative
at its pair's margin: the gradient is the exact one, and the two need not be in one micro-batch. They are
on one rank, because whole groups are.

Invariants:
- ``TrainSample.advantage`` names a sample's part: above 0 the better one of its group's pair, below 0
  the worse one, 0 in no pair. Afterwards it is the answer's weight, 0 in no pair.
- The step's loss is the mean over the pairs of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.preferences import (
    PREFERENCE_LOSSES,
    answer_log_ratio,
    margins,
    pair_weights,
)
from asyncrl.config import AlgorithmSection
from asyncrl.errors import InvariantError
from asyncrl.learners.base import TrainSample
from asyncrl.learners.collate import MicroBatch


class Preferences:
    """The preference loss of a run, from its config section."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._loss = PREFERENCE_LOSSES[algorithm.loss]
        self._beta = algorithm.preference_beta

    def log_ratios(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """log pi(answer) - log ref(answer) of each row: (B, T) -> (B,) float64. No rows, no reference."""
        if batch.reference is None:
            if len(batch.targets):
                raise InvariantError("answers came without the reference's log-probs, which pairs need")
            return logprobs.new_zeros(len(logprobs), dtype=torch.float64)
        return answer_log_ratio(logprobs.double(), batch.reference.double(), batch.mask)

    def weigh(
        self, samples: Sequence[TrainSample], rows: Sequence[int], log_ratios: Tensor
    ) -> tuple[list[TrainSample], dict[str, Tensor]]:
        """All samples, those of ``rows`` with their weights in place of their signs; and sums over the pairs.

        ``log_ratios`` (R,) belong to ``rows``: the samples of this update, on this rank. Each group's pair is
        wholly among them. The sums, float64 scalars: ``pairs``, ``preference_loss``, ``preference_margin``
        and ``preferred``, the number of pairs whose better answer pi prefers more than ref does.
        """
        found = list(samples)
        where = {row: i for i, row in enumerate(rows)}
        parts: dict[int, dict[float, int]] = {}
        for row in rows:
            if sign := samples[row].advantage:
                parts.setdefault(samples[row].ordinal, {})[sign] = row
        pairs = [(part[1.0], part[-1.0]) for part in parts.values()]

        def places(side: int) -> Tensor:
            indices = [where[pair[side]] for pair in pairs]
            return torch.tensor(indices, dtype=torch.int64, device=log_ratios.device)

        margin = margins(log_ratios, better=places(0), worse=places(1))  # (P,)
        weights = pair_weights(margin, self._loss, self._beta).tolist()
        for (winner, loser), weight in zip(pairs, weights, strict=True):
            found[winner] = replace(samples[winner], advantage=weight)
            found[loser] = replace(samples[loser], advantage=-weight)
        return found, {
            "pairs": torch.full_like(log_ratios.sum(), len(pairs)),
            "preference_loss": self._loss(margin, self._beta).sum(),
            "preference_margin": margin.sum(),
            "preferred": (margin > 0).sum(),
        }
