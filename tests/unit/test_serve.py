"""The endpoint for agents: rows token by token, over HTTP, with scripted models and engines behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from asyncrl.config import DataSection, EnvironmentSection
from asyncrl.environments.base import Heard
from asyncrl.environments.turns import TurnEncoder
from asyncrl.errors import EnvironmentFaultError, GeneratorError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.rollout import EngineClient, GroupRequest
from asyncrl.serve.server import AgentServer, Served
from asyncrl.types import Completion, FinishReason, SamplingParams, Task
from asyncrl.weight_sync.base import PushGroupSpec

CHAT = (
    "{% if tools %}[{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}]{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer_of(template: str | None = CHAT) -> Any:
    tokenizer = character_tokenizer(4096)
    tokenizer.chat_template = template
    return tokenizer


class Talker:
    """A model that says the next of its words, a character a token, each call by the next version."""

    def __init__(self, *words: str, most: int = 200, finish: FinishReason = "stop") -> None:
        self.words = words
        self.sampling = SamplingParams(max_new_tokens=most)
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.tokenizer = tokenizer_of()
        self._finish: FinishReason = finish

    async def complete(
        self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None, heard: Heard | None = None
    ) -> Completion:
        limits = sampling or self.sampling
        version = len(self.asked)
        self.asked.append((tuple(prompt_ids), limits))
        ids = self.tokenizer(self.words[version], add_special_tokens=False)["input_ids"]
        ids = ids[: limits.max_new_tokens]
        for length in range(1, len(ids)):
            if heard is not None:
                heard(self._answer(ids[:length], version))
                await asyncio.sleep(0)
        return self._answer(ids, version)

    def _answer(self, ids: Sequence[int], version: int) -> Completion:
        size = len(ids)
        versions = np.full(size, version, np.int32)
        return Completion(np.asarray(ids, np.int32), np.full(size, -0.5, np.float32), versions, self._finish)

    def contexts(self) -> list[str]:
        return [str(self.tokenizer.decode(ids)) for ids, _ in self.asked]


@asynccontextmanager
async def serving(
    tokenizer: Any = None, live: Callable[[], int] = lambda: 7, **section: Any
) -> AsyncIterator[tuple[AgentServer, httpx.AsyncClient]]:
    tokenizer = tokenizer or tokenizer_of()
    data = DataSection(train="x")  # type: ignore[arg-type]
    server = AgentServer(
        EnvironmentSection(kind="agent", path="x.py:f", **section),
        lambda tools: TurnEncoder(data, tokenizer, tools),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        live,
        max_prompt_tokens=100,
    )
    await server.start()
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as http:
        try:
            yield server, http
        finally:
            await server.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def chat(
    http: httpx.AsyncClient, served: Served, messages: Sequence[Mapping[str, Any]], **more: Any
) -> httpx.Response:
    return await http.post(f"{served.base_url}/chat/completions", json={"messages": messages, **more})


async def test_a_conversation_is_one_row_of_the_very_tokens_that_were_sampled() -> None:
    model = Talker("four", "five")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            history: list[dict[str, Any]] = [user("2+2?")]
            first = await chat(http, served, history, logprobs=True, return_token_ids=True)
            assert first.status_code == 200, first.text
            body = first.json()
            history += [body["choices"][0]["message"], user("and?")]
            second = await chat(http, served, history)
            result = served.session.result({"environment": 1.0})
    assert result is not None
    decode = model.tokenizer.decode
    assert model.contexts() == ["u:2+2?;a:", "u:2+2?;a:four;u:and?;a:"]
    assert decode(result.prompt_ids) == "u:2+2?;a:"
    assert decode(result.token_ids) == "four;u:and?;a:five"
    assert "".join("x" if m else "." for m in result.loss_mask) == "xxxx" + "." * 10 + "xxxx"
    assert result.versions.tolist() == [0] * 14 + [1] * 4
    assert result.logprobs.tolist() == [-0.5 if m else 0.0 for m in result.loss_mask]
    assert (result.finish_reason, result.earlier, dict(result.rewards)) == ("stop", (), {"environment": 1.0})
    assert [m["content"] for m in result.messages] == ["four", "and?", "five"]
    choice = body["choices"][0]
    assert decode(body["prompt_token_ids"]) == "u:2+2?;a:"
    assert decode(choice["token_ids"]) == "four"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * 4
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list("four")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("four", "stop")
    assert body["usage"] == {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    assert (body["policy_version"], first.headers["x-policy-version"]) == (0, "0")
    assert (second.json()["policy_version"], second.headers["x-policy-version"]) == (1, "1")
    assert "prompt_token_ids" not in second.json()
