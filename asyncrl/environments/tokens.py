"""The tokens of a trajectory as it grows, turn by turn.

Invariants:
- All lists have one length.
- What an environment wrote has ``mask`` False, log-prob 0 and the version of the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.environments.base import RolloutResult
from asyncrl.types import Completion, FinishReason


@dataclass(slots=True)
class TurnTokens:
    """What follows the prompt."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def sampled(self, completion: Completion) -> None:
        """The model went on with this."""
        self.ids += completion.token_ids.tolist()
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()

    def observed(self, ids: Sequence[int]) -> None:
        """Somebody else did; never first."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)

    def result(
        self,
        prompt_ids: Sequence[int],
        finish: FinishReason,
        messages: Sequence[Mapping[str, Any]],
        rewards: Mapping[str, float] | None = None,
        earlier: Sequence[RolloutResult] = (),
    ) -> RolloutResult:
        """The trajectory behind ``prompt_ids``."""
        return RolloutResult(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            token_ids=np.asarray(self.ids, np.int32),
            loss_mask=np.asarray(self.mask, np.bool_),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.asarray(self.versions, np.int32),
            finish_reason=finish,
            messages=messages,
            rewards=rewards or {},
            earlier=tuple(earlier),
        )
