"""What is done to a reward before the group's baseline: clipping, and penalties for length.

Plain Python, because the controller computes it. Rewards in logs and ledgers stay as they were scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """All off by default; lengths in tokens."""

    max_tokens: int
    """Longest answer, ``rollout.max_new_tokens``."""
    clip: tuple[float, float] | None = None
    """Bounds of a reward, before penalties."""
    length_penalty: float = 0.0
    """Taken off an answer of ``max_tokens``; off a shorter one in proportion."""
    overlong_buffer: int = 0
    """Tokens at the end of ``max_tokens`` in which the penalty for overlong answers rises; 0: none."""
    overlong_penalty: float = 1.0
    """Taken off an answer that used up the buffer."""

    def shaped(self, rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
        """The rewards of one group, as advantages are made from them; lengths of the whole answers."""
        return tuple(self.reward(reward, n) for reward, n in zip(rewards, lengths, strict=True))

    def reward(self, reward: float, length: int) -> float:
        """One answer's."""
        return self.penalised(self.clipped(reward), length)

    def clipped(self, reward: float) -> float:
        """A reward within its bounds."""
        return reward if self.clip is None else clipped(reward, *self.clip)

    def penalised(self, reward: float, length: int) -> float:
        """A reward less the penalties for an answer of that length."""
        if self.length_penalty:
            reward -= self.length_penalty * length / self.max_tokens
        if self.overlong_buffer:
            reward -= self.overlong_penalty * overlong(length, self.max_tokens, self.overlong_buffer)
        return reward


def clipped(reward: float, low: float, high: float) -> float:
    """``reward``, at least ``low`` and at most ``high``."""
    return min(max(reward, low), high)


def overlong(length: int, max_tokens: int, buffer: int) -> float:
    """Share of the buffer at the end of ``max_tokens`` that an answer uses, 0 to 1 (DAPO, 2503.14476)."""
    return clipped((length - (max_tokens - buffer)) / buffer, 0.0, 1.0)
