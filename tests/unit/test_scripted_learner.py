from __future__ import annotations

import asyncio

import pytest

from asyncrl.errors import InvariantError, LearnerError, StalenessError, WeightSyncError
from asyncrl.learners.base import Learner
from asyncrl.learners.scripted import ScriptedLearner, scripted_checksum, seconds_by_tokens
from asyncrl.types import Batch, group_lag
from tests.unit.recorded_batches import batch_of, record_batch


def batch(version: int) -> Batch:
    return batch_of(record_batch(version), version)


async def test_it_records_what_it_saw_and_counts_versions() -> None:
    learner = ScriptedLearner(max_staleness=2)
    as_protocol: Learner = learner
    await as_protocol.start()
    for version in range(4):
        result = await as_protocol.step(batch(version))
        assert not result.skipped
    assert learner.version == 4
    assert learner.ordinals == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert learner.lags[3] == tuple(group_lag(3, item.meta) for item in batch(3).items)
    assert max(lag for lag in learner.lags[3] if lag is not None) == 2


async def test_a_bad_step_moves_no_version() -> None:
    learner = ScriptedLearner(max_staleness=2, bad_steps={1})
    await learner.start()
    skipped = [(await learner.step(batch(v))).skipped for v in (0, 1, 1)]
    assert skipped == [False, True, False]
    assert learner.version == 2


async def test_a_stale_batch_is_refused() -> None:
    learner = ScriptedLearner(max_staleness=1, version=3)
    await learner.start()
    with pytest.raises(StalenessError, match="lag 2 in the update of version 3, expected 0 to max"):
        await learner.step(batch(3))


async def test_a_batch_for_another_version_is_refused() -> None:
    learner = ScriptedLearner(max_staleness=5)
    await learner.start()
    with pytest.raises(InvariantError, match="batch for version 1, the policy is at 0"):
        await learner.step(batch(1))


async def test_a_death_is_for_ever() -> None:
    learner = ScriptedLearner(max_staleness=2, dies_at=1)
    await learner.start()
    await learner.step(batch(0))
    for _ in range(2):
        with pytest.raises(LearnerError, match="died in step call 1"):
            await learner.step(batch(1))
    with pytest.raises(LearnerError, match="died"):
        await learner.checksum()


async def test_pushes_fail_by_script_and_name_the_version() -> None:
    learner = ScriptedLearner(max_staleness=2, failed_pushes={0}, version=3)
    await learner.start()
    with pytest.raises(WeightSyncError, match="push call 0 of version 3"):
        await learner.push(3)
    report = await learner.push(3)
    assert report.checksum == await learner.checksum()
    assert learner.pushed == [3]
    with pytest.raises(InvariantError, match="push version 4, have only 3"):
        await learner.push(4)


async def test_a_copy_is_made_between_updates_and_is_what_pushes_send() -> None:
    learner = ScriptedLearner(max_staleness=2, step_s=0.01)
    await learner.start()
    await learner.copy_out(0)
    running = asyncio.create_task(learner.step(batch(0)))
    await asyncio.sleep(0)
    with pytest.raises(InvariantError, match="copy version 0 out in the middle of an update"):
        await learner.copy_out(0)
    assert (await learner.push(0)).version == 0
    await running
    with pytest.raises(InvariantError, match="push version 1, the copy is of 0"):
        await learner.push(1)
    await learner.copy_out(1)
    assert (await learner.push(1)).checksum == scripted_checksum(1)


async def test_time_passes_by_asyncio_sleep_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    learner = ScriptedLearner(
        max_staleness=2, start_s=3.0, step_s=seconds_by_tokens(100.0), push_s=lambda version: version + 0.5
    )
    await learner.start()
    result = await learner.step(batch(0))
    await learner.push(1)
    tokens = sum(t.prompt_tokens + t.response_tokens for i in batch(0).items for t in i.meta.trajectories)
    assert slept == [3.0, tokens / 100.0, 1.5]
    assert result.train_s == tokens / 100.0


async def test_calls_before_start_and_after_close_are_refused() -> None:
    learner = ScriptedLearner(max_staleness=2)
    with pytest.raises(LearnerError, match="was not started"):
        await learner.step(batch(0))
    await learner.start()
    await learner.close()
    with pytest.raises(LearnerError, match="was closed"):
        await learner.push(0)
