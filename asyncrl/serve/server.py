"""The endpoint of one rollout host: a uvicorn server on the host's own loop, and the sessions of its
rollouts.

It lives where the engine does, so that an agent's traffic never passes through the controller.

Invariants:
- An id is made for each session and cannot be guessed.
- After ``close`` nobody listens, and no session is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import uvicorn

from asyncrl.environments.base import ModelClient
from asyncrl.errors import ConfigError
from asyncrl.sections.rewards import EnvironmentSection
from asyncrl.serve.app import Endpoint
from asyncrl.serve.conversation import Encoders
from asyncrl.serve.session import AgentSession, Budgets, Tools

_CLOSE_S = 2
"""Seconds that answers have to reach their clients at the end."""


class _Server(uvicorn.Server):
    """Leaves the process's signals to their owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class Served:
    """A session, and where its agent reaches it."""

    session: AgentSession
    base_url: str


class AgentServer:
    """Await ``start``; ``open`` a session for each trajectory; ``close`` at the end."""

    def __init__(
        self,
        section: EnvironmentSection,
        encoders: Encoders,
        decode: Callable[[Sequence[int]], str],
        live_version: Callable[[], int],
        max_prompt_tokens: int,
    ) -> None:
        self._section = section.serve
        self._budgets = Budgets(
            section.max_turns, section.serve.max_parallel, section.max_turn_tokens, max_prompt_tokens
        )
        self._renderer = ThreadPoolExecutor(1, "render")
        self._tools = Tools(encoders, decode, self._renderer, live_version)
        self._sessions: dict[str, AgentSession] = {}
        self._endpoint = Endpoint(self._sessions, int(section.serve.max_body_mb * (1 << 20)))
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        """Host and port, once it has started."""

    async def start(self) -> None:
        """Listen. Raises ConfigError where the address cannot be had."""
        section = self._section
        try:
            family, _, _, _, where = socket.getaddrinfo(
                section.host, section.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(where[:2], family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(
                f"environment.serve: cannot listen on {section.host}, port {section.port}: {error}; expected "
                "an address of this machine and a port that is free (0: any)"
            ) from error
        host = section.address or section.host
        self.address = f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                self._endpoint.app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_CLOSE_S,
                timeout_keep_alive=60,
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listener]), name="agent endpoint")

    @contextlib.contextmanager
    def open(self, uid: str, client: ModelClient) -> Iterator[Served]:
        """A session for one trajectory, whose calls ``client`` answers."""
        name = secrets.token_urlsafe(16)
        session = self._sessions[name] = AgentSession(uid, client, self._budgets, self._tools)
        try:
            yield Served(session, f"http://{self.address}/rollouts/{name}/v1")
        finally:
            del self._sessions[name]
            session.close()

    def drain(self) -> None:
        """Refuse calls from now on; those that run are answered."""
        self._endpoint.draining = True

    async def close(self) -> None:
        """End everything; answers that are ready still go out."""
        self.drain()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._renderer.shutdown(wait=False, cancel_futures=True)
