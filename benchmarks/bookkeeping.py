"""What the controller's plain objects cost: budget, queue and ledger a group, and the codec by raw copies.

    python benchmarks/bookkeeping.py [--groups 200000] [--json FILE]

A group goes through all of its life: admitted, submitted, ready, put, taken, trained, retired; the books are
checked at each step, as in a run. Half of the groups overtake others, so that consumption by expiry has work
to do. The codec encodes and decodes groups of 8 answers; a raw copy moves the same bytes with numpy. Times
are processor times of one thread, and each is the best of five.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from asyncrl.ledger import Ledger
from asyncrl.queues.budget import StalenessBudget
from asyncrl.queues.codec import decode_group, encode_group
from asyncrl.queues.experience import ExperienceQueue
from asyncrl.types import Group, GroupMeta, ReadyGroup, Trajectory, TrajectoryMeta

REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Processor time of ``work``, the best of ``REPEATS``."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def life_of_groups(groups: int, batch: int, depth: int, bound: int) -> None:
    """Take ``groups`` groups through the budget, the queue and the ledger, a step after the other."""
    steps = groups // batch
    budget = StalenessBudget(batch, depth, bound, publish_every=1, steps=steps)
    queue = ExperienceQueue(budget, (depth + 1) * batch, max_bytes=1 << 40)
    ledger = Ledger()
    waiting: list[int] = []
    while budget.version < steps:
        while budget.admissible() > 0:
            ordinal = ledger.next_ordinal
            budget.admit(ordinal)
            ledger.submit(ordinal, f"task-{ordinal}")
            waiting.append(ordinal)
        waiting.sort(key=lambda ordinal: ordinal + (ordinal % 2) * batch)  # odd ones take a step longer
        while True:
            taken = queue.take()
            if isinstance(taken, list):
                break
            ordinal = waiting.pop(0)
            ledger.mark_ready(ordinal)
            queue.put(landed(ordinal, budget))
        for group in taken:
            ledger.start_training(group.meta.ordinal)
        version = budget.version
        budget.complete_update()
        for group in taken:
            budget.retire(group.meta.ordinal)
            ledger.retire(group.meta.ordinal, "trained", "trained", step=version, lag=0, reward_mean=0.5)
        ledger.check()
        budget.set_live(budget.version)


def landed(ordinal: int, budget: StalenessBudget) -> ReadyGroup:
    start = budget.start_version(ordinal)
    answers = tuple(TrajectoryMeta(i, 16, 64, 0.5, "stop", ((start, 64),)) for i in range(8))
    meta = GroupMeta(ordinal, f"task-{ordinal}", start, answers, checksum=0, nbytes=8192)
    return ReadyGroup(meta, b"", budget.expiries()[ordinal])


def group_of(tokens: int) -> Group:
    rng = np.random.default_rng(0)
    answers = tuple(
        Trajectory(
            sample=i,
            attempt=0,
            prompt_ids=np.arange(64, dtype=np.int32),
            token_ids=rng.integers(0, 50_000, tokens, dtype=np.int32),
            loss_mask=np.ones(tokens, np.bool_),
            logprobs=-rng.random(tokens, dtype=np.float32),
            versions=np.zeros(tokens, np.int32),
            reward=0.5,
            finish_reason="stop",
        )
        for i in range(8)
    )
    return Group(0, "task-0", 0, answers)


def codec(tokens: int) -> dict[str, float]:
    """GB/s (10**9 bytes) for a group of 8 answers of ``tokens`` tokens."""
    group = group_of(tokens)
    payload = encode_group(group)
    times = max(1, 50_000_000 // len(payload))
    raw, target = np.frombuffer(payload, np.uint8), np.empty(len(payload), np.uint8)

    def repeat(work: Callable[[], object]) -> Callable[[], None]:
        def all_of_it() -> None:
            for _ in range(times):
                work()

        return all_of_it

    gigabytes = times * len(payload) / 1e9
    return {
        "payload_bytes": len(payload),
        "encode_gb_s": gigabytes / seconds(repeat(lambda: encode_group(group))),
        "decode_gb_s": gigabytes / seconds(repeat(lambda: decode_group(payload))),
        "raw_copy_gb_s": gigabytes / seconds(repeat(lambda: np.copyto(target, raw))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=64, help="groups a step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lives = {
        f"D={depth}, S={bound}": 1e6
        * seconds(partial(life_of_groups, args.groups, args.batch, depth, bound))
        / args.groups
        for depth, bound in ((0, 0), (1, 2), (4, 8))
    }
    report = {
        "us_per_group": lives,
        "groups_per_s": {schedule: 1e6 / us for schedule, us in lives.items()},
        "codec": {f"8 x {tokens} tokens": codec(tokens) for tokens in (32, 1024, 32_768)},
    }
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if args.json is not None:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
