"""A prompt of which its generators died: not handed to one again, in no epoch and over no resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.attempts import Attempts, PoisonedGroupError
from asyncrl.checkpoint.resume import prepare
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import LostGroupError
from asyncrl.outstanding import Running
from asyncrl.rollout import GroupRequest
from asyncrl.types import GroupMeta, Task

from .controller_harness import BASE
from .resume_harness import OF, config_in, leg, lines


class Deadly:
    """A pool whose replicas die of every group."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def run_group(self, request: GroupRequest, **_: Any) -> tuple[GroupMeta, Any]:
        self.asked.append(request.task.ordinal)
        raise LostGroupError("generator 0 died")


def attempts(source: Deadly, poisoned: dict[str, str]) -> Attempts:
    config = parse_config(BASE, ["rollout.max_attempts=2"])
    return Attempts(config, source, reissue=lambda _: 0, greedy_baseline=False, poisoned=poisoned)


async def give_up(made: Attempts, ordinal: int, uid: str) -> str:
    with pytest.raises(PoisonedGroupError) as caught:
        await made.run(Running(Task(ordinal, uid, "", (1,)), 0.0), 0)
    return str(caught.value)


async def test_it_costs_generators_their_lives_in_one_epoch_alone() -> None:
    source, poisoned = Deadly(), dict[str, str]()
    made = attempts(source, poisoned)
    first = await give_up(made, 3, "train-3")
    assert source.asked == [3, 3]
    assert await give_up(made, 103, "train-3") == f"not tried again: {first}"
    assert source.asked == [3, 3]
    await give_up(made, 4, "train-4")
    assert source.asked == [3, 3, 4, 4], "others are tried as ever"
    assert set(poisoned) == {"train-3", "train-4"}
    await give_up(attempts(source, dict(poisoned)), 203, "train-3")
    assert len(source.asked) == 4


async def test_one_that_was_never_alone_is_not_held_to_be_at_fault() -> None:
    source, poisoned = Deadly(), dict[str, str]()
    config = parse_config(BASE, ["rollout.max_attempts=1"])
    made = Attempts(config, source, reissue=lambda _: 0, greedy_baseline=False, poisoned=poisoned)
    assert "with others beside it" in await give_up(made, 3, "train-3")
    assert not poisoned


def failed(config: Config) -> Mapping[int, str]:
    return {e["ordinal"]: e["reason"] for e in lines(config, "ledger.jsonl") if e["state"] == "failed"}


def test_a_run_that_goes_on_remembers_it_until_what_samples_is_another(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=8")
    known = {"train-13": "died of it"}
    leg(config, stop_at_step=2, poisoned=known)
    assert not failed(config)
    resumed = prepare(config, OF)
    assert resumed is not None
    assert resumed.state.poisoned == known
    other = config_in(tmp_path, "run.steps=8", "generators.slots=3")
    resumed = prepare(other, OF)
    assert resumed is not None
    assert not resumed.state.poisoned
    leg(config)
    assert failed(config) == {13: "GeneratorError: not tried again: died of it"}
