"""How answers are sampled, for training and for evaluations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from asyncrl.sections.base import Section


class RolloutSection(Section):
    group_size: PositiveInt = 8
    """Trajectories a task."""
    groups_per_step: PositiveInt = 8
    """B: groups an update."""
    max_new_tokens: PositiveInt = 64
    """Longest answer in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner's log-probs use the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability mass to sample from; 1.0 is off, and all that training takes."""
    top_k: NonNegativeInt = 0
    """Likeliest tokens to sample from; 0 is off, and all that training takes."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; they are part of it."""
    deadline_s: PositiveFloat = 300.0
    """Seconds that one group may take, from its request to the last reward of a function."""
    min_group: PositiveInt = 2
    """Fewest surviving samples that a group may train with when ``reward.on_error`` is drop."""
    max_attempts: PositiveInt = 3
    """Tries of one group when the replica that it is on dies or hangs; the last with no other beside
    it, so that a prompt that kills replicas is told from those that were only there. It is not tried
    again in later epochs, over a resume neither, unless the config of what samples changed."""


class EvalSection(Section):
    every: NonNegativeInt = 10
    """Steps between evaluations; 0: only before and after."""
    samples: PositiveInt = 1
    """Answers a prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability mass to sample from; 1.0: off."""
    top_k: NonNegativeInt = 0
    """Likeliest tokens to sample from; 0: off."""
    max_new_tokens: PositiveInt | None = None
    """Null: as ``rollout.max_new_tokens``."""
    max_prompts: PositiveInt | None = None
    """Use only the first so many held-out prompts."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that one evaluation may take."""
