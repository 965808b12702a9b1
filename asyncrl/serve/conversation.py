"""The rows of one trajectory, as an agent's calls write them.

Invariants:
- Tokens in, tokens out: where a call's history extends that of an answered call, its context is the very
  tokens of that one, and only what is new is rendered. What was sampled is never tokenised again.
- A history that extends none begins a row of its own, and so does one that extends an answer which another
  call has gone on from already: then the tokens up to there are the new row's prompt. No token is sampled
  into two rows, and none is trained twice.
- A call that is not answered leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.base import RolloutResult
from asyncrl.environments.tokens import TurnTokens
from asyncrl.environments.turns import TurnEncoder
from asyncrl.serve.requests import ChatRequest, CompletionRequest, as_message, identity
from asyncrl.types import Completion, FinishReason

History = tuple[str, ...] | str | tuple[int, ...]
"""Of a chat its tools and then each message; of a plain prompt its text or its token ids."""
Encoders = Callable[[Sequence[Mapping[str, Any]]], TurnEncoder]
"""The encoder for conversations with these tools."""


@dataclass(slots=True, eq=False)
class Row:
    """One sequence of tokens, to be trained."""

    prompt_ids: tuple[int, ...]
    tokens: TurnTokens = field(default_factory=TurnTokens)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """What followed the prompt."""
    answered: int = 0
    """Number of the trajectory's call that was answered here last."""


@dataclass(slots=True, eq=False)
class _End:
    """Where an answered call ended: what a later one may go on from."""

    row: Row
    length: int
    """Tokens of the row's answer up to there."""
    history: History
    taken: bool = False
    """Whether a call goes on from here in the same row."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What one call's answer is sampled behind."""

    ids: tuple[int, ...]
    history: History
    heard: tuple[Mapping[str, Any], ...]
    """Messages that are new in it."""
    end: _End | None
    """What it goes on from in the same row; None: it begins one."""
    observed: tuple[int, ...] = ()
    """Tokens behind that row's so far."""

    @property
    def used(self) -> int:
        """Tokens of the row's answer that are there before this call's."""
        return 0 if self.end is None else self.end.length + len(self.observed)


class Conversation:
    """All calls of one trajectory. ``context`` blocks for as long as rendering takes, and may run in a
    thread; the other methods are the loop's."""

    def __init__(self, encoders: Encoders) -> None:
        self._encoders = encoders
        self._ends: list[_End] = []
        self._answered = 0
        self.rows: list[Row] = []

    def take(self, request: ChatRequest | CompletionRequest) -> Planned:
        """Find what a call goes on from, and keep others off it until ``answered`` or ``dropped``."""
        history, messages = _history(request)
        found = max(
            (end for end in reversed(self._ends) if _extends(history, end.history)),
            key=lambda end: (len(end.history), not end.taken),
            default=None,
        )
        goes_on = found is not None and not found.taken
        if found is not None and goes_on:
            found.taken = True
        return Planned(request, history, messages, found, goes_on)

    def context(self, planned: Planned) -> Context:
        """Render what is new in a call."""
        end, history = planned.end, planned.history
        if isinstance(planned.request, ChatRequest):
            encoder = self._encoders(planned.request.offered)
            if end is None:
                return Context(tuple(encoder.opening(planned.messages)), history, (), None)
            heard = planned.messages[len(end.history) - 1 :]  # the tools stand first there
            last = end.row.tokens.ids[end.length - 1] if end.length else None
            new = encoder.between(last, heard)
        else:
            encoder = self._encoders(())
            rest = history if end is None else history[len(end.history) :]
            heard, new = (), [int(i) for i in rest] if not isinstance(rest, str) else []
            if isinstance(rest, str):
                heard = ({"role": "user", "content": rest},)
                new = encoder.plain(rest, begins=end is None)
            if end is None:
                return Context(tuple(new), history, (), None)
        before = (*end.row.prompt_ids, *end.row.tokens.ids[: end.length])
        if not planned.goes_on:
            return Context((*before, *new), history, (), None)
        return Context((*before, *new), history, heard, end, tuple(new))

    def answered(self, context: Context, completion: Completion, said: Mapping[str, Any] | str) -> None:
        """Keep a call's answer; ``said`` is what the client was given of it."""
        if context.end is None:
            row = Row(context.ids)
            self.rows.append(row)
        else:
            row = context.end.row
            row.tokens.observed(context.observed)
        row.tokens.sampled(completion)
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        row.messages += [*context.heard, message]
        self._answered += 1
        row.answered = self._answered
        self._ends.append(_End(row, len(row.tokens.ids), _said(context, completion, said)))

    def dropped(self, planned: Planned) -> None:
        """A call was not answered: another may go on from where it was to."""
        if planned.end is not None and planned.goes_on:
            planned.end.taken = False

    def result(self, finish: FinishReason, rewards: Mapping[str, float]) -> RolloutResult | None:
        """The row that was answered last, the others beside it; None where no call was answered."""
        if not self.rows:
            return None
        last = max(self.rows, key=lambda row: row.answered)
        earlier = [
            row.tokens.result(row.prompt_ids, finish, row.messages) for row in self.rows if row is not last
        ]
        return last.tokens.result(last.prompt_ids, finish, last.messages, rewards, earlier)


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A call, and what it goes on from."""

    request: ChatRequest | CompletionRequest
    history: History
    messages: tuple[Mapping[str, Any], ...]
    end: _End | None
    goes_on: bool
    """In the row of ``end``; else ``end`` is where a row of its own branches off."""


def _history(request: ChatRequest | CompletionRequest) -> tuple[History, tuple[Mapping[str, Any], ...]]:
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        return (prompt if isinstance(prompt, str) else tuple(prompt)), ()
    messages = tuple(as_message(message) for message in request.messages)
    tools = identity({"tools": request.offered})
    return (tools, *(identity(message) for message in messages)), messages


def _said(context: Context, completion: Completion, said: Mapping[str, Any] | str) -> History:
    """The history that a call goes on from which has seen this answer."""
    history = context.history
    if isinstance(history, str):
        assert isinstance(said, str)
        return history + said
    if isinstance(said, str):
        return (*history, *completion.token_ids.tolist())
    return (*history, identity(as_message(said)))


def _extends(history: History, earlier: History) -> bool:
    """Whether ``history`` goes on from ``earlier``, with something new behind it."""
    return (
        type(history) is type(earlier) and len(history) > len(earlier) and history[: len(earlier)] == earlier
    )
