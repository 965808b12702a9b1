"""What running answers have so far, for those who want to hear of it before they end.

Invariants:
- The engine is asked for all of them at once, ``every_s`` apart, and not at all while nobody listens: a call
  back out of the decode loop for each token would cost every rollout, and this costs those alone that are
  listened to.
- Nobody is told anything after he stopped listening.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.environments.base import Heard
from asyncrl.errors import InfrastructureError
from asyncrl.generators.base import Generator


class Listening:
    """Listeners to the requests of one engine."""

    def __init__(self, engine: Generator, every_s: float = 0.1) -> None:
        self._engine = engine
        self._every_s = every_s
        self._heard: dict[str, Heard] = {}
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def to(self, uid: str, heard: Heard | None) -> Iterator[None]:
        """Have ``heard`` told what the request ``uid`` has so far; None: nobody wants to know."""
        if heard is None:
            yield
            return
        self._heard[uid] = heard
        if self._asking is None or self._asking.done():  # done: an engine that was gone for a while
            self._asking = asyncio.create_task(self._ask(), name="listening to running answers")
        try:
            yield
        finally:
            del self._heard[uid]
            if not self._heard and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                partials = await self._engine.partials()
            except InfrastructureError:
                return  # whoever waits for an answer hears of it there
            for uid, heard in list(self._heard.items()):
                if uid in partials:
                    heard(partials[uid])
