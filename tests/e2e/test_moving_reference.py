"""Runs whose reference follows the policy: the KL falls back to 0 at each refresh, whatever dies."""

from __future__ import annotations

import signal
from pathlib import Path

from .deaths import wait_until
from .runs import assert_sound, finish, start

MOVING = (
    "algorithm.kl=loss",
    "algorithm.kl_coef=0.001",
    "reference.refresh_every=2",
    "reference.replicas=2",
    "data.eval=null",
    "learner.lr=1.0e-2",
    "schedule.pipeline_depth=0",
    "schedule.max_staleness=0",
)


def test_the_kl_falls_back_to_nothing_after_each_refresh(tmp_path: Path) -> None:
    run = finish(tmp_path, *MOVING, "run.steps=6", "run.deterministic=true", name="moving")
    assert_sound(run, max_staleness=0, capacity=2)
    lines = run.metrics[1:]
    assert [line["reference/version"] for line in lines] == [0, 0, 2, 2, 4, 4]
    kl = [line["actor/reference_kl"] for line in lines]
    # Of the step after a refresh, policy and reference are the same; one update later they are not.
    assert max(map(abs, kl[::2])) < 1e-5 < 1e-4 < min(map(abs, kl[1::2])), kl
    again = finish(tmp_path, *MOVING, "run.steps=6", "run.deterministic=true", name="again")
    assert [line.get("model/checksum") for line in again.metrics] == [
        line.get("model/checksum") for line in run.metrics
    ]


def test_an_average_over_overlapped_pushes_starts_over_when_an_actor_dies(tmp_path: Path) -> None:
    run = start(
        tmp_path,
        *MOVING,
        "run.steps=100000",
        "reference.ema=0.5",
        "reference.refresh_every=4",
        "schedule.pipeline_depth=1",
        "schedule.max_staleness=1",
        "weight_sync.overlap=true",
        name="average",
    )
    try:
        run.wait_for_steps(6)
        victim = next(p for p in run.processes() if "RoleActor" in " ".join(p.cmdline()))
        victim.kill()
        wait_until(
            run, "the reference is whole again", 120, lambda: run.metrics[-1]["reference/restored"] == 1
        )
        restored_at = len(run.metrics)
        wait_until(run, "a refresh", 120, lambda: run.metrics[-1]["reference/version"] > restored_at + 4)
        run.interrupt(signal.SIGINT)
        assert run.wait(60) == 130, run.text
        run.assert_nothing_left(within_s=15)
    finally:
        for process in run.processes():
            process.kill()
    assert_sound(run, max_staleness=1, capacity=4)
    lines = run.metrics[1:]
    versions = [line["reference/version"] for line in lines]
    # A group waits one step at most: a batch may be of an older reference than the one before, not than the
    # one before that.
    assert all(version >= max(versions[: i - 1], default=0) for i, version in enumerate(versions) if i > 1)
    # One version was taken out of turn.
    assert len({version for version in versions if version % 4}) <= 1
    assert run.metrics[-1]["ledger/failed"] == 0
