"""Models beside the policy, in actors of their own or in the learner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from asyncrl.sections.base import Dtype, Section
from asyncrl.sections.learner import EngineSection


class RoleSection(Section):
    """The actors of a role beside generators and learner."""

    replicas: PositiveInt = 1
    """Actors, each with the whole model; every group goes to one of them as it lands."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda, then cpu."""
    threads: PositiveInt = 1
    """Torch threads of one actor on CPU."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Cores to pin the actors to, dealt out in turn; null: unpinned."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that an actor may take to load its model."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that one call may take, of one group or of several that were waiting, before the actor is taken
    for dead and replaced."""

    @property
    def actors(self) -> tuple[str, int]:
        """The key that says how many actors there are, and the number."""
        return "replicas", self.replicas


class ReferenceSection(RoleSection):
    path: str | None = None
    """Hugging Face folder or hub name, with the policy's tokenizer. Null: the model that training starts
    from."""
    dtype: Dtype | None = None
    """Compute dtype. Null: ``model.dtype``."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens in one forward pass, padding included. Null: ``learner.micro_batch_tokens``."""
    refresh_every: NonNegativeInt = 0
    """Policy versions after which the reference follows the policy, a multiple of ``schedule.publish_every``;
    0: it stays what it is."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the old reference that stays at each refresh, as an average in float32; null: none of it."""
    place: Literal["actors", "learner", "lora_base"] = "actors"
    """actors: in actors of its own, which score groups as they land. The others start none, and the learner
    scores each step's groups first, one forward pass of its time: learner keeps the start model in host
    memory and exchanges it for the policy meanwhile; lora_base, with ``learner.lora``, has no second copy of
    the weights and switches its adapters off."""


class RewardModelSection(RoleSection):
    """A sequence classifier that scores answers, beside ``reward.functions`` or in place of them."""

    path: str
    """Hugging Face folder or hub name of an ``AutoModelForSequenceClassification`` with one label."""
    weight: float = 1.0
    """Factor of its score in the sum that is the reward."""
    template: Literal["auto", "chat", "none"] = "auto"
    """``chat``: the prompt's messages and the answer, by its own tokenizer's chat template. ``none``: the
    policy's prompt and the answer, one after the other: the very tokens where both have one vocabulary, else
    as text that its own tokenizer reads. auto: chat if its tokenizer has a chat template."""
    dtype: Dtype | None = None
    """Compute dtype. Null: ``model.dtype``."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens in one forward pass, padding included, and of the groups in one call. Null:
    ``learner.micro_batch_tokens``."""
    max_tokens: PositiveInt | None = None
    """Longest input in tokens: a longer one loses its beginning, and is counted. Null: all that the model
    takes."""


class CriticSection(EngineSection):
    """The value model of ``advantage: gae``, on an engine and in processes of its own."""

    path: str | None = None
    """Hugging Face folder or hub name whose transformer it starts from; null: the policy's start model."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of a run that train the critic alone. They count as steps of the run and as policy
    versions, though the policy keeps its weights."""
    value_clip: PositiveFloat = 0.2
    """A value's loss ignores moves beyond this from the value that the token was given as it landed."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds that the values of one group may take, with an update that it has to wait for; an update of
    its own ends with that of the policy, in ``learner.step_timeout_s``."""

    @property
    def actors(self) -> tuple[str, int]:
        """The key that says how many actors there are, and the number."""
        return "ranks", self.ranks
