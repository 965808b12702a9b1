"""Runs whose reference follows the policy: the KL falls back to 0 at each refresh, whatever dies."""

from __future__ import annotations

from pathlib import Path

from .runs import assert_sound, finish

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
