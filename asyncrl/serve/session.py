"""One trajectory as the server knows it: its calls, its budgets, and what became of them.

Invariants:
- A call that was taken in is answered or closed, and a closed one holds no slot of the engine.
- A budget that is used up refuses calls and breaks none off; from then on the trajectory ends ``length``.
- What is not the client's fault (a dead engine, a bug) is told to it as 5xx, and raised in the rollout.
- After ``close`` nothing runs for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from jinja2 import TemplateError

from asyncrl.environments.base import Heard, ModelClient, RolloutResult
from asyncrl.errors import GeneratorError, RolloutError
from asyncrl.serve.answers import AnswerWriter, Decode, Said
from asyncrl.serve.conversation import Context, Conversation, Encoders, Planned
from asyncrl.serve.requests import ChatRequest, CompletionRequest, Refusal
from asyncrl.types import Completion, SamplingParams

MODEL = "policy"
"""The one model that there is."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """What one trajectory may have."""

    max_calls: int
    max_parallel: int
    """Calls at once."""
    max_call_tokens: int | None
    """Of one answer; None: what is left."""
    max_prompt_tokens: int
    """Of one row, with all that it may have behind its prompt, it has to fit an engine's sequence."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What every session of a server shares."""

    encoders: Encoders
    decode: Decode
    renderer: Executor
    """One thread: templates and tokenizers are no work for the loop."""
    live_version: Callable[[], int]


class AgentSession:
    """One trajectory; ``client`` is its way to the engine."""

    def __init__(self, uid: str, client: ModelClient, budgets: Budgets, tools: Tools) -> None:
        self.uid = uid
        self.tools = tools
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with what broke a call that the client is not to blame for."""
        self.exhausted: str | None = None
        """Which budget refused a call."""
        self._client = client
        self._budgets = budgets
        self._conversation = Conversation(tools.encoders)
        self._calls: set[Call] = set()
        self._begun = 0
        self._over = False
        self._out_of_time: str | None = None

    async def begin(self, request: ChatRequest | CompletionRequest) -> Call:
        """Take a call in; ``close`` it at its end. Raises Refusal."""
        self._admit()
        call = Call(self, request, self._conversation.take(request))
        self._calls.add(call)
        self._begun += 1
        try:
            loop = asyncio.get_running_loop()
            context = await loop.run_in_executor(
                self.tools.renderer, self._conversation.context, call.planned
            )
            call.prepare(context, self._limits(request, context))
        except TemplateError as error:
            call.close()
            text = f"messages: the chat template cannot show them: {error}"
            raise Refusal(400, "invalid_value", text, param="messages") from None
        except Refusal:
            call.close()
            raise
        except Exception as error:
            call.close()
            raise self.failed(error) from error
        except asyncio.CancelledError:
            call.close()
            raise
        return call

    def end_time(self, limit: str) -> None:
        """Refuse calls from now on: ``limit`` is over."""
        self._out_of_time = limit

    def result(self, rewards: Mapping[str, float]) -> RolloutResult | None:
        """What its answered calls make; None where there is none."""
        return self._conversation.result("length" if self.exhausted else "stop", rewards)

    def close(self) -> None:
        """The trajectory is over: calls that run are broken off, later ones refused."""
        self._over = True
        for call in list(self._calls):
            call.close()
        if not self.broken.done():
            self.broken.cancel()
        elif not self.broken.cancelled():
            self.broken.exception()  # it was heard of, or nobody waits any more

    def failed(self, error: BaseException) -> Refusal:
        """What the client is told of an error, which is the run's too unless the request is to blame."""
        if isinstance(error, RolloutError):
            return Refusal(400, "invalid_value", str(error))
        if not self.broken.done():
            self.broken.set_exception(error)
        if isinstance(error, GeneratorError):
            return Refusal(503, "engine_lost", f"the engine is gone: {error}", retry_after_s=1)
        return Refusal(500, "internal_error", f"{type(error).__name__}: {error}")

    # What calls use.

    async def sample(self, context: Context, sampling: SamplingParams, heard: Heard | None) -> Completion:
        if heard is None:
            return await self._client.complete(context.ids, sampling)
        return await self._client.complete(context.ids, sampling, heard)

    def writer(self, request: ChatRequest | CompletionRequest, context: Context) -> AnswerWriter:
        stops = self._client.sampling.stop
        return AnswerWriter(request, context.ids, MODEL, self.tools.decode, stops)

    def overridden(self, request: ChatRequest | CompletionRequest) -> list[str]:
        return request.overridden(self._client.sampling)

    def answered(self, call: Call, context: Context, completion: Completion, said: Said) -> None:
        chat = isinstance(call.request, ChatRequest)
        self._conversation.answered(context, completion, said.message() if chat else said.text)

    def closed(self, call: Call, *, answered: bool) -> None:
        self._calls.discard(call)
        if not answered:
            self._conversation.dropped(call.planned)

    def _admit(self) -> None:
        budgets = self._budgets
        if self._over:
            raise over()
        if self._out_of_time is not None:
            raise self._exhaust(self._out_of_time, "time_exhausted", "the time of this rollout is up")
        if self._begun >= budgets.max_calls:
            raise self._exhaust(
                "environment.max_turns",
                "turns_exhausted",
                f"found call {self._begun + 1} of this rollout; expected at most "
                f"environment.max_turns = {budgets.max_calls}",
            )
        if len(self._calls) >= budgets.max_parallel:
            raise Refusal(
                429,
                "too_many_calls",
                f"found {len(self._calls) + 1} calls of this rollout at once; expected at most "
                f"environment.serve.max_parallel = {budgets.max_parallel}",
                retry_after_s=1,
            )

    def _limits(self, request: ChatRequest | CompletionRequest, context: Context) -> SamplingParams:
        """How to sample an answer behind ``context``. Raises Refusal where no token of it would fit."""
        whole = self._client.sampling
        most = self._budgets.max_prompt_tokens + whole.max_new_tokens
        room = min(whole.max_new_tokens - context.used, most - len(context.ids))
        if room < 1:
            raise self._exhaust(
                "rollout.max_new_tokens",
                "context_length_exceeded",
                f"found a context of {len(context.ids)} tokens, {context.used} of them behind the prompt; "
                f"expected fewer than {most} (data.max_prompt_tokens + rollout.max_new_tokens), and fewer "
                f"than {whole.max_new_tokens} of them behind the prompt",
            )
        asked = [room, self._budgets.max_call_tokens, request.limit]
        stop = tuple(dict.fromkeys((*whole.stop, *request.stop)))
        return replace(whole, max_new_tokens=min(n for n in asked if n is not None), stop=stop)

    def _exhaust(self, limit: str, code: str, message: str) -> Refusal:
        self.exhausted = self.exhausted or limit
        return Refusal(400, code, message)


class Call:
    """One request of a client, from its admission to its answer."""

    def __init__(
        self, session: AgentSession, request: ChatRequest | CompletionRequest, planned: Planned
    ) -> None:
        self.session = session
        self.request = request
        self.planned = planned
        self.writer: AnswerWriter
        self._context: Context
        self._sampling: SamplingParams
        self._task: asyncio.Task[Completion] | None = None
        self._answered = False
        self._closed = False

    def prepare(self, context: Context, sampling: SamplingParams) -> None:
        """It is known what it is sampled behind, and how."""
        self._context, self._sampling = context, sampling
        self.writer = self.session.writer(self.request, context)

    async def sample(self, heard: Heard | None = None) -> tuple[Completion, Said]:
        """Its answer, which is the trajectory's from here on. Raises Refusal."""
        if self._closed:
            raise over()
        work = self.session.sample(self._context, self._sampling, heard)
        self._task = asyncio.create_task(work, name=f"{self.session.uid}: a call of its agent")
        await asyncio.wait({self._task})
        if self._task.cancelled() or self._closed:
            raise over()
        error = self._task.exception()
        if error is not None:
            raise self.session.failed(error) from error
        completion = self._task.result()
        if completion.finish_reason == "abort":
            raise Refusal(503, "aborted", "the answer was broken off", retry_after_s=1)
        said = self.writer.said(completion)
        self.session.answered(self, self._context, completion, said)
        self._answered = True
        return completion, said

    def close(self) -> None:
        """Give back what it holds; no effect a second time."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self.session.closed(self, answered=self._answered)


def over() -> Refusal:
    """What a call of a rollout is told that has ended, or never was."""
    return Refusal(
        404,
        "no_such_rollout",
        "found no rollout of this address; expected the base_url that the agent was given, while its rollout "
        "runs (or /v1 with its id as X-Session-ID)",
    )
