"""What environments and tools do wrong, as a group sees it: a sample each, and every slot is given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import DataSection, EnvironmentSection
from asyncrl.environments.multi_turn import MultiTurn
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.turns import TurnEncoder
from asyncrl.generators.build import NoFunctions
from asyncrl.generators.scripted import ScriptedGenerator
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues.codec import decode_group
from asyncrl.rollout import GroupRequest, RolloutHost
from asyncrl.types import SamplingParams, Task

USER_CODE = """
import itertools, os, threading

asked, forever = itertools.count(), threading.Event()

def fault(kind):
    # The first one that is asked in a run goes wrong, in whichever process, and once.
    try:
        os.mkdir(os.path.join(os.path.dirname(__file__), "went wrong"))
    except FileExistsError:
        return "4"
    if kind == "raise": raise RuntimeError("on purpose")
    if kind == "hang": forever.wait()
    if kind == "die": os._exit(7)
    return "x" * (10 << 20)

class Environment:
    def __init__(self, kind):
        self.kind = kind
    def reset(self, task):
        self.turns = 0
    def step(self, message):
        self.turns += 1
        if self.kind == "endless": return "again"
        return fault(self.kind) if self.turns == 1 else {"done": True, "reward": 1.0}

def act(kind: str) -> str:
    "Do it."
    return fault(kind)
"""


async def played(
    folder: Path, section: EnvironmentSection, says: str
) -> tuple[list[str], list[str], list[str]]:
    """Two groups of four, one after the other: what failed in the first, how its answers ended, and the
    second's failures. Every slot is free and every session over when a group is done.
    """
    (folder / "user.py").write_text(USER_CODE)
    tokenizer = character_tokenizer(256)
    pool = EnvironmentPool(section, folder=folder)
    engine = ScriptedGenerator(slots=2, token_s=1e-5)
    encoder = TurnEncoder(DataSection(train="x"), tokenizer)  # type: ignore[arg-type]
    rollout = MultiTurn(pool, section, encoder, lambda ids: says, 16)
    host = RolloutHost(engine, NoFunctions(1.0), lambda ids: "", rollout=rollout)
    await engine.start()
    await pool.start()
    try:
        metas = []
        for ordinal in range(2):
            task = Task(ordinal, f"train-{ordinal}", "go", (1, 2), {"prompt": "go"})
            request = GroupRequest(task, 0, 4, SamplingParams(max_new_tokens=200), seed=0, deadline_s=300)
            metas.append(await host.run_group(request))
            statistics = engine.statistics()
            assert (statistics.running, statistics.waiting) == (0, 0)
            assert not any(home.sessions for home in pool._homes)
    finally:
        await pool.close()
        await engine.close()
    (first, payload), (second, _) = metas
    ends = (
        [answer.finish_reason for answer in decode_group(payload).trajectories]
        if len(first.failures) < 4
        else []
    )
    return [f.kind for f in first.failures], ends, [f.kind for f in second.failures]


FAULTS = [
    ("raise", "EnvironmentRaisedError"),
    ("hang", "EnvironmentTimeoutError"),
    ("big", "EnvironmentValueError"),
]


@pytest.mark.parametrize(("kind", "error"), FAULTS)
async def test_an_environments_fault_costs_one_sample(tmp_path: Path, kind: str, error: str) -> None:
    section = EnvironmentSection(path="user.py:Environment", args={"kind": kind}, timeout_s=2.0)
    failures, ends, later = await played(tmp_path, section, "x")
    assert (failures, ends, later) == ([error], ["stop"] * 3, [])


async def test_one_that_dies_takes_its_process_along_and_no_more(tmp_path: Path) -> None:
    section = EnvironmentSection(path="user.py:Environment", args={"kind": "die"}, timeout_s=30.0)
    failures, ends, later = await played(tmp_path, section, "x")
    assert set(failures) == {"EnvironmentWorkerError"}
    assert len(failures) + len(ends) == 4
    assert later == []


async def test_endless_turns_end_at_their_budgets_and_are_scored(tmp_path: Path) -> None:
    for budget in ({"max_turns": 3}, {"max_turns": 100}):
        section = EnvironmentSection(path="user.py:Environment", args={"kind": "endless"}, **budget)
        assert await played(tmp_path, section, "x") == ([], ["length"] * 4, [])


@pytest.mark.parametrize(("kind", "error"), [("raise", None), *FAULTS[1:]])
async def test_a_tools_exception_is_for_the_model_to_see_and_its_other_faults_cost_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    section = EnvironmentSection(path="tools", tools=("user.py:act",), timeout_s=2.0, max_turns=2)
    call = f'<tool_call>{{"name": "act", "arguments": {{"kind": "{kind}"}}}}</tool_call>'
    failures, ends, later = await played(tmp_path, section, call)
    assert failures == ([] if error is None else [error])
    assert ends == ["length"] * (4 - len(failures))
    assert later == []
