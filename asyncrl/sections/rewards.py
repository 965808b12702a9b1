"""What a good answer is, and what the model acts in."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from asyncrl.config_checks import environment_problems
from asyncrl.sections.base import Section, from_path, refuse


class RewardFunctionSection(Section):
    path: str
    """``package.module:function``, ``file.py:function`` (a rubric object too), the http address of a reward
    server, or the name of a built-in reward. What it is called with, its parameters say (docs/rewards.md)."""
    weight: float = 1.0
    """Factor in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on each call."""
    name: str | None = None
    """Name in the metrics; null: the function's."""

    @property
    def label(self) -> str:
        """Name in the metrics, and in the rewards of a trajectory."""
        return self.name or ("remote" if "://" in self.path else self.path.rpartition(":")[2])

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return from_path(value)


class RewardSection(Section):
    functions: tuple[RewardFunctionSection, ...] = ()
    """Reward functions; their weighted sum is the reward, with that of a ``reward_model``. A plain string is
    taken as a path. At least one, unless there is a ``reward_model``."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that scoring one answer, or one group by functions of groups, may take (each async function:
    that it may take) before the process that does it is killed and replaced."""
    on_error: Literal["fail", "drop"] = "fail"
    """Of a reward that cannot be had. ``fail``: the whole group fails, counted. ``drop``: that sample alone.
    Never 0.0."""
    workers: PositiveInt = 1
    """Worker processes beside each generator."""
    memory_mb: PositiveInt | None = 16384
    """MiB of data that one of them may have, and each process that it starts (Linux). One that wants more is
    replaced, and its call fails by name. Null: no limit."""


COMMAND = "command"
"""The path of an agent that is a command."""


class ServeSection(Section):
    """Where agents find the policy: one endpoint beside each generator."""

    host: str = "127.0.0.1"
    """Address that it listens on. Whoever can reach it and knows a rollout's address can call the policy."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any that is free, which two generators on one machine need."""
    address: str | None = None
    """Host name by which agents reach it; null: ``host``."""
    max_body_mb: PositiveFloat = 16.0
    """Longest request, in MiB; a longer one is answered 413."""
    max_parallel: PositiveInt = 16
    """Calls of one rollout at once; more are answered 429."""


class EnvironmentSection(Section):
    """What the model acts in, over several turns; docs/environments.md says what it is."""

    kind: Literal["turns", "agent"] = "turns"
    """``turns``: an object with ``reset`` and ``step``. ``agent``: the user's own loop, which calls the
    policy by HTTP (docs/agents.md)."""
    path: str
    """``package.module:Class`` or ``file.py:Class``, or a function that makes one; ``tools`` for the built-in
    environment over ``tools``; ``skyrl_gym`` for the registered one that a row's ``env_class`` names, or
    ``skyrl_gym:ID``. Of an agent the function; ``command`` for one that ``command`` starts."""
    form: Literal["auto", "asyncrl", "trl", "skyrl_gym", "verifiers"] = "auto"
    """Whose environment it is; ``auto`` goes by its methods."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that each environment is made with, or that an agent is called with."""
    command: tuple[str, ...] = ()
    """Program and arguments of an agent that is a command."""
    serve: ServeSection = ServeSection()
    """Where agents find the policy."""
    tools: tuple[str, ...] = ()
    """Typed functions that the model may call, ``package.module:function`` or ``file.py:function``. With
    ``form: verifiers``, those that the environment runs itself: the prompt shows them."""
    parse: str | None = None
    """Function from a message's text to the calls in it, a list of (name, arguments). Null: as Hermes and
    Qwen write them."""
    max_turns: PositiveInt = 8
    """The model's messages in one trajectory; of an agent its calls."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one of them. Null: what is left of ``rollout.max_new_tokens``, which all turns share with
    what the environment says."""
    max_time_s: PositiveFloat | None = None
    """Seconds after which no further turn begins; null: ``rollout.deadline_s`` alone."""
    max_observation_chars: PositiveInt = 100_000
    """Longest answer of the environment, in characters; a longer one fails its trajectory."""
    timeout_s: PositiveFloat = 30.0
    """Seconds that ``reset`` or one ``step`` may take before its trajectory fails; of an agent, those that it
    has to end in once its time is up."""
    reward_weight: float = 1.0
    """Factor of the environment's own reward, where it gives one, in the sum that is the reward."""
    workers: PositiveInt = 1
    """Worker processes beside each generator; each runs many environments."""
    memory_mb: PositiveInt | None = 16384
    """MiB of data that one of them may have, and each process that it starts (Linux); beyond it environments
    get a MemoryError. Null: no limit."""

    @property
    def name(self) -> str:
        """For messages."""
        return " ".join(self.command) if self.command else self.path

    @property
    def what(self) -> str:
        """For messages, with what it is."""
        return f"{'agent' if self.kind == 'agent' else 'environment'} {self.name!r}"

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return from_path(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(environment_problems(self))
        return self
