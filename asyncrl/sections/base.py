"""What every block of the config is made of.

Invariants: as of ``asyncrl.config``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Dtype = Literal["float32", "bfloat16"]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)]
"""At least one; a plain string is taken as a list of it."""


class Section(BaseModel):
    """A block of keys: unknown ones are refused, and values never change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # so that run.name=2024 is a name
    )


def refuse(problems: list[str]) -> None:
    """Raise what pydantic collects; one problem a line, which the rendering takes apart again."""
    if problems:
        raise ValueError("\n".join(problems))


def from_path(value: Any) -> Any:
    """A plain string is the block's ``path``."""
    return {"path": value} if isinstance(value, str) else value
