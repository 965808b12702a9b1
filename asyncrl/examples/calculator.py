"""Multiplication with a calculator at hand, over two turns: the smallest environment with a tool.

A row is ``{"question": "37*48=", "solution": "[37*48]=1776#1776", "answer": "1776"}``. In its first turn the
model writes the call, ``[37*48]``; the environment answers ``=1776#``; in the second it says the result. The
warm start shows both turns in one text, so that the model knows the form, and not yet how to fill it in.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

_CALL = re.compile(r"\[(\d{1,6})([*+-])(\d{1,6})\]")


def rows(digits: int = 2, count: int = 2_000, seed: int = 0) -> list[dict[str, str]]:
    """``count`` distinct products of two numbers of ``digits`` digits, drawn from ``seed``.

    Raises ValueError for a ``count`` of more than half of all there are.
    """
    low, high = 10 ** (digits - 1), 10**digits - 1
    most = (high - low + 1) ** 2 // 2
    if digits < 1 or not 0 < count <= most:
        raise ValueError(
            f"found digits={digits}, count={count}; expected digits of at least 1, count 1 to {most}"
        )
    rng = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        pairs[rng.randint(low, high), rng.randint(low, high)] = None
    return [
        {"question": f"{a}*{b}=", "solution": f"[{a}*{b}]={a * b}#{a * b}", "answer": str(a * b)}
        for a, b in pairs
    ]


def calculate(call: str) -> int | None:
    """The result of ``[12*34]`` at the end of a text; None where no call stands there."""
    match = _CALL.search(call)
    if match is None or match.end() != len(call):
        return None
    a, sign, b = int(match[1]), match[2], int(match[3])
    return {"*": a * b, "+": a + b, "-": a - b}[sign]


class Calculator:
    """Answers a call with its result; any other message is the answer. Reward 1.0 for the row's."""

    def reset(self, task: Mapping[str, Any]) -> None:
        self._answer = str(task["answer"])

    def step(self, message: Mapping[str, str]) -> dict[str, Any]:
        result = calculate(message["content"])
        if result is not None:
            # Nothing is won yet; max_turns may end it here, and a trajectory without a reward is a failure.
            return {"done": False, "observation": f"={result}#", "reward": 0.0}
        return {"done": True, "reward": float(message["content"] == self._answer)}
