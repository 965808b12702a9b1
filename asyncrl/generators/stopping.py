"""Strings that end an answer, found in the text of its last tokens.

Invariants:
- The text is the tokenizer's, special tokens included; the stop string stays in the answer.
- Only the last ``window`` tokens are decoded: earlier ones were looked at before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARGIN = 4
"""Tokens beyond one a byte: a tokenizer may alter the text of a window's first token, and a
character of several tokens may be cut there."""


class StopStrings:
    """The stop strings of one request. ``tokenizer`` is a Hugging Face one: it has ``decode``."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self.window = max(len(string.encode()) for string in strings) + MARGIN
        """Tokens to decode: every token but a special one has at least one byte."""

    def found_in(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of ``token_ids`` holds one of the strings."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return any(string in text for string in self._strings)

    def end_across(self, token_ids: Sequence[int], seam: int) -> int | None:
        """Tokens up to the end of the first stop string that begins before ``seam`` and ends after it.

        None where there is no such. The caller knows that no string lies in the first ``seam`` tokens, and
        that the answer ends with one that lies wholly behind them.
        """
        ends = range(seam + 1, min(seam + self.window, len(token_ids)) + 1)
        return next((end for end in ends if self.found_in(token_ids[max(0, end - self.window) : end])), None)
