"""The HTTP side of the endpoint: an ASGI app over the sessions of one host.

Invariants:
- A call belongs to the session of its address, ``/rollouts/<id>/v1``, or of its ``X-Session-ID``; who does
  not know the id reaches nothing.
- A client that goes away takes its call with it, streamed or not.
- Every answer but a refused one names the policy version, in the header ``X-Policy-Version`` and in the body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from asyncrl.serve.answers import DONE, event
from asyncrl.serve.requests import ChatRequest, CompletionRequest, Refusal, read
from asyncrl.serve.session import MODEL, AgentSession, Call, over
from asyncrl.types import Completion

log = logging.getLogger(__name__)

VERSION_HEADER = "X-Policy-Version"
SESSION_HEADER = "X-Session-ID"
OVERRIDDEN_HEADER = "X-Overridden"
_Body = TypeVar("_Body", ChatRequest, CompletionRequest)
_CLOSED_REQUEST = 499


class Endpoint:
    """The app, over ``sessions`` by id."""

    def __init__(self, sessions: Mapping[str, AgentSession], max_body_bytes: int) -> None:
        self.draining = False
        """Take no more calls: the host is about to end."""
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes
        self._warned: set[str] = set()
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=[Mount("/rollouts/{rollout}", routes=routes), *routes],
            exception_handlers={
                Refusal: _refused,
                HTTPException: _not_served,
                ClientDisconnect: _gone,
            },
        )

    async def _models(self, http: Request) -> Response:
        session = self._session(http)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "asyncrl"}
        version = session.tools.live_version()
        return JSONResponse(
            {"object": "list", "data": [{**model, "policy_version": version}]},
            headers={VERSION_HEADER: str(version)},
        )

    async def _chat(self, http: Request) -> Response:
        return await self._answer(http, ChatRequest)

    async def _completions(self, http: Request) -> Response:
        return await self._answer(http, CompletionRequest)

    async def _answer(self, http: Request, kind: type[_Body]) -> Response:
        session = self._session(http)
        request = read(kind, await self._body(http))
        call = await session.begin(request)
        headers = self._overridden(session, request)
        if request.stream:
            headers[VERSION_HEADER] = str(session.tools.live_version())
            return _EventStream(call, headers)
        try:
            sampling = asyncio.create_task(call.sample())
            if not await _done_before_disconnect(http, sampling):
                raise ClientDisconnect
            completion, said = sampling.result()
        finally:
            call.close()
        body = call.writer.whole(completion, said)
        headers[VERSION_HEADER] = str(body["policy_version"])
        return JSONResponse(body, headers=headers)

    def _session(self, http: Request) -> AgentSession:
        if self.draining:
            raise Refusal(503, "draining", "this host is about to end", retry_after_s=1)
        name = http.path_params.get("rollout") or http.headers.get(SESSION_HEADER)
        session = self._sessions.get(name or "")
        if session is None:
            raise over()
        return session

    async def _body(self, http: Request) -> bytes:
        declared = http.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large(int(declared))
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self._max_body_bytes:
                raise self._too_large(len(body))
        return bytes(body)

    def _too_large(self, found: int) -> Refusal:
        return Refusal(
            413,
            "body_too_large",
            f"found a body of {found} bytes; expected at most environment.serve.max_body_mb = "
            f"{self._max_body_bytes / (1 << 20):g} MiB",
        )

    def _overridden(self, session: AgentSession, request: _Body) -> dict[str, str]:
        """The header that names what the run decides; each is said in the log once."""
        names = session.overridden(request)
        for name in set(names) - self._warned:
            self._warned.add(name)
            log.warning(
                "an agent asks for %s = %s; the run's own is used: what is sampled is trained",
                name,
                getattr(request, name),
            )
        return {OVERRIDDEN_HEADER: ", ".join(names)} if names else {}


class _EventStream(StreamingResponse):
    """A call's answer in pieces; the call is closed whatever becomes of its reader."""

    def __init__(self, call: Call, headers: Mapping[str, str]) -> None:
        self._pieces = _events(call)
        super().__init__(self._pieces, headers=dict(headers), media_type="text/event-stream")
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()
            self._call.close()


async def _events(call: Call) -> AsyncGenerator[bytes, None]:
    pieces: asyncio.Queue[Completion | None] = asyncio.Queue()
    sampling = asyncio.create_task(call.sample(pieces.put_nowait))
    sampling.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        opening = call.writer.opening()
        if opening is not None:
            yield event(opening)
        while (so_far := await pieces.get()) is not None:
            piece = call.writer.piece(so_far)
            if piece is not None:
                yield event(piece)
        try:
            completion, said = sampling.result()
        except Refusal as refusal:
            yield event(refusal.body)
            return
        for piece in call.writer.closing(completion, said):
            yield event(piece)
        yield DONE
    finally:
        sampling.cancel()


async def _done_before_disconnect(http: Request, work: asyncio.Task[object]) -> bool:
    """Whether ``work`` ended while somebody was there to hear of it; if not, it is cancelled."""
    gone = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(gone, work, return_exceptions=True)


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _gone(http: Request, error: Exception) -> Response:
    return Response(status_code=_CLOSED_REQUEST)  # for the log: nobody is there


async def _not_served(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{http.method} {http.url.path}: {error.detail}; expected POST /v1/chat/completions, POST "
    refusal = Refusal(error.status_code, "not_served", f"{text}/v1/completions or GET /v1/models")
    return JSONResponse(refusal.body, refusal.status)
