"""What a client may ask for: the bodies of the two calls, read and checked.

Invariants:
- What would change the distribution that is sampled from, or the number of answers, is refused, unless it
  says what happens anyway. Temperature and the like are the run's: a client's own are listed in
  ``overridden``.
- A message has one form whatever client wrote it, so that equal histories compare equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from asyncrl.types import SamplingParams

_Body = TypeVar("_Body", bound="_Request")

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "chat_template_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Keys that may be absent, null, or one of these."""
_OF_THE_RUN = ("temperature", "top_p", "top_k")


class Refusal(Exception):
    """An answer that is no completion, in the form that OpenAI's clients know."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _listed(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore")

    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)] = ()
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def limit(self) -> int | None:
        """Tokens of the answer that are asked for."""
        raise NotImplementedError

    def overridden(self, sampling: SamplingParams) -> list[str]:
        """What it asks for that the run decides otherwise."""
        own = {name: getattr(self, name) for name in _OF_THE_RUN}
        return [name for name, value in own.items() if value not in (None, getattr(sampling, name))]


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    logprobs: bool | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None

    @property
    def limit(self) -> int | None:
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools or []


class CompletionRequest(_Request):
    """``POST /v1/completions``; the prompt is text, or token ids."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | bool | None = None
    max_tokens: PositiveInt | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens


def read(kind: type[_Body], raw: bytes) -> _Body:
    """The body of a call. Raises Refusal."""
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "invalid_json", f"found {type(fields).__name__} as the body; expected an object")
    for name, allowed in _ONLY.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            expected = " or ".join(json.dumps(item) for item in allowed) or "it absent"
            raise Refusal(400, "unsupported", f"{name}: found {value!r}; expected {expected}", param=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"]))
        raise Refusal(400, "invalid_value", f"{param}: {first['msg']}", param=param) from None


def as_message(value: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message as templates take it: content is text, arguments are objects. Raises Refusal."""
    role = value.get("role")
    if not isinstance(role, str):
        raise Refusal(400, "invalid_value", f"messages: found role {role!r}; expected text", param="messages")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(value.get("content")),
    }
    calls = value.get("tool_calls")
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    if role == "tool" and isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return message


def identity(message: Mapping[str, Any]) -> str:
    """Equal for messages that are the same to a model."""
    return json.dumps(message, sort_keys=True, ensure_ascii=False)


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        parts = [part for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(parts) == len(content):
            return "".join(part["text"] for part in parts)
    raise Refusal(
        400, "unsupported", "messages: found content that is not text; expected text alone", param="messages"
    )


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refusal(
            400, "invalid_value", "messages: found a tool call without a function's name", param="messages"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # if not JSON, a template shows it as the client wrote it
            arguments = json.loads(arguments or "{}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
