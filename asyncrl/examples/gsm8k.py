"""Grade-school word problems with a worked answer whose result stands after a mark: GSM8K's form.

A row is ``{"question": ..., "answer": "... <<3*4=12>>12 eggs.\\n#### 12"}``, as the data set comes.
Training Verifiers to Solve Math Word Problems, Cobbe et al., 2021.
"""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"
# What may stand around the number: currency, percent, bold, a full stop.
_RESULT = re.compile(r"\s*[*$€£]*\s*([-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*[%*.]*")


def result(text: str) -> Decimal | None:
    """The number after the last mark, by value; None if no mark has one directly behind it."""
    _, mark, tail = text.rpartition(MARK)
    found = _RESULT.match(tail) if mark else None
    return Decimal(found[1].replace(",", "").replace("−", "-")) if found else None


def reward(completion: str, answer: str) -> float:
    """1.0 if the completion gives the row's result after its last ``####``, otherwise 0.0.

    Raises ValueError for an ``answer`` without a result: then the row is at fault.
    """
    expected = result(answer)
    if expected is None:
        raise ValueError(f"answer: found {answer[-60:]!r} at its end; expected {MARK} and a number")
    return float(result(completion) == expected)
