"""A rollout that an agent plays: the user's own loop, over calls to the policy by HTTP.

Invariants:
- What its calls sampled is the trajectory, token by token (``serve/conversation.py``); the reward is what the
  agent returns, beside the reward functions.
- An agent that fails, dies, hangs or makes no call is an EnvironmentFaultError of its trajectory alone. One
  that fails after a budget refused a call has ended there, ``length``, with what it has.
- While the engine sleeps the agent's time stands still.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from asyncrl.config import ENVIRONMENT, EnvironmentSection
from asyncrl.environments.base import ModelClient, RolloutResult
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.protocol import Step
from asyncrl.errors import EnvironmentRaisedError, EnvironmentTimeoutError, EnvironmentValueError
from asyncrl.serve.server import AgentServer, Served
from asyncrl.types import Task
from asyncrl.waiting import Deadlines

log = logging.getLogger(__name__)


class AgentRollout:
    """The ``Rollout`` of an agent. ``deadlines``: those of the host, which stand still while it sleeps."""

    def __init__(
        self, pool: EnvironmentPool, section: EnvironmentSection, server: AgentServer, deadlines: Deadlines
    ) -> None:
        self._pool = pool
        self._section = section
        self._server = server
        self._deadlines = deadlines

    async def __call__(self, task: Task, client: ModelClient) -> RolloutResult:
        """Have the agent play one trajectory. Raises EnvironmentFaultError for what it does wrong."""
        async with self._pool.session(task.uid) as session:
            await session.reset(task.row, ())
            with self._server.open(task.uid, client) as served:
                work = asyncio.create_task(session.play(served.base_url), name=f"agent of {task.uid}")
                try:
                    reward = await self._ended(work, served, task.uid)
                finally:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                result = served.session.result({} if reward is None else {ENVIRONMENT: reward})
        if result is None:
            raise EnvironmentValueError(
                f"{task.uid}: the agent {self._section.name!r} ended without an answered call; expected at "
                "least 1 to the base_url that it is given"
            )
        return result

    async def _ended(self, work: asyncio.Task[Step], served: Served, uid: str) -> float | None:
        """Its reward, once it has ended within its time."""
        section, session = self._section, served.session
        ends: set[asyncio.Future[object]] = {work, session.broken}  # type: ignore[arg-type]
        with suppress(TimeoutError):
            async with self._deadlines.timeout(section.max_time_s):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not session.broken.done():
            session.end_time("environment.max_time_s")
            try:
                async with self._deadlines.timeout(section.timeout_s):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            except TimeoutError:
                raise EnvironmentTimeoutError(
                    f"{uid}: the agent {section.name!r} had not ended after environment.max_time_s = "
                    f"{section.max_time_s:g} s and environment.timeout_s = {section.timeout_s:g} s more"
                ) from None
        if session.broken.done():
            session.broken.result()
        try:
            return work.result().reward
        except EnvironmentRaisedError as error:
            if session.exhausted is None:
                raise
            log.debug("%s: its agent failed after %s was used up: %s", uid, session.exhausted, error)
            return None
