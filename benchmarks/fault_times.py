"""Seconds until user code is called again after its process died, hung or ran out of memory.

    python benchmarks/fault_times.py [--repeats 5] [--json docs/fault-times.json]

Real pools of one worker each, struck while idle or by their own function; each time is from the fault (for a
function that hangs: from the call, whose ``timeout_s`` is 1 s) until the next call has its answer. What whole
runs take to recover is what ``benchmarks/chaos.py`` measures. Takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.bench.machine import describe_machine
from asyncrl.config import EnvironmentSection, RewardFunctionSection
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.errors import EnvironmentFaultError, RewardError
from asyncrl.rewards.pool import RewardPool

TIMEOUT_S = 1.0
DEADLINE_S = 60.0
MEMORY_MB = 1000
USER_CODE = """
import os
leaked = []

def score(completion):
    if completion == "hang":
        while True: pass
    if completion == "crash": os._exit(7)
    while completion == "leak":
        leaked.append(bytearray(100 << 20))
    return float(os.getpid())

class Environment:
    def reset(self, task): ...
    def step(self, message):
        if message["content"] == "hang":
            while True: pass
        if message["content"] == "die": os._exit(7)
        return {"done": True, "reward": 1.0}
"""


async def rewards(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each fault of a reward worker."""
    section = RewardFunctionSection(path="user.py:score")
    pool = RewardPool([section], workers=1, timeout_s=TIMEOUT_S, folder=folder, memory_mb=MEMORY_MB)
    await pool.start()

    async def call(completion: str) -> float:
        return (await pool.score({}, "", completion, [1], "stop", uid="train-0")).total

    async def kill() -> None:
        os.kill(int(await call("")), signal.SIGKILL)

    try:
        return {
            "reward worker killed": await times(repeats, kill, call),
            "reward function crashes": await times(repeats, lambda: call("crash"), call),
            "reward function hangs": await times(repeats, lambda: call("hang"), call),
            "reward function leaks": await times(repeats, lambda: call("leak"), call),
        }
    finally:
        await pool.close()


async def environments(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each fault of an environment's process."""
    section = EnvironmentSection(path="user.py:Environment", timeout_s=TIMEOUT_S)
    pool = EnvironmentPool(section, folder=folder)
    await pool.start()

    async def call(content: str) -> None:
        async with pool.session("train-0") as session:
            await session.reset({})
            await session.step({"role": "assistant", "content": content})

    try:
        return {
            "environment hangs": await times(repeats, lambda: call("hang"), call),
            "environment's process dies": await times(repeats, lambda: call("die"), call),
        }
    finally:
        await pool.close()


async def times(
    repeats: int, strike: Callable[[], Awaitable[object]], call: Callable[[str], Awaitable[object]]
) -> list[float]:
    """From a fault until a call is answered again; calls that fail meanwhile are made again.

    TimeoutError where none is within ``DEADLINE_S``.
    """
    found = []
    for _ in range(repeats):
        await call("")
        begun = time.perf_counter()
        with contextlib.suppress(RewardError, EnvironmentFaultError):
            await strike()
        async with asyncio.timeout(DEADLINE_S):
            while not await answers(call):
                pass
        found.append(round(time.perf_counter() - begun, 3))
    return found


async def answers(call: Callable[[str], Awaitable[object]]) -> bool:
    try:
        await call("")
    except (RewardError, EnvironmentFaultError):
        return False
    return True


async def measure(repeats: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "user.py").write_text(USER_CODE)
        return {**await rewards(folder, repeats), **await environments(folder, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args.repeats))
    for name, seconds in found.items():
        sys.stdout.write(
            f"{name:28} median {statistics.median(seconds):6.2f} s, most {max(seconds):6.2f} s\n"
        )
    if args.json is not None:
        report = {"machine": describe_machine(), "timeout_s": TIMEOUT_S, "seconds": found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
