"""The controller's own processor time for each trajectory, over scripted engines in virtual time.

    python benchmarks/controller_time.py [--replicas 1024] [--slots 64] [--trajectories 1000000] [--json FILE]

Every step of every task is timed by the thread's processor clock and counted for its side: what runs in the
generators' own processes in a real run (rollout hosts and engines), and all else, which is the controller.
What is left of the process's time is the event loop itself and the engines' timers. The controller's share of
it is that of its steps among all; an upper bound of its time counts all of it. The ledger and the staleness
bound are checked on every line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

from asyncrl.controller import Summary
from asyncrl.simulate.clock import run_virtual
from asyncrl.simulate.run import Recorder, run_simulated
from asyncrl.simulate.workload import SimulationConfig, parse_simulation

GENERATOR_SIDE = ("LocalReplica.", "RolloutHost.")
STATES = ("running", "ready", "training", "trained", "filtered", "dropped", "failed")


class Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed."""

    def __init__(self, inner: Coroutine[Any, Any, Any], spent: Counter[str], steps: Counter[str]) -> None:
        self._inner = inner
        self._spent = spent
        self._steps = steps
        self.__qualname__ = getattr(inner, "__qualname__", type(inner).__name__)
        self._side = "generators" if self.__qualname__.startswith(GENERATOR_SIDE) else "controller"

    def send(self, value: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return self._inner.send(value)
        finally:
            self._spent[self._side] += time.thread_time_ns() - start
            self._steps[self._side] += 1

    def throw(self, *error: Any) -> Any:
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def measure(config: SimulationConfig) -> tuple[Summary, list[dict[str, float]], dict[str, float]]:
    """Run the config; its summary, its lines, and seconds by side."""
    spent: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    recorder = Recorder()

    def make_task(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(Timed(work, spent, steps), loop=loop, **options)

    async def main() -> Summary:
        asyncio.get_running_loop().set_task_factory(make_task)
        return await asyncio.create_task(run_simulated(config, recorder, None))

    start = time.process_time()
    summary = run_virtual(main())
    total = time.process_time() - start
    seconds = {side: nanoseconds / 1e9 for side, nanoseconds in spent.items()}
    loop = total - sum(seconds.values())
    of_controller = loop * steps["controller"] / sum(steps.values())
    return (
        summary,
        recorder.lines,
        {**seconds, "loop": loop, "loop_of_controller": of_controller, "total": total},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Twice as many groups outstanding as slots hold, S = 4, and a learner that keeps up.
    batch = max(1, args.replicas * args.slots // args.group_size)
    steps = max(1, -(-args.trajectories // (batch * args.group_size)))
    config = parse_simulation(
        {
            "workload": {
                "lengths": {"log_normal": {"median": 200, "sigma": 1.0}},
                "generation": {"token_s": 0.02, "prompt_tokens": 64},
                "learner": {"step_s": 5.0},
                "push": {"send_s": 1.0, "pause_s": 0.1},
            },
            "run": {"steps": steps},
            "rollout": {"group_size": args.group_size, "groups_per_step": batch, "max_new_tokens": 2048},
            "schedule": {"pipeline_depth": 1, "max_staleness": 4},
            "generators": {"replicas": args.replicas, "slots": args.slots},
        }
    )
    summary, lines, seconds = measure(config)
    for line in lines:
        assert line.get("staleness/max", 0) <= config.schedule.max_staleness, line
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in STATES), line
    trajectories = summary.counts["trained"] * args.group_size
    by_trajectory = {side: 1e6 * spent / trajectories for side, spent in seconds.items()}
    report = {
        "replicas": args.replicas,
        "slots": args.slots,
        "trajectories": trajectories,
        "steps": summary.steps,
        "lag_max": max(line.get("staleness/max", 0.0) for line in lines),
        "us_per_trajectory": by_trajectory,
        "controller_us": by_trajectory["controller"] + by_trajectory["loop_of_controller"],
        "controller_us_at_most": by_trajectory["controller"] + by_trajectory["loop"],
    }
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if args.json is not None:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
