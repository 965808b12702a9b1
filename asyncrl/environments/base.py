"""What a rollout is: tokens in, tokens out, against a model behind a narrow client.

Invariants:
- History is never decoded and tokenised again: a later turn's prompt is the earlier tokens, as
  sampled, followed by the environment's own tokens, which have ``loss_mask`` False.
- A rollout knows nothing of engines, replicas or reward functions. What these make of it is the caller's to
  add: there is no placeholder for it here, only for what an environment itself says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from asyncrl.types import BoolArray, Completion, FinishReason, Float32Array, Int32Array, SamplingParams, Task

Messages = Sequence[Mapping[str, Any]]
"""Chat messages: ``role`` and ``content``, and what else a template knows."""


Heard = Callable[[Completion], None]
"""Told now and then what there is so far of an answer, from its beginning."""


class ModelClient(Protocol):
    """The policy, as one rollout sees it."""

    @property
    def sampling(self) -> SamplingParams:
        """As the run is configured; ``max_new_tokens`` is the most that the whole trajectory may have."""
        ...

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        heard: Heard | None = None,
    ) -> Completion:
        """Sample one continuation of ``prompt_ids``; null ``sampling``: as the run is configured.

        Cancelling it gives its slot back.
        """
        ...


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A trajectory before its reward: all arrays but ``prompt_ids`` have one length, (T,).

    ``rollout.py`` scores it and makes it a ``Trajectory``. Raises ValueError if the lengths differ.
    """

    prompt_ids: Int32Array  # (P,)
    token_ids: Int32Array  # (T,)
    loss_mask: BoolArray  # (T,) False for tool and environment tokens
    logprobs: Float32Array  # (T,) behaviour log-probs; 0 where loss_mask is False
    versions: Int32Array  # (T,)
    finish_reason: FinishReason
    messages: Messages = ()
    """What followed the prompt, for rewards that read messages; empty: one of the assistant."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the environment said of it, by name; ``environment`` is its reward."""
    earlier: tuple[RolloutResult, ...] = ()
    """What it sampled in other contexts that this one does not go on from: rows that are trained beside it,
    with its reward."""

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name)) for name in ("token_ids", "loss_mask", "logprobs", "versions")
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"found arrays of different lengths, {lengths}; expected one length")


class Rollout(Protocol):
    """One answer to one task, over as many turns as it takes."""

    async def __call__(self, task: Task, client: ModelClient) -> RolloutResult: ...


async def single_turn(task: Task, client: ModelClient) -> RolloutResult:
    """The default rollout: one continuation of the prompt, every token of it trained."""
    completion = await client.complete(task.prompt_ids)
    return RolloutResult(
        prompt_ids=np.asarray(task.prompt_ids, np.int32),
        token_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
    )
