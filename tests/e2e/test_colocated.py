"""Colocated runs with real parts: one process a slot, the same parameters, turns under the controller."""

from __future__ import annotations

from pathlib import Path

from asyncrl.queues.codec import decode_group, read_records

from .runs import assert_sound, finish

COLOCATED = ("placement.mode=colocated", "schedule.kv_after_swap=recompute")


def test_two_slots_carry_unfinished_answers_over_their_updates(tmp_path: Path) -> None:
    """With more answers than slots, some are always unfinished when a batch is ready."""
    run = finish(
        tmp_path,
        *COLOCATED,
        "run.steps=6",
        "learner.ranks=2",
        "generators.replicas=2",
        "generators.slots=4",
        "schedule.pipeline_depth=1",
        "schedule.max_staleness=2",
        "eval.every=3",
        "log.rollouts_every=1",
        name="turns",
    )
    assert_sound(run, max_staleness=2, capacity=4)
    lines = run.metrics[1:]
    assert lines[-1]["policy_version"] == 6
    assert [line["step"] for line in lines if "eval/reward_mean" in line] == [3, 6]
    assert sum(line["turns/carried_groups"] for line in lines) > 0
    assert sum(line["turns/carried_samples"] for line in lines) > 0
    assert all(line["turns/kv_freed_mb"] > 0 for line in lines)
    # After each wake both engines computed what the learner does with the same parameters.
    assert all(line["weight_sync/canary_diff_max"] < 1e-3 for line in lines)
    assert all(line["timing_s/turns"] > 0 for line in lines)
    files = sorted((run.folder / "rollouts").glob("step_*.msgpack"))
    answers = []
    for path in files:
        with path.open("rb") as file:
            answers += [t for record in read_records(file) for t in decode_group(record).trajectories]
    assert len(answers) == 6 * 2 * 4
    assert all((t.versions[1:] >= t.versions[:-1]).all() for t in answers)
    assert any(t.versions[0] < t.versions[-1] for t in answers), "no answer went on under a newer version"
