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
from asyncrl.errors import GeneratorError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.rollout import EngineClient, GroupRequest
from asyncrl.serve.server import AgentServer, Served
from asyncrl.types import Completion, FinishReason, SamplingParams, Task

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
        EnvironmentSection(kind="agent", **{"path": "x.py:f", **section}),
        lambda tools: TurnEncoder(data, tokenizer, tools),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        live,
        max_prompt_tokens=100,
    )
    await server.start()
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:
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


# --- rows ---


async def test_a_history_that_was_rewritten_begins_a_row_and_so_does_a_second_answer() -> None:
    model = Talker("one", "two", "three", "four")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            said = (await chat(http, served, [user("a")])).json()["choices"][0]["message"]
            again = [user("a"), said, user("b")]
            await chat(http, served, again)
            await chat(http, served, again)  # from the same answer: its tokens are the prompt
            changed = [user("a"), {**said, "content": "uno"}, user("b")]
            await chat(http, served, changed)
            result = served.session.result({})
    assert result is not None
    decode = model.tokenizer.decode
    rows = [(decode(r.prompt_ids), decode(r.token_ids)) for r in (*result.earlier, result)]
    assert rows == [
        ("u:a;a:", "one;u:b;a:two"),
        ("u:a;a:one;u:b;a:", "three"),
        ("u:a;a:uno;u:b;a:", "four"),
    ]
    sampled = [r.token_ids[r.loss_mask] for r in (*result.earlier, result)]
    assert decode(np.concatenate(sampled)) == "onetwothreefour", "each sampled token is trained once"


async def test_calls_at_once_go_on_from_one_answer_without_sharing_tokens() -> None:
    model = Talker("root", "left", "right")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            said = (await chat(http, served, [user("a")])).json()["choices"][0]["message"]
            await asyncio.gather(*(chat(http, served, [user("a"), said, user(w)]) for w in "lr"))
            result = served.session.result({})
    assert result is not None
    rows = {model.tokenizer.decode(r.token_ids) for r in (*result.earlier, result)}
    assert len(rows) == 2
    assert sum(int(r.loss_mask.sum()) for r in (*result.earlier, result)) == len("rootleftright")


async def test_plain_completions_go_on_from_text_and_from_token_ids() -> None:
    model = Talker("two", "four", "six", "ten")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:

            async def complete(prompt: Any, **more: Any) -> dict[str, Any]:
                answer = await http.post(f"{served.base_url}/completions", json={"prompt": prompt, **more})
                assert answer.status_code == 200, answer.text
                return dict(answer.json())

            first = await complete("1+1=", logprobs=1, return_token_ids=True)
            await complete("1+1=two,2+2=")
            choice = first["choices"][0]
            ids = [*choice["prompt_token_ids"], *choice["token_ids"], 5]
            third = await complete(ids, return_token_ids=True)
            assert third["prompt_token_ids"] == ids
            await complete([*ids, *third["choices"][0]["token_ids"], 6])
            result = served.session.result({})
    assert result is not None
    assert choice["text"] == "two"
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * 3
    decode = model.tokenizer.decode
    text, numbers = result.earlier[0], result
    assert (decode(text.prompt_ids), decode(text.token_ids)) == ("1+1=", "two,2+2=four")
    assert numbers.prompt_ids.tolist() == ids
    assert numbers.loss_mask.tolist() == [True] * 3 + [False] + [True] * 3


# --- tools ---

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_offered_through_the_template_and_calls_read_back(stream: bool) -> None:
    model = Talker(f"Let me see. {CALL}", "Sunny.")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            history = [user("Ulm?")]
            if stream:
                message, finish = await streamed(http, served, history, tools=[WEATHER])
            else:
                body = (await chat(http, served, history, tools=[WEATHER])).json()
                message, finish = body["choices"][0]["message"], body["choices"][0]["finish_reason"]
            assert (message["content"], finish) == ("Let me see. ", "tool_calls")
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}
            # As clients' own types write it down, absent fields and all.
            echoed = {**message, "refusal": None, "audio": None, "function_call": None}
            history += [echoed, {"role": "tool", "tool_call_id": call["id"], "content": "sun"}]
            await chat(http, served, history, tools=[WEATHER])
            result = served.session.result({})
    assert result is not None
    assert model.contexts() == [
        "[weather]u:Ulm?;a:",
        f"[weather]u:Ulm?;a:Let me see. {CALL};t:sun;a:",
    ]
    assert result.earlier == ()


async def test_what_is_no_call_stays_text_and_without_tools_none_is_looked_for() -> None:
    broken = "<tool_call>{oh</tool_call>"
    model = Talker(broken, CALL, CALL)
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            for more in ({"tools": [WEATHER]}, {}, {"tools": [WEATHER], "tool_choice": "none"}):
                choice = (await chat(http, served, [user("?")], **more)).json()["choices"][0]
                assert choice["finish_reason"] == "stop"
                assert "tool_calls" not in choice["message"]
    assert model.contexts()[2] == "u:?;a:", "tools that may not be called are not shown"


# --- streams ---


async def events(http: httpx.AsyncClient, served: Served, kind: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, its end checked."""
    async with http.stream("POST", f"{served.base_url}/{kind}", json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-policy-version"] == "7"
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def streamed(
    http: httpx.AsyncClient, served: Served, messages: Sequence[Mapping[str, Any]], **more: Any
) -> tuple[dict[str, Any], str]:
    """The message that a stream's pieces make, and how it ended."""
    found = await events(http, served, "chat/completions", messages=messages, **more)
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas[0]["role"] == "assistant"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    content = "".join(delta.get("content") or "" for delta in deltas)
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return message, found[-1]["choices"][0]["finish_reason"]


async def test_a_stream_is_the_same_answer_in_pieces() -> None:
    model = Talker("hello", "again")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            found = await events(
                http,
                served,
                "chat/completions",
                messages=[user("?")],
                logprobs=True,
                return_token_ids=True,
                stream_options={"include_usage": True},
            )
            pieces = [c for event in found for c in event["choices"]]
            message = {"role": "assistant", "content": "hello"}
            assert "".join(c["delta"].get("content", "") for c in pieces) == "hello"
            await streamed(http, served, [user("?"), message, user("!")])
            result = served.session.result({})
    assert result is not None
    assert len([c for c in pieces if c["delta"].get("content")]) > 1, "it came at one go"
    ids = [i for c in pieces for i in c.get("token_ids", ())]
    assert model.tokenizer.decode(ids) == "hello"
    entries = [e for c in pieces for e in (c.get("logprobs") or {}).get("content", ())]
    assert "".join(e["token"] for e in entries) == "hello"
    assert model.tokenizer.decode(found[0]["prompt_token_ids"]) == "u:?;a:"
    assert found[-1]["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    assert pieces[-1]["finish_reason"] == "stop"
    assert model.tokenizer.decode(result.token_ids) == "hello;u:!;a:again"


async def test_a_stop_of_the_request_ends_the_text_and_stays_in_the_tokens() -> None:
    model = Talker("yes\nUser:", "yes\nUser:")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            whole = (await chat(http, served, [user("?")], stop="\nUser:")).json()["choices"][0]
            message, finish = await streamed(http, served, [user("?")], stop=["\nUser:"])
            result = served.session.result({})
    assert result is not None
    assert whole["message"]["content"] == message["content"] == "yes"
    assert (whole["finish_reason"], finish) == ("stop", "stop")
    assert model.asked[0][1].stop == ("\nUser:",)
    assert model.tokenizer.decode(result.token_ids) == "yes\nUser:"


# --- what is refused ---


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "found role None"),
        ({"messages": [user("x")], "n": 2}, 400, "n: found 2; expected 1"),
        ({"messages": [user("x")], "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": [user("x")], "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": [user("x")], "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "not text"),
        ({"messages": [user("x" * 400)]}, 400, "found a context of 405 tokens"),
        ({"messages": [user("x" * (2 << 20))]}, 413, "max_body_mb = 1 MiB"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_says_why(
    body: dict[str, Any], status: int, text: str
) -> None:
    model = Talker("yes")
    async with serving(serve={"max_body_mb": 1}) as (server, http):
        with server.open("train-0", model) as served:
            answer = await http.post(f"{served.base_url}/chat/completions", json=body)
            assert (answer.status_code, model.asked) == (status, [])
            assert text in answer.json()["error"]["message"]
            assert (await chat(http, served, [user("x")])).status_code == 200


async def test_sampling_is_the_runs_and_says_so() -> None:
    model = Talker("yes", "yes")
    async with serving() as (server, http):
        with server.open("train-0", model) as served:
            answer = await chat(http, served, [user("x")], temperature=0.2, top_p=1.0, seed=3)
            assert answer.headers["x-overridden"] == "temperature"
            assert "x-overridden" not in (await chat(http, served, [user("y")], temperature=1.0)).headers
    assert {limits.temperature for _, limits in model.asked} == {1.0}


async def test_an_address_is_known_to_its_agent_alone_and_ends_with_its_rollout() -> None:
    model = Talker("a", "b", "c")
    async with serving() as (server, http):
        root = f"http://{server.address}/v1"
        body = {"messages": [user("x")]}
        with server.open("train-0", model) as served, server.open("train-1", Talker("z")) as other:
            name = served.base_url.split("/")[-2]
            assert len(name) > 20
            assert served.base_url != other.base_url
            by_header = await http.post(f"{root}/chat/completions", json=body, headers={"X-Session-ID": name})
            assert by_header.json()["choices"][0]["message"]["content"] == "a"
            assert (await http.post(f"{root}/chat/completions", json=body)).status_code == 404
            models = await http.get(f"{served.base_url}/models")
            assert [m["id"] for m in models.json()["data"]] == ["policy"]
            assert models.headers["x-policy-version"] == "7"
            wrong = await http.get(f"{served.base_url}/embeddings")
            assert (wrong.status_code, "expected POST" in wrong.json()["error"]["message"]) == (404, True)
        late = await chat(http, served, [user("x")])
        assert (late.status_code, late.json()["error"]["code"]) == (404, "no_such_rollout")
        server.drain()
        with server.open("train-2", model) as served:
            refused = await chat(http, served, [user("x")])
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


# --- budgets ---


async def test_budgets_refuse_calls_and_end_the_trajectory_with_what_it_has() -> None:
    model = Talker("aaaa", "bbbb", most=11)
    async with serving(max_turns=2, max_turn_tokens=4) as (server, http):
        with server.open("train-0", model) as served:
            said = (await chat(http, served, [user("x")], max_tokens=50)).json()["choices"][0]["message"]
            no_room = await chat(http, served, [user("x"), said, user("y")])
            assert (no_room.status_code, no_room.json()["error"]["code"]) == (400, "context_length_exceeded")
            third = await chat(http, served, [user("x")])
            assert (third.status_code, third.json()["error"]["code"]) == (400, "turns_exhausted")
            result = served.session.result({})
    assert result is not None
    assert [limits.max_new_tokens for _, limits in model.asked] == [4]
    assert (model.tokenizer.decode(result.token_ids), result.finish_reason) == ("aaaa", "length")


async def test_calls_of_one_rollout_at_once_are_bounded() -> None:
    engine = ScriptedGenerator(length=constant_length(4), token_s=0.001)
    await engine.start()
    await engine.pause()
    async with serving(serve={"max_parallel": 2}) as (server, http):
        with server.open("train-0", client_of(engine)) as served:
            calls = [asyncio.create_task(chat(http, served, [user(c)])) for c in "ab"]
            await until(lambda: engine.statistics().running + engine.statistics().waiting == 2)
            refused = await chat(http, served, [user("c")])
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "max_parallel = 2" in refused.json()["error"]["message"]
            await engine.resume()
            assert [c.status_code for c in await asyncio.gather(*calls)] == [200, 200]


# --- with an engine ---


def client_of(engine: ScriptedGenerator, sample: int = 0, most: int = 200) -> EngineClient:
    task = Task(0, "train-0", "x", (1,))
    return EngineClient(engine, GroupRequest(task, 0, 1, SamplingParams(most), seed=0, deadline_s=60), sample)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 of things that nobody announces
            await asyncio.sleep(0.001)


async def test_256_sessions_at_once_each_get_their_own_answers() -> None:
    engine = ScriptedGenerator(slots=64, length=constant_length(8), token_s=0.0005)
    await engine.start()

    async def play(sample: int) -> None:
        # A client each, as agents have: one over all would look through its 256 connections for every call.
        own = httpx.AsyncClient(timeout=None, verify=False)
        async with own as http:
            await turns(sample, http)

    async def turns(sample: int, http: httpx.AsyncClient) -> None:
        with server.open(f"train-{sample}", client_of(engine, sample)) as served:
            history = [user(f"{sample}")]
            for turn in range(2):
                body = (await chat(http, served, history, return_token_ids=True)).json()
                first = sample * 104729 + (turn << 16)
                expected = [(first + i) % engine.vocab_size for i in range(8)]
                assert body["choices"][0]["token_ids"] == expected
                history += [body["choices"][0]["message"], user("on")]
            result = served.session.result({})
            assert result is not None
            assert (result.earlier, int(result.loss_mask.sum())) == ((), 16)

    async with serving() as (server, _):
        await asyncio.gather(*(play(sample) for sample in range(256)))
    assert engine.statistics().running == engine.statistics().waiting == 0


async def test_a_swap_while_an_answer_streams_blocks_it_and_fails_nothing() -> None:
    engine = ScriptedGenerator(length=constant_length(60), token_s=0.01)
    await engine.start()
    async with serving(live=lambda: 7) as (server, http):
        with server.open("train-0", client_of(engine)) as served:
            body = {"messages": [user("x")], "stream": True, "return_token_ids": True}
            found: list[dict[str, Any]] = []
            async with http.stream("POST", f"{served.base_url}/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        found.append(json.loads(line.removeprefix("data: ")))
                    if len(found) == 2:  # the first tokens are there
                        await engine.receive(1)
                        await engine.swap(1, in_flight=True, kv="keep")
            result = served.session.result({})
    assert result is not None
    versions = [v for e in found for c in e["choices"] for v in c.get("token_versions", ())]
    assert versions == sorted(versions) == result.versions.tolist()
    assert set(versions) == {0, 1}
    assert len(versions) == 60
    assert found[-1]["policy_version"] == 1
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_gives_its_slot_back_and_may_ask_again(stream: bool) -> None:
    engine = ScriptedGenerator(slots=1, length=constant_length(100), token_s=0.01)
    await engine.start()
    async with serving() as (server, http):
        with server.open("train-0", client_of(engine)) as served:
            body = {"messages": [user("x")], "stream": stream}
            if stream:
                async with http.stream("POST", f"{served.base_url}/chat/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        break
            else:
                call = asyncio.create_task(http.post(f"{served.base_url}/chat/completions", json=body))
                await until(lambda: engine.statistics().running == 1)
                call.cancel()
            await until(lambda: engine.statistics().running == 0)
            assert served.session.result({}) is None, "what nobody heard is no part of the trajectory"
            assert (await chat(http, served, [user("x")], max_tokens=3)).status_code == 200
            result = served.session.result({})
    assert result is not None
    assert (len(result.token_ids), result.earlier) == (3, ())


async def test_an_engine_that_dies_is_the_runs_affair_and_told_to_the_client() -> None:
    engine = ScriptedGenerator(length=constant_length(100), token_s=0.01)
    await engine.start()
    async with serving() as (server, http):
        with server.open("train-0", client_of(engine)) as served:
            call = asyncio.create_task(chat(http, served, [user("x")]))
            await until(lambda: engine.statistics().running == 1)
            engine.die()
            answer = await call
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            with pytest.raises(GeneratorError):
                await served.session.broken
