"""Prompts to train on and to be measured on."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from asyncrl.config_checks import source_problems
from asyncrl.sections.base import Section, from_path, refuse


class SourceSection(Section):
    """Where rows come from: exactly one of ``path``, ``hub``, ``reasoning_gym``, ``python``, ``mixture``,
    ``holdout``."""

    path: str | None = None
    """A .jsonl or .parquet file."""
    hub: str | None = None
    """A Hugging Face data set, by name."""
    hub_config: str | None = None
    """The data set's configuration name."""
    split: str = "train"
    """The hub data set's split."""
    reasoning_gym: str | None = None
    """A reasoning-gym family, e.g. ``chain_sum``."""
    python: str | None = None
    """``package.module:function`` or ``file.py:function`` that returns an iterable of dicts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the family or the function."""
    size: PositiveInt | None = None
    """Rows to draw from a reasoning-gym family (default 1000), or at most to read from others."""
    seed: NonNegativeInt = 0
    """Seed of a reasoning-gym family, and of which prompts ``holdout`` takes; apart from ``run.seed``."""
    holdout: PositiveInt | None = None
    """For ``data.eval`` alone: hold out this many distinct prompts of ``data.train``, by text."""
    mixture: tuple[SourceSection, ...] = ()
    """Several sources as one. Without weights every row of all of them comes once an epoch."""
    weight: PositiveFloat | None = None
    """In a mixture: share of this source in what is trained on, beside the other weights. Each source then
    goes through its rows at its own pace."""

    @model_validator(mode="before")
    @classmethod
    def _from_short(cls, value: Any) -> Any:
        return {"mixture": value} if isinstance(value, (list, tuple)) else from_path(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(source_problems(self))
        return self


class DataSection(Section):
    train: SourceSection
    """Rows to train on. A plain string is taken as a path, a list as a mixture."""
    eval: SourceSection | None = None
    """Held-out rows. Prompts that occur here, by text, are removed from training."""
    eval_sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")], SourceSection] = Field(
        default_factory=dict
    )
    """More held-out rows, by name: each is measured by itself, as ``eval/<name>/reward_mean``."""
    format: Literal["auto", "verl", "trl", "openrlhf", "skyrl", "reasoning_gym", "plain"] = "auto"
    """Which project's columns the rows have; auto: told by the columns, and said at the start."""
    prompt_key: str | None = None
    """Column of the prompt; null: that of the form, or the first of prompt, question, input, problem."""
    label_key: str | None = None
    """Column of what a right answer is, passed to rewards as ``ground_truth``; null: that of the form."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """``chat`` applies the tokenizer's chat template, ``plain`` the text; auto: chat if there is one."""
    prompt_format: str = "{prompt}"
    """Python format of a plain or user text, with the row's columns by name."""
    system: str | None = None
    """System message in front of a chat."""
    shuffle: bool = True
    """Another order each epoch, from ``run.seed``."""
    max_prompt_tokens: PositiveInt = 256
    """Longest prompt in tokens."""
    over_long: Literal["drop", "truncate_left", "error"] = "drop"
    """What to do with a prompt over ``max_prompt_tokens``; the count is reported at the start."""
