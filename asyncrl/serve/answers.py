"""What a client is given: bodies and pieces of streams, from tokens.

Invariants:
- The text of a stream's pieces, put together, is the text of the answer at one go, and so is what calls it
  has.
- Calls are read out of an answer only where tools were offered, as the built-in tools environment reads them;
  one that cannot be read stays text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from asyncrl.environments.tools import CALL, read_call
from asyncrl.serve.requests import ChatRequest, CompletionRequest
from asyncrl.types import Completion

Decode = Callable[[Sequence[int]], str]
_CALL_BEGINS = "<tool_call>"
_BROKEN = "\ufffd"
"""How the first bytes of a character are decoded that is not whole yet."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as its client sees it."""

    text: str
    calls: tuple[dict[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": list(self.calls)}
        return message


class AnswerWriter:
    """Writes the answer to one request, whole or in pieces."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        prompt_ids: Sequence[int],
        model: str,
        decode: Decode,
        own_stops: Sequence[str],
    ) -> None:
        """``own_stops``: those of the run, which are part of an answer; the request's are cut off."""
        self._request = request
        self._prompt_ids = list(prompt_ids)
        self._decode = decode
        self._stops = [stop for stop in request.stop if stop not in own_stops]
        self._chat = isinstance(request, ChatRequest)
        self._tools = isinstance(request, ChatRequest) and bool(request.offered)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._sent_text = ""
        self._sent_tokens = 0

    def said(self, completion: Completion) -> Said:
        """The whole answer."""
        return _said(self._decode(completion.token_ids.tolist()), self._stops, tools=self._tools)

    def whole(self, completion: Completion, said: Said) -> dict[str, Any]:
        """The body of an answer at one go."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": _finish(completion, said)}
        choice |= {"message": said.message()} if self._chat else {"text": said.text}
        choice["logprobs"] = self._logprobs(completion, 0)
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [{**choice, **self._tokens(completion, 0, first=True)}],
            "usage": self._usage(completion),
            **self._prompt(),
            "policy_version": _version(completion),
        }

    def opening(self) -> dict[str, Any] | None:
        """What a stream begins with."""
        if not self._chat:
            return None
        return self._piece({"delta": {"role": "assistant", "content": ""}}, None) | self._prompt()

    def piece(self, so_far: Completion) -> dict[str, Any] | None:
        """What is new in an answer that goes on; None where there is nothing to tell yet."""
        text = _stable(self._decode(so_far.token_ids.tolist()), self._markers)
        if not text.startswith(self._sent_text) or len(so_far.token_ids) <= self._sent_tokens:
            return None  # a decoder may yet change its mind about the last characters
        return self._told(so_far, text)

    def closing(self, completion: Completion, said: Said) -> Iterable[dict[str, Any]]:
        """The rest of an answer that has ended."""
        if len(completion.token_ids) > self._sent_tokens or said.text != self._sent_text:
            yield self._told(completion, said.text)
        if said.calls:
            calls = [{"index": i, **call} for i, call in enumerate(said.calls)]
            yield self._piece({"delta": {"tool_calls": calls}}, completion)
        rest: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        yield self._piece({**rest, "finish_reason": _finish(completion, said)}, completion)
        if self._request.wants_usage:
            end = self._piece({}, completion)
            yield {**end, "choices": [], "usage": self._usage(completion)}

    @property
    def _markers(self) -> list[str]:
        return [*self._stops, *([_CALL_BEGINS] if self._tools else [])]

    def _told(self, so_far: Completion, text: str) -> dict[str, Any]:
        new, start = text[len(self._sent_text) :], self._sent_tokens
        self._sent_text, self._sent_tokens = text, len(so_far.token_ids)
        choice: dict[str, Any] = {"delta": {"content": new}} if self._chat else {"text": new}
        choice["logprobs"] = self._logprobs(so_far, start)
        return self._piece({**choice, **self._tokens(so_far, start, first=start == 0)}, so_far)

    def _piece(self, choice: dict[str, Any], so_far: Completion | None) -> dict[str, Any]:
        piece: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": [{"index": 0, "finish_reason": None, **choice}],
        }
        return piece if so_far is None else piece | {"policy_version": _version(so_far)}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids} if self._request.return_token_ids else {}

    def _tokens(self, completion: Completion, start: int, *, first: bool) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        found: dict[str, Any] = {
            "token_ids": completion.token_ids[start:].tolist(),
            "token_versions": completion.versions[start:].tolist(),
        }
        # Of plain completions the prompt's stand in the choice as well: clients look there.
        return found if self._chat or not first else {**found, "prompt_token_ids": self._prompt_ids}

    def _logprobs(self, completion: Completion, start: int) -> dict[str, Any] | None:
        wanted = self._request.logprobs
        if wanted is None or wanted is False:
            return None
        logprobs = completion.logprobs[start:].tolist()
        texts = [self._decode([i]) for i in completion.token_ids[start:].tolist()]
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        if self._chat:
            return {"content": content}
        return {"content": content, "tokens": texts, "token_logprobs": logprobs}

    def _usage(self, completion: Completion) -> dict[str, int]:
        prompt, answer = len(self._prompt_ids), len(completion.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _said(text: str, stops: Sequence[str], *, tools: bool) -> Said:
    stop = next((stop for stop in stops if text.endswith(stop)), None)
    if stop is not None:
        text = text[: -len(stop)]
    calls: list[dict[str, Any]] = []

    def taken_out(match: Any) -> str:
        call = read_call(match[1])
        if call.arguments is None:
            return str(match[0])
        calls.append(
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
        )
        return ""

    return Said(CALL.sub(taken_out, text) if tools else text, tuple(calls))


def _stable(text: str, markers: Sequence[str]) -> str:
    """As much of an unfinished text as will stay as it is."""
    text = text.rstrip(_BROKEN)
    found = text.find(_CALL_BEGINS) if _CALL_BEGINS in markers else -1
    if found >= 0:
        text = text[:found]
    longest = max(
        (n for marker in markers for n in range(1, len(marker) + 1) if text.endswith(marker[:n])), default=0
    )
    return text[: len(text) - longest]


def _finish(completion: Completion, said: Said) -> str:
    return "tool_calls" if said.calls else completion.finish_reason


def _version(so_far: Completion) -> int:
    return int(so_far.versions[-1])


def event(document: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
