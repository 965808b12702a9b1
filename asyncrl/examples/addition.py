"""Two-number addition, worked out column by column before the answer.

A row is ``{"question": "347+85=", "solution": "7+5=12,4+8+1=13,3+1=4#432", "answer": "432"}``: the
solution adds the columns from right to left, carries the one, and gives the sum after a mark. The
warm start shows solutions; the reward looks at nothing but the number after the mark.
"""

from __future__ import annotations

import random

MARK = "#"


def rows(digits: int = 3, count: int = 10_000, seed: int = 0) -> list[dict[str, str]]:
    """``count`` distinct questions whose numbers have two to ``digits`` digits, drawn from ``seed``.

    Raises ValueError for ``digits`` below 2, or a ``count`` of more than half of all questions.
    """
    if digits < 2:
        raise ValueError(f"digits is {digits}; expected at least 2")
    numbers = 10**digits - 10
    if not 0 < count <= numbers**2 // 2:
        raise ValueError(f"count is {count}; expected 1 to {numbers**2 // 2} for digits={digits}")
    rng = random.Random(seed)
    seen: dict[tuple[int, int], None] = {}
    while len(seen) < count:
        seen[_number(rng, digits), _number(rng, digits)] = None
    return [{"question": f"{a}+{b}=", "solution": solution(a, b), "answer": str(a + b)} for a, b in seen]


def solution(a: int, b: int) -> str:
    """The columns from right to left, each with its carry, then the mark and the sum."""
    columns = []
    carry, x, y = 0, a, b
    while x or y:
        terms = [x % 10, y % 10] if x and y else [max(x, y) % 10]
        terms += [carry] if carry else []
        total = sum(terms)
        columns.append("+".join(map(str, terms)) + f"={total}")
        carry, x, y = total // 10, x // 10, y // 10
    return ",".join(columns) + f"{MARK}{a + b}"


def reward(completion: str, answer: str) -> float:
    """1.0 if the text after the last mark is the answer and nothing else, otherwise 0.0."""
    _, mark, final = completion.rpartition(MARK)
    return float(bool(mark) and final == answer)


def _number(rng: random.Random, digits: int) -> int:
    length = rng.randint(2, digits)
    return rng.randrange(10 ** (length - 1), 10**length)
