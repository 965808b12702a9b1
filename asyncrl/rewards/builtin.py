"""Rewards that are there by name: ``exact_match`` and ``last_number``."""

from __future__ import annotations

import re
from decimal import Decimal

# A sign counts only where no operand stands before it: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(r"(?<![\w.)\]])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\d+(?:\.\d+)?")


def exact_match(completion: str, answer: str) -> float:
    """1.0 if the completion is the answer, white space around both aside; otherwise 0.0."""
    return float(completion.strip() == str(answer).strip())


def last_number(completion: str, answer: str) -> float:
    """1.0 if the last number of the completion equals the last one of the answer, otherwise 0.0.

    Numbers are compared by value (``1,000.0`` is ``1000``). A completion with no number earns 0.0;
    an answer with none raises ValueError, because then the row is at fault.
    """
    expected = _last(str(answer))
    if expected is None:
        raise ValueError(f"answer: found {answer!r}, in which there is no number; expected one")
    return float(_last(completion) == expected)


def _last(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


BUILTIN = {"exact_match": exact_match, "last_number": last_number}
