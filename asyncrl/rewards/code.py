"""``code_tests``: a program that the model wrote, scored by the tests of its row.

Invariant: the program and its tests run in ``sandbox`` alone. Whatever it does there, endless loops, crashes
and attempts at the machine included, is a test that did not pass: 0.0 is its score, no failure of the reward.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.rewards.sandbox import Limits, run

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_tests(
    completion: str,
    ground_truth: Any,
    time_s: float = 5.0,
    memory_mb: int = 512,
    file_mb: int = 16,
) -> float:
    """Share of the row's tests that the program in the completion passes, 0.0 to 1.0.

    The program is the last fenced block of the completion, or all of it. ``ground_truth`` is Python code
    that raises unless the program is right, a list of such, or ``{"inputs": [...], "outputs": [...]}`` of
    what it reads and writes; as JSON text too. The limits are those of one test.
    Raises ValueError for a ``ground_truth`` of another kind.
    """
    program = extracted(completion)
    limits = Limits(time_s=time_s, memory_mb=memory_mb, file_mb=file_mb)
    tests = _tests(ground_truth)
    if isinstance(tests, list):
        return sum(_holds(program, test, limits) for test in tests) / len(tests)
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    return sum(_prints(program, given, wanted, limits) for given, wanted in pairs) / len(pairs)


def extracted(completion: str) -> str:
    """The last fenced block, or the whole text where there is none."""
    blocks = _FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def _tests(truth: Any) -> list[str] | Mapping[str, Sequence[str]]:
    if isinstance(truth, str):
        try:
            read = json.loads(truth)
        except ValueError:
            read = truth
        truth = read if isinstance(read, (list, dict)) else truth
    if isinstance(truth, str) and truth.strip():
        return [truth]
    if isinstance(truth, (list, tuple)) and truth and all(isinstance(test, str) for test in truth):
        return list(truth)
    if (
        isinstance(truth, Mapping)
        and truth.get("inputs")
        and len(truth["inputs"]) == len(truth.get("outputs", ()))
    ):
        return truth
    raise ValueError(
        f"ground_truth: found {type(truth).__name__} {str(truth)[:80]!r}; expected test code, a list of "
        "it, or inputs and outputs of equal number, at least 1"
    )


def _holds(program: str, test: str, limits: Limits) -> bool:
    # A program that ends itself before the test would pass it; the word shows that the end was reached.
    word = secrets.token_hex(16)
    outcome = run(f"{program}\n\n{test}\n\nprint({word!r})\n", limits=limits)
    return outcome.ok and outcome.stdout.rstrip().endswith(word)


def _prints(program: str, given: str, wanted: str, limits: Limits) -> bool:
    outcome = run(program, str(given), limits)
    return outcome.ok and _lines(outcome.stdout) == _lines(str(wanted))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
