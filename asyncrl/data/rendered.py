"""The rows of one or several sources as one list, each rendered by the form of its own source.

Invariant: row i is the same row, text and tokens in every run with the same data block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.config import DataSection, SourceSection
from asyncrl.data.forms import Form, recognise
from asyncrl.data.sources import Row, Rows, open_source, parts
from asyncrl.data.templates import PromptTemplate
from asyncrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Part:
    """One source: its key in the config, its rows, their form, and how they are rendered."""

    key: str
    rows: Rows
    form: Form
    template: PromptTemplate


class RenderedRows:
    """The rows of ``parts``, one part after the other; index i runs over all of them."""

    def __init__(self, parts: Sequence[Part], key: str) -> None:
        self.parts = tuple(parts)
        self.key = key
        """The key of the config that they come from."""
        self._ends = np.cumsum([len(part.rows) for part in parts])
        self.starts = (0, *(int(end) for end in self._ends[:-1]))
        """The index of each part's first row."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int) -> Row:
        """All columns, and what the form adds."""
        part, inner = self._find(index)
        return part.form.complete(part.rows[inner])

    def text(self, index: int) -> str:
        """The whole prompt."""
        part, inner = self._find(index)
        return part.template.text(part.rows[inner], part.rows.where(inner))

    def where(self, index: int) -> str:
        part, inner = self._find(index)
        return part.rows.where(inner)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts: no matter of which part they are."""
        return self.parts[0].template.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self.parts[0].template.decode(ids)

    def recognised(self) -> Iterator[str]:
        """What each part was taken for, a line each."""
        for part in self.parts:
            yield f"{part.key}: {len(part.rows)} {part.form}"

    def _find(self, index: int) -> tuple[Part, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - self.starts[number]


def open_rendered(
    data: DataSection,
    source: SourceSection,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tools: Sequence[Mapping[str, Any]] = (),
) -> RenderedRows:
    """Open every part of ``source`` and recognise it; ``tools`` are for the chat template to describe.

    Raises DataError and ConfigError.
    """
    opened = []
    for name, section in parts(source, key):
        rows = open_source(section, folder)
        try:
            form = recognise(data, rows[0])
            opened.append(Part(name, rows, form, PromptTemplate(data, tokenizer, form.prompt_key, tools)))
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    return RenderedRows(opened, key)
