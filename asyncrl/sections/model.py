"""The policy that training starts from."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from asyncrl.config_checks import creation_problems, model_problems
from asyncrl.sections.base import Dtype, Section, refuse


class WarmStartSection(Section):
    steps: NonNegativeInt = 400
    """Supervised updates on question and answer pairs of ``data.train``."""
    batch_size: PositiveInt = 64
    """Examples an update."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate (AdamW, linear decay)."""
    target: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Stop early once this share of held-back targets is expected to be right; null: never."""


class CreateSection(Section):
    """A small Llama with a character tokenizer, made on first use and kept beside the runs."""

    hidden_size: PositiveInt = 192
    """Width of the residual stream; a multiple of ``heads``, and even for each head."""
    intermediate_size: PositiveInt = 512
    """Width inside each MLP."""
    layers: PositiveInt = 6
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 4
    """Key and value heads; ``heads`` is a multiple of them."""
    max_positions: PositiveInt = 256
    """Longest sequence in tokens."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and the warm start; apart from ``run.seed``."""
    warm_start: WarmStartSection = WarmStartSection()
    """The short supervised training that makes the model right sometimes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(creation_problems(self))
        return self


class ModelSection(Section):
    path: str | None = None
    """Hugging Face folder or hub name. Null with ``create``."""
    create: CreateSection | None = None
    """Make a small model instead of loading one."""
    dtype: Dtype = "float32"
    """Compute dtype of learner and generators; the learner's optimizer keeps float32 masters."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(model_problems(self))
        return self
