"""From a YAML file and ``key.sub=value`` overrides to a Config, or to one message with every error.

Invariants:
- Nothing heavy is imported, so that a mistake shows at once.
- All that is wrong with a file is said in one ConfigError, each line with the full dotted path.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config import Config
from asyncrl.errors import ConfigError

# What pydantic's error types expected, in the words of a YAML file.
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a block of keys",
    "model": "a block of keys",
}
_SHOWN_CHARACTERS = 60
_UNREADABLE = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,  # a number of thousands of digits, a date beyond the calendar
    TypeError,
    AttributeError,
    RecursionError,
)
"""What the parsers raise, of text that is no config."""

C = TypeVar("C", bound=Config)


def load_config(file: Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``file``, apply ``overrides`` in order, and check everything. Raises ConfigError."""
    return parse_config(read_values(file), overrides, name=str(file))


def parse_config(values: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "config") -> Config:
    """As ``load_config``, of values that are at hand; ``name`` stands for the file in messages."""
    return parse_as(Config, values, overrides, name=name)


def parse_as(schema: type[C], values: Mapping[str, Any], overrides: Sequence[str], *, name: str) -> C:
    """As ``parse_config``, of a config with more blocks than a run has."""
    merged = _override(values, overrides)
    try:
        return schema.model_validate(merged)
    except ValidationError as error:
        lines = [line for details in _without_echoes(error.errors()) for line in _render(details, schema)]
    where = f"{name} with overrides {' '.join(overrides)}" if overrides else name
    count = "1 error" if len(lines) == 1 else f"{len(lines)} errors"
    raise ConfigError("\n".join([f"{count} in {where}:", *(f"  {line}" for line in lines)]))


def known_values(values: Mapping[str, Any], schema: type[BaseModel] = Config) -> dict[str, Any]:
    """``values`` without the keys that ``schema`` does not have: those of another version of asyncrl."""
    known: dict[str, Any] = {}
    for key, value in values.items():
        field = schema.model_fields.get(key)
        if field is None:
            continue
        section = _section(field.annotation)
        if section is not None and isinstance(value, Mapping):
            value = known_values(value, section)
        known[key] = value
    return known


def dump_config(config: Config) -> str:
    """The resolved config as YAML, in the order of the sections; ``load_config`` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_values(file: Path) -> dict[str, Any]:
    """The sections of a YAML file, unchecked. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"found no file {file}; expected a YAML config (--config FILE)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=True) if text.strip() else {}
    except _UNREADABLE as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file}: found {_shown(values)}; expected sections such as model:, data:, reward:")
    return values  # type: ignore[return-value]


def _override(values: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """``values`` with each override in turn: it sets its key, whatever was there, to its YAML value."""
    config = OmegaConf.create(_unfolded(values))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"override: found {override!r}; expected key.sub=value, e.g. run.steps=20")
        try:
            OmegaConf.update(config, key, OmegaConf.from_dotlist([f"value={value}"]).value, merge=False)
            OmegaConf.to_container(config, resolve=True)  # an interpolation may name a key that is not there
        except _UNREADABLE as error:
            raise ConfigError(f"override {override!r} cannot be applied: {error}") from error
    return OmegaConf.to_container(config, resolve=True)


def _unfolded(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with data sources written out, so that ``data.train.size=5`` adds to a plain path."""
    data = values.get("data")
    if not isinstance(data, dict):
        return dict(values)
    sources = {k: {"path": data[k]} for k in ("train", "eval") if isinstance(data.get(k), str)}
    return {**values, "data": {**data, **sources}}


def _without_echoes(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Drop "too short" of a list whose entries were refused: pydantic counts only those that passed."""
    locations = [details["loc"] for details in errors]
    return [
        details
        for details in errors
        if details["type"] != "too_short"
        or not any(other[:-1][: len(details["loc"])] == details["loc"] for other in locations)
    ]


def _render(details: ErrorDetails, schema: type[Config]) -> Iterator[str]:
    """One line for each finding in one of pydantic's errors."""
    location = details["loc"]
    key, kind, found = _dotted(location), details["type"], _shown(details["input"])
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        yield f"{key}: unknown key; {_nearest(location, schema)}"
    elif kind == "missing":
        yield f"{key}: found nothing; expected this key to be set"
    elif kind == "value_error":
        for problem in str(context["error"]).split("\n"):
            yield _joined(key, problem)
    elif kind == "literal_error":
        yield f"{key}: found {found}; expected {context['expected']}"
    elif kind == "too_short":
        yield f"{key}: found {context['actual_length']} entries; expected at least {context['min_length']}"
    elif kind == "string_pattern_mismatch":
        yield f"{key}: found {found}; expected letters, digits and _.+=- alone (pattern {context['pattern']})"
    elif (expected := _bound(kind, context)) is not None:
        yield f"{key}: found {found}; expected {expected}"
    else:
        name = next((text for prefix, text in _EXPECTED.items() if kind.startswith(prefix)), None)
        yield f"{key}: found {found}; expected {name or details['msg']}"


def _bound(kind: str, context: Mapping[str, Any]) -> str | None:
    words = {
        "greater_than": ("gt", "more than"),
        "greater_than_equal": ("ge", "at least"),
        "less_than": ("lt", "less than"),
        "less_than_equal": ("le", "at most"),
    }
    if kind not in words:
        return "a finite number" if kind == "finite_number" else None
    name, text = words[kind]
    return f"{text} {context[name]}"


def _joined(key: str, problem: str) -> str:
    """A finding with its full path. Sections write theirs from their own key, the top from the top."""
    if not key:
        return problem
    head, colon, _ = problem.partition(":")
    return f"{key}.{problem}" if colon and head.isidentifier() else f"{key}: {problem}"


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    """A value and, where it could be mistaken, its type, in a few characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, BaseModel)):
        return "a block of keys"
    text = repr(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + "..."
    if isinstance(value, str):
        return f"{text} (text)"
    return f"{text} (a list)" if isinstance(value, (list, tuple)) else text


def _nearest(location: Sequence[int | str], schema: type[Config]) -> str:
    """What the unknown last part of ``location`` was probably meant to be."""
    unknown = str(location[-1])
    siblings = _keys(location[:-1], schema)
    near = difflib.get_close_matches(unknown, siblings, n=1)
    if near:
        return f"did you mean {_dotted((*location[:-1], near[0]))}?"
    elsewhere = {path.rpartition(".")[2]: path for path in _all_paths(schema)}
    near = difflib.get_close_matches(unknown, elsewhere, n=1, cutoff=0.8)
    if near:
        return f"did you mean {elsewhere[near[0]]}?"
    return f"expected one of {', '.join(siblings)}"


def _keys(location: Sequence[int | str], schema: type[Config]) -> list[str]:
    section: type[BaseModel] = schema
    for part in location:
        if isinstance(part, str) and part in section.model_fields:  # others name an entry of a block
            section = _section(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _all_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _section(field.annotation)
        if inner is not None and get_origin(field.annotation) not in (tuple, dict):
            yield from _all_paths(inner, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section inside ``X``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, dict):
        found = (_section(argument) for argument in get_args(annotation))
        return next((section for section in found if section is not None), None)
    return None
