"""Colocated runs with real parts: one process a slot, the same parameters, turns under the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.live_bytes import LiveBytes
from asyncrl.queues.codec import decode_group, read_records
from tests.e2e.colocated_worker import ANSWER, take_turns
from tests.e2e.deepspeed_worker import run_ranks
from tests.e2e.tiny_policy import save_tiny_policy

from .runs import assert_sound, finish

PHASES = ["start", "rollout", "before update", "in update", "after update", "push"]
COLOCATED = ("placement.mode=colocated", "schedule.kv_after_swap=recompute")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("colocated") / "model")


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


def test_a_critic_and_a_reference_that_follows_have_processes_of_their_own(tmp_path: Path) -> None:
    """The reference alone is sent weights: those that the generators have in common with the learner."""
    run = finish(
        tmp_path,
        *COLOCATED,
        "run.steps=4",
        "algorithm.advantage=gae",
        "algorithm.kl=loss",
        "reference.refresh_every=2",
        "schedule.pipeline_depth=0",
        "schedule.max_staleness=0",
        "learner.lr=1.0e-2",
        "data.eval=null",
        name="roles",
    )
    assert_sound(run, max_staleness=0, capacity=2)
    lines = run.metrics[1:]
    assert [line["reference/version"] for line in lines] == [0, 0, 2, 2]
    kl = [line["actor/reference_kl"] for line in lines]
    assert max(map(abs, kl[::2])) < 1e-5 < min(map(abs, kl[1::2])), kl
    assert all(line["critic/grad_norm"] > 0 for line in lines)
    assert all(line["weight_sync/canary_diff_max"] < 1e-3 for line in lines)


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"), [(0, 1, "float32"), (2, 2, "float32"), (2, 1, "bfloat16")]
)
def test_updates_and_pushes_leave_the_weights_where_they_are_and_the_other_side_without_memory(
    folder: Path, stage: int, ranks: int, dtype: str
) -> None:
    updates = 3
    for found in run_ranks(take_turns, folder, stage=stage, ranks=ranks, dtype=dtype, updates=updates):
        addresses = found["addresses"]
        assert all(each == addresses[0] for each in addresses), "an update or a push moved a tensor"
        assert [echo.version for echo in found["echoes"]] == [1, 2, 3]
        assert len({echo.checksum for echo in found["echoes"]}) == 1
        assert max(found["differences"]) < (1e-4 if dtype == "float32" else 0.1)
        # Each answer went through all turns, and no token was lost on the way.
        assert all(len(versions) == ANSWER for versions in found["versions"])
        assert all(set(versions) == {0, 1, 2, 3} for versions in found["versions"])
        by_phase: dict[str, list[LiveBytes]] = {}
        for phase, sampled in found["bytes"]:
            by_phase.setdefault(phase, []).append(sampled)
        assert list(by_phase) == PHASES
        parameters = by_phase["start"][0].parameters
        for phase, samples in by_phase.items():
            assert len(samples) == (1 if phase == "start" else updates)
            for sampled in samples:
                assert sampled.staging == 0
                assert sampled.parameters == parameters
                assert (sampled.kv > 0) == (phase == "rollout")
                assert (sampled.gradients > 0) == (phase == "in update")
        values = parameters / (4 if dtype == "float32" else 2)
        assert by_phase["push"][-1].optimizer >= 8 * values / ranks, "the moments alone take 8 bytes a value"
        # Nobody else holds as much as half a copy of the weights.
        owned = by_phase["rollout"][-1].total
        assert found["total"] - owned < parameters / 2
