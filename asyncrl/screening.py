"""Which groups that land are worth training on, and why the others are not.

Invariants:
- Screening looks at a group alone and changes nothing; rewards in logs and ledgers stay as they were scored.
- Two groups with equal metas get the same answer, whenever they land.
"""

from __future__ import annotations

from asyncrl.algorithms.shaping import RewardShaping
from asyncrl.config import Config
from asyncrl.ledger import FinalState
from asyncrl.types import GroupMeta


class Screening:
    """What the config asks of a group before a step may train it."""

    def __init__(self, config: Config) -> None:
        self._min_group = config.rollout.min_group
        self._fails_on_error = config.reward.on_error == "fail"
        self._refills = config.algorithm.filter_zero_variance == "refill"
        self._shaping = RewardShaping(
            max_tokens=config.rollout.max_new_tokens,
            clip=config.algorithm.reward_clip,
            length_penalty=config.algorithm.length_penalty,
            overlong_buffer=config.overlong_buffer,
            overlong_penalty=config.algorithm.overlong_penalty,
        )

    def shaped_rewards(self, meta: GroupMeta) -> tuple[float, ...]:
        """A reward a trajectory, as the group's advantages see it."""
        return self._shaping.shaped(meta.rewards, [answer.response_tokens for answer in meta.trajectories])

    def without_signal(self, meta: GroupMeta) -> bool:
        """Whether all rewards of a group are the same, shaped but for a penalty for the KL.

        That differs from answer to answer even where the task tells none from another.
        """
        return len(set(self.shaped_rewards(meta))) == 1

    def unusable_because(self, meta: GroupMeta) -> tuple[FinalState, str] | None:
        """How the ledger has to record a group that cannot be trained on; None for one that can.

        Samples that ran out of time leave a group of at least ``rollout.min_group`` usable; any other
        failure does so only where ``reward.on_error`` allows it.
        """
        own_fault = [f for f in meta.failures if f.kind != "DeadlineError"]
        survivors = len(meta.trajectories)
        if meta.failures and ((own_fault and self._fails_on_error) or survivors < self._min_group):
            first = (own_fault or list(meta.failures))[0]
            return "failed", f"{first.kind}: {first.message}"
        if meta.loss_tokens == 0:
            return "dropped", "no_trained_token"
        if self._refills and self.without_signal(meta):
            return "filtered", "zero_variance"
        return None
