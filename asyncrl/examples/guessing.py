"""A guessing game over several turns: the reward comes at the end, and a step may take its time.

A row is ``{"question": "12-31:", "secret": 22, "solution": "20?>25?<22?"}``. The model guesses, ``20?``; the
game answers ``>`` (the secret is greater), ``<``, or ``!`` to what is no number. A game that is won early is
worth more, so that halving what is left is the best there is. The warm start shows games of guesses that
could be right, which are not halves.

With ``delay_s`` each answer takes a while, as that of a browser or a database does: a workload in which
overlap pays, since a generator has nothing to do while it waits.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

_GUESS = re.compile(r"(\d{1,3})\?")
_LOWEST, _HIGHEST = 10, 99


def rows(span: int = 20, count: int = 2_000, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` games over ``span`` numbers of two digits, drawn from ``seed``; ranges come again.

    Raises ValueError for a ``span`` that is not 2 to 80, or a ``count`` below 1.
    """
    if not 2 <= span <= 80 or count < 1:
        raise ValueError(
            f"found span={span}, count={count}; expected a span of 2 to 80, a count of at least 1"
        )
    rng = random.Random(seed)
    games = []
    for _ in range(count):
        low = rng.randint(_LOWEST, _HIGHEST - span + 1)
        high = low + span - 1
        secret = rng.randint(low, high)
        games.append(
            {"question": f"{low}-{high}:", "secret": secret, "solution": _game(rng, low, high, secret)}
        )
    return games


def _game(rng: random.Random, low: int, high: int, secret: int) -> str:
    """A game as it is written down, won by guesses that fit all that was answered."""
    text = ""
    while True:
        guess = rng.randint(low, high)
        text += f"{guess}?"
        if guess == secret:
            return text
        text += hint(guess, secret)
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)


def hint(guess: int, secret: int) -> str:
    """``>`` if the secret is greater than the guess, ``<`` if it is less."""
    return ">" if secret > guess else "<"


class GuessingGame:
    """Answers guesses until one is right. ``tries``: guesses after which nothing is won any more.

    ``delay_s``: shortest and longest time that an answer takes, in seconds. Raises ValueError for one that
    is not 0 or more, in this order.
    """

    def __init__(self, tries: int = 6, delay_s: Sequence[float] | None = None) -> None:
        if delay_s is not None and not (len(delay_s) == 2 and 0 <= delay_s[0] <= delay_s[1]):
            raise ValueError(f"delay_s: found {delay_s}; expected [shortest, longest] of 0 or more")
        self._tries = tries
        self._delay_s = delay_s
        self._guesses = 0
        self._found = False

    def reset(self, task: Mapping[str, Any]) -> None:
        self._secret = int(task["secret"])

    async def step(self, message: Mapping[str, str]) -> str | dict[str, Any]:
        if self._delay_s is not None:
            # Not from the run's seed: when an answer comes changes no answer.
            await asyncio.sleep(random.uniform(*self._delay_s))
        self._guesses += 1
        match = _GUESS.fullmatch(message["content"])
        self._found = match is not None and int(match[1]) == self._secret
        if self._found or self._guesses == self._tries:
            return {"done": True}
        return "!" if match is None else hint(int(match[1]), self._secret)

    def finish(self, reason: str) -> dict[str, Any]:
        """1.0 for the first guess, less for each further one, and 0.0 for a secret that was not found."""
        reward = 1.0 - (self._guesses - 1) / self._tries if self._found else 0.0
        return {"reward": reward, "metrics": {"guesses": self._guesses, "found": self._found}}
