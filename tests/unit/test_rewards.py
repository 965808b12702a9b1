"""Reward functions: how they are bound, what they may return, and what their processes survive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgpack
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import RewardFunctionSection
from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    RewardRaisedError,
    RewardTimeoutError,
    RewardValueError,
    RewardWorkerError,
)
from asyncrl.rewards.binder import Sample, named_values, signature_of
from asyncrl.rewards.builtin import exact_match, last_number
from asyncrl.rewards.pool import RewardPool, RewardScore
from asyncrl.rewards.process import Call, Replies, spawn
from asyncrl.rewards.results import as_value

USER_CODE = '''
import asyncio, ctypes, os, subprocess, sys, time
import math

def length(completion): return len(completion)
def same(completion, answer): return completion == answer
def from_row(row, info, extra=7): return row["answer"] == info["answer"] and extra == 7
def columns(**kwargs): return len(kwargs)
def ids(completion_ids): return sum(completion_ids)
def prints(completion): print("hello"); return 1.0
def scaled(completion, factor): return factor * len(completion)
def where(completion): return {"score": os.getpid()}
def cores(completion): return len(os.sched_getaffinity(0))
def gpus(completion): return os.environ["CUDA_VISIBLE_DEVICES"] == ""
def open_files(completion):
    return len([f for f in os.listdir("/proc/self/fd") if int(f) > 2])
def grouped(completions): return 1.0
def positional(completion, /): return 1.0

def by_word(completion):
    """Does what the completion says."""
    if completion == "raise": raise ZeroDivisionError("on purpose")
    if completion == "exit": sys.exit(3)
    if completion == "hang":
        while True: pass
    if completion == "hang in c": ctypes.PyDLL(None).sleep(1000)
    if completion == "sleep": time.sleep(0.05)
    if completion == "crash": os._exit(7)
    if completion == "segfault": ctypes.string_at(0)
    if completion == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open("child.pid", "w").write(str(child.pid))
        while True: pass
    values = {"nan": math.nan, "inf": -math.inf, "text": "1.0", "list": [1.0, 2.0], "none": None,
              "huge": 10**400, "empty": {}, "true": True, "zero": 0.0}
    return values.get(completion, 1.0)

leaked = []
def leaks(completion):
    if completion == "leak": leaked.append(bytearray(300 << 20))
    return float(len(leaked))
async def leaks_slowly(completion): return leaks(completion)

def maybe(completion): return None if completion == "none" else 2.0

async def judge(completion):
    if completion == "hang": await asyncio.sleep(1000)
    if completion == "block": time.sleep(1000)
    if completion == "crash":
        await asyncio.sleep(0.2)
        os._exit(7)
    if completion == "raise": raise ValueError("no")
    await asyncio.sleep(0.3)
    return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER_CODE)
    return tmp_path


@contextlib.asynccontextmanager
async def pool_of(
    folder: Path, *functions: str | dict, workers: int = 1, timeout_s: float = 5.0, **options
) -> AsyncIterator[RewardPool]:
    sections = [
        RewardFunctionSection.model_validate(
            f"user.py:{f}" if isinstance(f, str) else {**f, "path": f"user.py:{f['path']}"}
        )
        for f in functions
    ]
    others = _children()  # of the test process: other tests' fork servers, say
    pool = RewardPool(sections, workers=workers, timeout_s=timeout_s, folder=folder, **options)
    await pool.start()
    assert len(_children() - others) >= workers
    try:
        yield pool
    finally:
        await pool.close()
        assert not _children() - others


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def score(pool: RewardPool, completion: str, **row: object) -> asyncio.Task[RewardScore]:
    row.setdefault("answer", "4")
    return asyncio.ensure_future(pool.score(row, "2+2=", completion, [1, 2, 3], "stop", uid="train-5"))


# --- binding ---


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("def f(completion, answer): ...", []),
        ("def f(completion, ground_truth): ...", ["ground_truth"]),
        ("def f(data_source, solution_str, extra_info=None): ...", ["data_source"]),
        ("def f(prompt, row, info, completion_ids, finish_reason): ...", []),
        ("def f(*, answer, **kwargs): ...", []),
        ("def f(completions, prompts, log_extra, **kwargs): ...", []),
        ("def f(queries, prompts, labels, **kwargs): ...", []),
        ("def f(completions, completion): ...", ["completion"]),
    ],
)
def test_parameters_that_no_name_reaches_are_found(function: str, missing: list[str]) -> None:
    namespace: dict = {}
    exec(function, namespace)
    problems = signature_of(namespace["f"], "f", {}).problems(["question", "answer"])
    assert len(problems) == len(missing)
    for problem, parameter in zip(problems, missing, strict=True):
        assert repr(parameter) in problem
        assert "answer, completion" in problem, "the names that there are"


def test_args_bind_parameters_and_unknown_ones_are_found() -> None:
    def f(completion: str, factor: float) -> float:
        return factor

    assert signature_of(f, "f", {"factor": 2}).problems(["answer"]) == []
    assert "'fcator'" in signature_of(f, "f", {"fcator": 2}).problems(["factor"])[0]


def test_verl_rows_give_their_ground_truth() -> None:
    row = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {}}
    values = named_values(Sample(row, "p", "c", [], "stop"))
    assert (values["ground_truth"], values["solution_str"], values["info"]) == ("72", "c", row)

    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...

    assert signature_of(compute_score, "s", {}).problems(row) == []


# --- values ---


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**300), 10**300) | st.booleans())
def test_any_finite_number_is_a_reward(value: float) -> None:
    assert as_value(value) == float(value)
    assert as_value({"score": value, "extra": "text"}) == float(value)


@pytest.mark.parametrize("value", ["1.0", float("nan"), float("inf"), [1.0], (1, 2), {}, object(), 1j, b"1"])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"found .*expected"):
        as_value(value)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so it is 12", "12", 1.0),
        ("5-3", "3", 1.0),
        ("5 - 3 = -2", "-2", 1.0),
        ("x=-2", "-2", 1.0),
        ("1,000.0", "1000", 1.0),
        ("4.50", "4.5", 1.0),
        ("12.", "12", 1.0),
        ("12 or 13", "12", 0.0),
        ("none", "12", 0.0),
        ("72", "half of 48 is 24, so #### 72", 1.0),
    ],
)
def test_last_number(completion: str, answer: str, expected: float) -> None:
    assert last_number(completion, answer) == expected


def test_an_answer_without_a_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no number"):
        last_number("12", "twelve")


def test_exact_match_ignores_outer_white_space() -> None:
    assert exact_match(" 12\n", "12") == 1.0
    assert exact_match("1 2", "12") == 0.0


# --- the pool ---


async def test_weighted_sum_and_parts(folder: Path) -> None:
    functions = [
        {"path": "length", "weight": 0.5},
        {"path": "same", "weight": -2.0, "name": "right"},
        "maybe",
    ]
    async with pool_of(folder, *functions) as pool:
        assert await score(pool, "4") == RewardScore(
            0.5 - 2.0 + 2.0, {"length": 1.0, "right": 1.0, "maybe": 2.0}
        )
        assert await score(pool, "none") == RewardScore(2.0, {"length": 4.0, "right": 0.0})


async def test_a_score_says_who_made_it_and_when(folder: Path) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    async with pool_of(folder, "length", workers=2) as pool:
        scores = await asyncio.gather(*(score(pool, "abc") for _ in range(12)))
    by_worker = {
        worker: sorted((s.begun, s.ended) for s in scores if s.worker == worker) for worker in (0, 1)
    }
    assert sum(map(len, by_worker.values())) == 12
    for spans in by_worker.values():
        assert all(began < begun <= ended < clock() for begun, ended in spans)
        # A worker runs one sync function at a time.
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


async def test_arguments_reach_the_function(folder: Path) -> None:
    functions = ["from_row", "columns", "ids", "prints", {"path": "scaled", "args": {"factor": 3}}]
    async with pool_of(folder, *functions) as pool:
        result = await score(pool, "ab", level=3)
    assert result.parts == {"from_row": 1.0, "columns": 2.0, "ids": 6.0, "prints": 1.0, "scaled": 6.0}


async def test_built_in_rewards_go_by_name(folder: Path) -> None:
    pool = RewardPool([RewardFunctionSection(path="exact_match")], workers=1, timeout_s=5, folder=folder)
    try:
        assert [s.name for s in await pool.start()] == ["exact_match"]
        assert (await score(pool, " 4 ")).total == 1.0
    finally:
        await pool.close()


@pytest.mark.parametrize("word", ["nan", "inf", "text", "list", "none", "huge", "empty"])
async def test_bad_values_fail_their_sample_alone(folder: Path, word: str) -> None:
    async with pool_of(folder, "by_word") as pool:
        with pytest.raises(RewardValueError, match=r"train-5.*by_word.*expected"):
            await score(pool, word)
        assert (await score(pool, "zero")).total == 0.0
        assert pool.statistics().restarts == 0


async def test_a_raised_error_carries_the_users_traceback(folder: Path) -> None:
    async with pool_of(folder, "by_word") as pool:
        with pytest.raises(
            RewardRaisedError, match=r'(?s)user\.py", line \d+, in by_word.*on purpose'
        ) as caught:
            await score(pool, "raise")
        assert "worker.py" not in str(caught.value)
        with pytest.raises(RewardRaisedError, match="SystemExit: 3"):
            await score(pool, "exit")
        assert pool.statistics().raised == 2


@pytest.mark.parametrize("word", ["hang", "hang in c"])
async def test_a_hung_call_is_ended_alone(folder: Path, word: str) -> None:
    async with pool_of(folder, "by_word", workers=2, timeout_s=0.5) as pool:
        calls = [score(pool, "fine") for _ in range(50)]
        hung = score(pool, word)
        calls += [score(pool, "fine") for _ in range(50)]
        assert [r.total for r in await asyncio.gather(*calls)] == [1.0] * 100
        with pytest.raises(RewardTimeoutError, match=r"train-5.*0\.5 s"):
            await hung
        statistics = pool.statistics()
        assert (statistics.timeouts, statistics.crashes, statistics.scored) == (1, 0, 100)
        assert (await score(pool, "fine")).total == 1.0


@pytest.mark.parametrize(("word", "end"), [("crash", "exit code 7"), ("segfault", "signal 11")])
async def test_a_crash_fails_its_call_alone(folder: Path, word: str, end: str) -> None:
    async with pool_of(folder, "by_word") as pool:
        calls = [score(pool, "fine") for _ in range(80)]
        crashed = score(pool, word)
        calls += [score(pool, "fine") for _ in range(80)]
        assert [r.total for r in await asyncio.gather(*calls)] == [1.0] * 160
        with pytest.raises(RewardWorkerError, match=end):
            await crashed
        assert pool.statistics().crashes == 1


@pytest.mark.parametrize("writes", [0, 1, 2])
async def test_what_a_worker_answered_before_it_died_is_read(folder: Path, writes: int) -> None:
    """Its end shows first in a write that fails, or in a reset: neither may hide the replies before it."""
    function = {"path": "user.py:by_word", "name": None, "args": {}}
    process = await spawn(
        {"functions": [function], "timeout_s": 5, "folder": str(folder), "cores": [], "memory_mb": None}, 5
    )
    try:
        replies = Replies(process.incoming)
        await replies.read()  # it is ready

        def send(number: int, word: str) -> None:
            packed = msgpack.packb([number, False, [[{}, "2+2=", word, [], "stop"]]])
            process.put(Call(number, "train-5", packed, asyncio.get_running_loop().create_future()))

        for number in range(50):
            send(number, "fine")
        send(50, "segfault")
        send(51, "fine")
        process.flush()
        process.popen.wait()  # the loop reads nothing meanwhile
        for number in range(writes):
            send(52 + number, "fine")
            process.flush()
            await asyncio.sleep(0)
        answered = []
        while messages := await replies.read():
            answered += [number for number, _, _ in messages]
        assert answered == list(range(50))
    finally:
        await process.kill()


async def test_processes_that_a_function_started_go_with_it(folder: Path) -> None:
    async with pool_of(folder, "by_word", timeout_s=0.5) as pool:
        with pytest.raises(RewardTimeoutError):
            await score(pool, "child")
        child = int((folder / "child.pid").read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(child).wait(5)
        assert (await score(pool, "fine")).total == 1.0


async def test_async_functions_run_together(folder: Path) -> None:
    async with pool_of(folder, "judge", "length") as pool:
        start = time.monotonic()
        results = await asyncio.gather(*(score(pool, "fine") for _ in range(20)))
        assert time.monotonic() - start < 20 * 0.3 / 2
        assert {r.total for r in results} == {5.0}


@pytest.mark.parametrize("word", ["hang", "block", "crash", "raise"])
async def test_an_async_function_at_fault_fails_alone(folder: Path, word: str) -> None:
    errors = {"crash": RewardWorkerError, "raise": RewardRaisedError}
    async with pool_of(folder, "judge", timeout_s=0.8) as pool:
        calls = [score(pool, "fine") for _ in range(3)]
        faulty = score(pool, word)
        calls += [score(pool, "fine") for _ in range(3)]
        with pytest.raises(errors.get(word, RewardTimeoutError)):
            await faulty
        assert [r.total for r in await asyncio.gather(*calls)] == [1.0] * 6


async def test_a_cancelled_waiter_disturbs_nobody(folder: Path) -> None:
    async with pool_of(folder, "by_word") as pool:
        calls = [score(pool, "sleep") for _ in range(8)]
        calls[0].cancel()
        calls[5].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(r, RewardScore) for r in results] == [i not in (0, 5) for i in range(8)]


async def test_a_worker_killed_from_outside_is_replaced(folder: Path) -> None:
    async with pool_of(folder, "where") as pool:
        first = int((await score(pool, "x")).total)
        os.kill(first, signal.SIGKILL)
        with contextlib.suppress(RewardWorkerError):  # sent before the end of the process was seen
            await score(pool, "x")
        again = int((await score(pool, "x")).total)
        assert again != first
        assert pool.statistics().restarts == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
@pytest.mark.parametrize("function", ["leaks", "leaks_slowly"])
async def test_a_function_that_leaks_costs_one_call_at_its_limit_and_starts_over(
    folder: Path, function: str
) -> None:
    async with pool_of(folder, function, memory_mb=1500) as pool:
        ends = [
            await asyncio.gather(score(pool, "leak" if i < 12 else "fine"), return_exceptions=True)
            for i in range(13)
        ]
        failures = [end for (end,) in ends if not isinstance(end, RewardScore)]
        assert 2 <= len(failures) <= 6, "each process has room for a few"
        assert pool.statistics().restarts == len(failures)
        for failure in failures:
            assert isinstance(failure, RewardWorkerError)
            assert "ended with a MemoryError: it wanted more than reward.memory_mb allows" in str(failure)
        assert isinstance(ends[-1][0], RewardScore), "what others had is not lost"


async def test_close_fails_what_is_left(folder: Path) -> None:
    async with pool_of(folder, "by_word") as pool:
        hung = score(pool, "hang")
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(RewardWorkerError, match="closed"):
            await hung
        with pytest.raises(RewardWorkerError, match="closed"):
            await score(pool, "fine")


async def test_a_worker_inherits_neither_files_nor_gpus(folder: Path) -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    async with pool_of(folder, "open_files", "gpus") as pool:
        result = await score(pool, "x")
    os.close(ours)
    os.close(theirs)
    # Its own socket, and the folder that it lists.
    assert result.parts == {"open_files": 2.0, "gpus": 1.0}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
async def test_workers_get_the_cores_that_they_are_given(folder: Path) -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        async with pool_of(folder, "cores", cores=sorted(mine)) as pool:
            assert (await score(pool, "x")).total == len(mine)
    finally:
        os.sched_setaffinity(0, mine)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nothing", "built-in"),
        ("user.py:lenght", "expected one of its functions: .*length"),
        ("missing.py:f", "found no file"),
        ("no_such_module:f", "no module"),
        ("broken.py:f", "importing it failed: ZeroDivisionError"),
        ("user.py:positional", "positional-only"),
        ("user.py:math", "cannot be called"),
    ],
)
async def test_functions_that_cannot_be_loaded(folder: Path, path: str, text: str) -> None:
    (folder / "broken.py").write_text("1 / 0")
    pool = RewardPool([RewardFunctionSection(path=path)], workers=1, timeout_s=5, folder=folder)
    with pytest.raises(ConfigError, match=text):
        await pool.start()
    assert pool.statistics().workers == 0


async def test_two_functions_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'length'"):
        async with pool_of(folder, "length", "length"):
            pass


async def test_start_has_a_deadline(folder: Path) -> None:
    (folder / "slow.py").write_text("import time; time.sleep(1000)")
    functions = [RewardFunctionSection(path="slow.py:f")]
    pool = RewardPool(functions, workers=1, timeout_s=5, folder=folder, start_timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"slow\.py:f"):
        await pool.start()


async def test_when_no_worker_starts_any_more_nobody_waits(folder: Path) -> None:
    async with pool_of(folder, "by_word") as pool:
        (folder / "user.py").unlink()
        crashed, waiting = score(pool, "crash"), score(pool, "fine")
        with pytest.raises(RewardWorkerError, match="exit code 7"):
            await crashed
        with pytest.raises(RewardWorkerError, match="no reward worker starts"):
            await waiting


def test_a_worker_dies_with_its_parent(folder: Path) -> None:
    parent = """
import asyncio, sys
from pathlib import Path
from asyncrl.config import RewardFunctionSection
from asyncrl.rewards.pool import RewardPool

async def main():
    functions = [RewardFunctionSection(path="user.py:by_word"), RewardFunctionSection(path="user.py:where")]
    pool = RewardPool(functions, workers=1, timeout_s=100, folder=Path(sys.argv[1]))
    await pool.start()
    print(int((await pool.score({}, "", "x", [], "stop")).parts["where"]), flush=True)
    await pool.score({}, "", "hang in c", [], "stop")

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", parent, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    worker.wait(5)


async def test_thousands_a_second(folder: Path) -> None:
    async with pool_of(folder, "same") as pool:
        await asyncio.gather(*(score(pool, "4") for _ in range(500)))
        start = time.process_time()
        count = 3000
        await asyncio.gather(*(score(pool, "4", text="x" * 200) for _ in range(count)))
        cpu = time.process_time() - start
    # Processor time of this side; the wall clock belongs to whoever shares the machine.
    assert cpu / count < 0.5e-3
