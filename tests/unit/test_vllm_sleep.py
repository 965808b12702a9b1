"""The steps of a vLLM engine between sleep and waking, against a recorded ``AsyncLLM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.errors import GeneratorError
from asyncrl.generators.vllm_sleep import VLLMSleep


class RecordedLLM:
    """Two workers whose free memory is ``held`` less while they are awake."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.held = 100

    async def collective_rpc(self, method: str) -> list[int]:
        assert method == "asyncrl_free_bytes"
        return [1000 - self.held, 1000 - self.held]

    async def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        self.held = 0

    async def wake_up(self, tags: Sequence[str]) -> None:
        self.calls.append(("wake_up", *tags))
        self.held += {"weights": 10, "kv_cache": 90}[tags[0]]


async def test_a_whole_round_frees_everything_and_keeps_requests() -> None:
    llm, sleep = RecordedLLM(), VLLMSleep()
    for version in (1, 2):
        assert not sleep.asleep
        assert await sleep.fall_asleep(llm) == 200
        await sleep.make_room(llm)
        assert llm.held == 10, "room for more than weights"
        sleep.require_room(version)
        sleep.loaded()
        sleep.require_room(version)  # a push that was sent again
        assert sleep.asleep
        await sleep.wake(llm)
    assert llm.calls == [("sleep", 2, "keep"), ("wake_up", "weights"), ("wake_up", "kv_cache")] * 2


async def test_no_step_is_skipped_or_taken_twice() -> None:
    llm, sleep = RecordedLLM(), VLLMSleep()
    with pytest.raises(GeneratorError, match="make room for weights while awake; expected asleep"):
        await sleep.make_room(llm)
    await sleep.fall_asleep(llm)
    with pytest.raises(GeneratorError, match="fall asleep while asleep; expected awake"):
        await sleep.fall_asleep(llm)
    with pytest.raises(GeneratorError, match="load version 3 while asleep; expected make_room"):
        sleep.require_room(3)
    await sleep.make_room(llm)
    with pytest.raises(GeneratorError, match="wake while with room for weights; expected with weights"):
        await sleep.wake(llm)
    assert [call[0] for call in llm.calls] == ["sleep", "wake_up"]
