"""From a reward model's scores to groups that hold them, in the model's process.

Invariants:
- A score is one more part of an answer's reward, by name and with its weight, beside those of functions.
- A score that is not finite is that answer's failure, as a function's would be: never a number in its place.
- A group whose payload is not the one that its meta speaks of is refused before anything is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config import REWARD_MODEL
from asyncrl.errors import RewardValueError, RoleError
from asyncrl.queues.codec import checksum, decode_group, encode_group, group_meta
from asyncrl.roles.base import ScoredMeta, ScoringWorker
from asyncrl.types import Group, GroupMeta, SampleFailure, Task, Trajectory


def scored(
    worker: ScoringWorker,
    asked: Sequence[tuple[Task, GroupMeta]],
    payloads: Sequence[bytes],
    weight: float,
) -> tuple[ScoredMeta, list[bytes]]:
    """The groups of ``payloads`` with ``weight`` times the worker's scores in their rewards, encoded anew."""
    start = time.perf_counter()
    groups = [_decoded(meta, payload) for (_, meta), payload in zip(asked, payloads, strict=True)]
    ratings = worker.rate([(task, group) for (task, _), group in zip(asked, groups, strict=True)])
    metas, records = [], []
    for (_, meta), group, scores in zip(asked, groups, ratings.scores, strict=True):
        whole, failures = with_scores(group, scores, weight)
        record = encode_group(whole)
        metas.append(group_meta(whole, record, (*meta.failures, *failures)))
        records.append(record)
    return ScoredMeta(tuple(metas), time.perf_counter() - start, ratings.cut), records


def with_scores(
    group: Group, scores: Sequence[float], weight: float
) -> tuple[Group, tuple[SampleFailure, ...]]:
    """``group`` with ``weight`` times one score an answer in its rewards, and the answers that have none.

    ``scores``: in the order of ``group.answers``; those of further rows do not count.
    """
    if len(scores) != len(group.answers):
        raise RoleError(
            f"the reward model gave {len(scores)} scores for the {len(group.answers)} answers of {group.uid}"
        )
    kept: dict[tuple[int, int], Trajectory] = {}
    failures = []
    for answer, score in zip(group.answers, scores, strict=True):
        if answer.row:
            first = kept.get((answer.sample, 0))
            if first is not None:
                row = replace(answer, reward=first.reward, rewards=first.rewards)
                kept[answer.sample, answer.row] = row
            continue
        total = answer.reward + weight * score
        if math.isfinite(total):
            rewards = {**answer.rewards, REWARD_MODEL: score}
            kept[answer.sample, 0] = replace(answer, reward=total, rewards=rewards)
        else:
            failures.append(_failure(group.uid, answer, score, weight))
    baseline = None if group.baseline is None else kept.pop((group.baseline.sample, 0), None)
    return replace(group, trajectories=tuple(kept.values()), baseline=baseline), tuple(failures)


def _failure(uid: str, answer: Trajectory, score: float, weight: float) -> SampleFailure:
    found = (
        f"{score}"
        if not math.isfinite(score)
        else f"a weighted sum of {answer.reward} + {weight:g} * {score}"
    )
    message = f"{uid}: the reward model: found {found}; expected a finite number"
    return SampleFailure(answer.sample, answer.attempt, RewardValueError.__name__, message)


def _decoded(meta: GroupMeta, payload: bytes) -> Group:
    found = checksum(payload)
    if found != meta.checksum:
        raise RoleError(
            f"the reward model got {meta.uid} with checksum {found:#x}, expected {meta.checksum:#x}"
        )
    return decode_group(payload)
