"""reasoning-gym's chain_sum with the working shown: its questions and answers, and a solution beside.

A small model cannot say the result of a chain at once, but it can learn to go through it. A row is
``{"question": "4 + 3 - 9 =", "solution": "4+3=7,7-9=-2#-2", "answer": "-2"}``: a running total from
left to right, then the answer after a mark.
"""

from __future__ import annotations

from typing import Any

MARK = "#"


def rows(count: int = 10_000, seed: int = 0, **args: Any) -> list[dict[str, str]]:
    """``count`` rows of ``reasoning_gym.create_dataset("chain_sum", **args)``; questions can repeat."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **args)
    return [row(entry["metadata"]["expression"], entry["answer"]) for entry in entries]


def row(expression: str, answer: str) -> dict[str, str]:
    """The task of an expression such as ``4 + 3 - 9``, numbers and signs apart."""
    return {"question": f"{expression} =", "solution": solution(expression), "answer": answer}


def solution(expression: str) -> str:
    """The running totals and, after the mark, the last of them."""
    first, *rest = expression.split(" ")
    total, totals = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(number) if sign == "+" else total - int(number)
        totals.append(f"{total}{sign}{number}={after}")
        total = after
    return ",".join(totals) + f"{MARK}{total}"
