"""Which groups that land are worth training on, and why the others are not.

Invariants:
- Screening looks at a group alone and changes nothing; rewards in logs and ledgers stay as they were scored.
- Two groups with equal metas get the same answer, whenever they land.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.credit import CreditAssignment
from asyncrl.ledger import FinalState
from asyncrl.types import GroupMeta


class Screening:
    """What the config asks of a group before a step may train it; ``credit`` says what a step learns from."""

    def __init__(self, config: Config, credit: CreditAssignment) -> None:
        self._credit = credit
        self._min_group = config.rollout.min_group
        self._fails_on_error = config.reward.on_error == "fail"
        self._refills = config.algorithm.filter_zero_variance == "refill"

    def unusable_because(self, meta: GroupMeta) -> tuple[FinalState, str] | None:
        """How the ledger has to record a group that cannot be trained on; None for one that can.

        Samples that ran out of time leave a group of at least ``rollout.min_group`` usable; any other
        failure does so only where ``reward.on_error`` allows it.
        """
        own_fault = [f for f in meta.failures if f.kind != "DeadlineError"]
        survivors = len(meta.samples)
        if meta.failures and ((own_fault and self._fails_on_error) or survivors < self._min_group):
            first = (own_fault or list(meta.failures))[0]
            return "failed", f"{first.kind}: {first.message}"
        if meta.loss_tokens == 0:
            return "dropped", "no_trained_token"
        if self._credit.needs_greedy and meta.baseline is None:
            return "dropped", "no_greedy_answer"
        if self._refills and self._credit.without_signal(meta):
            return "filtered", "zero_variance"
        return None
