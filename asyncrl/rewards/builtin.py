"""Rewards that are there by name. Each is an ordinary reward function, bound by its parameters' names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from asyncrl.rewards.code import code_tests

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


def math_verify(completion: str, answer: str) -> float:
    """1.0 if both say the same in mathematics, LaTeX included (``\\frac12`` and 0.5); otherwise 0.0.

    Needs ``asyncrl[math]``. An answer that cannot be read raises ValueError: then the row is at fault.
    """
    from math_verify import parse, verify

    # Its own time limit is an alarm; the worker's covers this one.
    gold = parse(f"${answer}$", parsing_timeout=None) or parse(str(answer), parsing_timeout=None)
    if not gold:
        raise ValueError(f"answer: found {answer!r}, which math-verify cannot read; expected mathematics")
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def format_match(completion: str, pattern: str) -> float:
    """1.0 if the regular expression ``pattern`` (given in args) matches all of the completion.

    A dot matches line breaks too; white space around the completion is ignored.
    """
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def length(completion_ids: Sequence[int], at_most: int, at_least: int = 0) -> float:
    """1.0 for ``at_least`` to ``at_most`` tokens (in args), falling to 0.0 at none and at twice the most."""
    tokens = len(completion_ids)
    if tokens < at_least:
        return tokens / at_least
    return max(0.0, 1.0 - max(0, tokens - at_most) / at_most)


def reasoning_gym(completion: str, row: dict[str, Any]) -> float:
    """What the reasoning-gym family of the row (``metadata.source_dataset``) gives the completion, 0 to 1."""
    from reasoning_gym import get_score_answer_fn

    return float(get_score_answer_fn(row["metadata"]["source_dataset"])(completion.strip(), row))


def _last(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


BUILTIN = {
    function.__name__: function
    for function in (
        exact_match,
        last_number,
        math_verify,
        format_match,
        length,
        reasoning_gym,
        code_tests,
    )
}
