"""Colocated runs with vLLM and real parts: two processes that take turns, and weights in shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.queues.codec import decode_group, read_records

from .deaths import generators
from .runs import Run, assert_sound, finish, start
from .vllm_models import require_vllm

require_vllm()
pytestmark = pytest.mark.timeout(900)
COLOCATED = (
    "generators.backend=vllm",
    "placement.mode=colocated",
    "schedule.kv_after_swap=recompute",
    "generators.vllm.enforce_eager=true",  # to compile would take longer than the run
    "generators.start_timeout_s=600",
    "learner.start_timeout_s=600",
    "model.create.hidden_size=64",  # vLLM's attention on CPU takes heads of 32 channels and more
    "weight_sync.bucket_mb=0.02",  # several buckets, so that the two in shared memory are used again
)
ENDS_WITHIN_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("colocated-vllm")


@pytest.fixture(autouse=True)
def no_segment_is_left() -> Iterator[None]:
    """Neither a name in shared memory, nor memory without one in a process that still lives."""
    before = segments()
    yield
    assert segments() <= before


def segments() -> set[str]:
    named = {name for name in os.listdir("/dev/shm") if name.startswith(("asyncrl", "torch_"))}
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # it has ended, or is somebody else's
        named |= {f"{process.pid}:{line}" for line in maps.splitlines() if "asyncrl-weights" in line}
    return named


def assert_handed_over(run: Run) -> None:
    """Each push arrived whole, or the run had ended; and after each wake vLLM computed with it."""
    lines = run.metrics[1:]
    assert all(line["weight_sync/canary_diff_mean"] < 1e-4 for line in lines)
    assert all(line["timing_s/turns"] > 0 for line in lines)
    assert all(line["timing_s/weight_sync"] > 0 for line in lines)
    assert all(line["perf/generator_busy"] > 0 for line in lines)


def test_synchronous_turns_train_with_an_evaluation_and_a_checkpoint(folder: Path) -> None:
    run = finish(
        folder,
        *COLOCATED,
        "run.steps=3",
        "schedule.pipeline_depth=0",
        "schedule.max_staleness=0",
        "checkpoint.every=2",
        name="synchronous",
    )
    assert_sound(run, max_staleness=0, capacity=2)
    assert_handed_over(run)
    last = run.metrics[-1]
    assert last["policy_version"] == 3
    assert last["ledger/trained"] == 6
    assert "eval/reward_mean" in last
    assert all(line["turns/carried_samples"] == 0 for line in run.metrics[1:])
    # Taken while the learner is off its device.
    assert (run.folder / "checkpoints" / "step_2" / "manifest.json").exists()
    assert (run.folder / "checkpoints" / "step_3" / "hf" / "model.safetensors").exists()


def test_unfinished_answers_are_carried_over_and_a_killed_generator_ends_the_run(folder: Path) -> None:
    """With fewer slots than answers, some are always unfinished when a batch is ready."""
    run = start(
        folder,
        *COLOCATED,
        "run.steps=100000",
        "generators.slots=4",
        "eval.every=0",
        "log.rollouts_every=1",
        name="carried",
    )
    try:
        run.wait_for_steps(3)
        (generator,) = generators(run)
        generator.send_signal(signal.SIGKILL)
        assert run.wait(ENDS_WITHIN_S) == 1, run.text
        run.assert_nothing_left(within_s=30)
    finally:
        for process in run.processes():
            process.kill()
    assert "generator 0 is out with" in run.text
    assert_sound_while_it_lasted(run)
    assert_handed_over(run)
    assert sum(line["turns/carried_samples"] for line in run.metrics[1:]) > 0
    assert spans_versions(run), "no answer went on under a newer version"


def assert_sound_while_it_lasted(run: Run) -> None:
    for line in run.metrics:
        assert line.get("staleness/max", 0) <= 2
        assert line["queue/outstanding"] <= 4


def spans_versions(run: Run) -> bool:
    for path in sorted((run.folder / "rollouts").glob("step_*.msgpack")):
        with path.open("rb") as file:
            for record in read_records(file):
                for answer in decode_group(record).trajectories:
                    assert (answer.versions[1:] >= answer.versions[:-1]).all()
                    if answer.versions[0] < answer.versions[-1]:
                        return True
    return False
