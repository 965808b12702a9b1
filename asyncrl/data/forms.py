"""The forms of data sets that people already have, told apart by the columns of their rows.

Invariants:
- What a form is recognised by is its columns alone, so that a look at one row says it, in any process.
- A form changes no column. It may add one, ``ground_truth``, so that every reward finds it under one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config import DataSection
from asyncrl.errors import DataError

PROMPT_KEYS = ("prompt", "question", "input", "problem")
LABEL_KEYS = ("label", "answer", "output")
"""Where an OpenRLHF set usually has its labels; the first that exists."""
_TRUTH = "ground_truth"


@dataclass(frozen=True, slots=True)
class Form:
    """Where rows have their prompt and what the reward compares an answer with."""

    name: str
    required: tuple[str, ...]
    """Columns without which rows are not of this form."""
    prompt_key: str
    truth: tuple[str, ...] = ()
    """Column of the ground truth, and the keys inside it; empty: rewards take columns by name alone."""

    def complete(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """``row`` with ``ground_truth``, where the form knows it and no column has that name."""
        if not self.truth or _TRUTH in row:
            return dict(row)
        value: Any = row
        for key in self.truth:
            if not isinstance(value, Mapping) or key not in value:
                return dict(row)  # verl: rows that a model scores have none
            value = value[key]
        return {**row, _TRUTH: value}

    def __str__(self) -> str:
        truth = f", ground truth in {'.'.join(self.truth)}" if self.truth else ""
        return f"{self.name} rows, prompt in {self.prompt_key}{truth}"


# In the order in which they are looked for: whatever has a prompt, and nothing of the others, is TRL's.
_FORMS = (
    Form("verl", ("prompt", "data_source", "reward_model"), "prompt", ("reward_model", "ground_truth")),
    Form("skyrl", ("prompt", "env_class"), "prompt", ("reward_spec", "ground_truth")),
    Form("reasoning_gym", ("question", "answer", "metadata"), "question", ("answer",)),
    Form("trl", ("prompt",), "prompt"),
    Form("openrlhf", ("input",), "input"),
)


def recognise(section: DataSection, columns: Iterable[str]) -> Form:
    """The form of rows with these columns: that of ``data.format``, or the first that fits.

    ``data.prompt_key`` and ``data.label_key`` win over what the form says. Raises DataError for columns
    that are missing.
    """
    having = list(columns)
    form = _named(section, having) if section.format != "auto" else _fitting(section, having)
    if section.prompt_key is not None:
        form = replace(form, prompt_key=section.prompt_key)
    if section.label_key is not None:
        form = replace(form, truth=(section.label_key,))
    elif form.name == "openrlhf":
        form = replace(form, truth=tuple([key for key in LABEL_KEYS if key in having][:1]))
    needed = [form.prompt_key] if section.label_key is None else [form.prompt_key, section.label_key]
    missing = [key for key in needed if key not in having]
    if missing:
        name = "prompt" if missing[0] == form.prompt_key else "label"
        raise DataError(
            f"found the columns {_listed(having)}; expected a column {missing[0]} for the {name}: set "
            f"data.{name}_key"
        )
    return form


def _named(section: DataSection, having: list[str]) -> Form:
    if section.format == "plain":
        return _plain(section, having)
    form = next(form for form in _FORMS if form.name == section.format)
    # A key that the user gives stands for the column that the form has by default.
    required = [c for c in form.required if section.prompt_key is None or c != form.prompt_key]
    missing = [column for column in required if column not in having]
    if missing:
        raise DataError(
            f"data.format: found {section.format!r} and the columns {_listed(having)}; expected "
            f"{', '.join(form.required)}, of which {', '.join(missing)} is missing: set data.format to auto"
        )
    return form


def _fitting(section: DataSection, having: list[str]) -> Form:
    for form in _FORMS:
        if all(column in having for column in form.required):
            return form
    return _plain(section, having)


def _plain(section: DataSection, having: list[str]) -> Form:
    """Rows of no project's form: a prompt under one of the usual names."""
    wanted = PROMPT_KEYS if section.prompt_key is None else (section.prompt_key,)
    for key in wanted:
        if key in having:
            return Form("plain", (key,), key)
    raise DataError(
        f"found the columns {_listed(having)}; expected a column {' or '.join(wanted)} for the prompt: set "
        "data.prompt_key"
    )


def _listed(columns: list[str]) -> str:
    return ", ".join(columns) or "(none)"
