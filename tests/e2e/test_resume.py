"""Real runs that are killed or stopped and started again: nothing lost, nothing twice, and equal bits."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .runs import START_TIMEOUT_S, Run, finish, start

STEPS = 6
SYNC = (
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "schedule.pipeline_depth=0",
    "schedule.max_staleness=0",
    "checkpoint.every=1",
    "data.eval=null",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Run:
    return finish(folder, *SYNC, name="undisturbed")


def wait_until(run: Run, what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert run.process.poll() is None, f"ended before {what}:\n{run.text}"
        assert time.monotonic() < deadline, f"not within {START_TIMEOUT_S} s: {what}\n{run.text}"
        time.sleep(0.01)


def steps_on_disk(run: Run) -> list[int]:
    return sorted(int(p.parent.name[5:]) for p in run.folder.glob("checkpoints/step_*/manifest.json"))


def is_writing(run: Run) -> bool:
    return any(p.name.startswith(".step_") for p in run.folder.glob("checkpoints/.step_*"))


def kill(run: Run) -> None:
    """SIGKILL to the controller alone: its actors have to end by themselves, while the next run begins."""
    run.interrupt(signal.SIGKILL)
    run.wait(30)


def assert_one_history(run: Run, steps: int) -> None:
    assert [line["step"] for line in run.metrics] == list(range(steps + 1))
    ordinals = sorted(end["ordinal"] for end in run.ledger)
    assert ordinals == list(range(len(ordinals))), "an ordinal was lost or retired twice"
    last = run.metrics[-1]
    assert last["ledger/submitted"] == len(ordinals)
    assert last["policy_version"] == steps


def numbers(run: Run) -> list[dict[str, Any]]:
    """What each step computed, without its timings."""
    kept = ("reward/", "response_length/", "actor/", "staleness/", "ledger/trained")
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in run.metrics[1:]]


def test_a_controller_killed_in_a_checkpoint_goes_on_with_equal_bits(folder: Path, undisturbed: Run) -> None:
    killed = start(folder, *SYNC, name="killed")
    # Or just after it, where that was too fast to be seen.
    wait_until(
        killed,
        "a checkpoint being written",
        lambda: bool(steps := steps_on_disk(killed)) and steps[-1] >= (1 if is_writing(killed) else 2),
    )
    kill(killed)
    run = finish(folder, *SYNC, name="killed")
    killed.assert_nothing_left(within_s=30)
    assert_one_history(run, steps=STEPS)
    assert "going on from" in run.text
    assert run.metrics[-1]["model/checksum"] == undisturbed.metrics[-1]["model/checksum"]
    assert numbers(run) == numbers(undisturbed)
    again = start(folder, *SYNC, name="killed")
    assert again.wait() == 0
    assert "nothing is left to do" in again.text


def test_sigterm_takes_a_checkpoint_that_an_overlapped_run_goes_on_from(folder: Path) -> None:
    settings = ("checkpoint.every=0", "schedule.pipeline_depth=1", "eval.every=2", "run.steps=100000")
    first = start(folder, *settings, name="stopped")
    first.wait_for_steps(2)
    first.interrupt(signal.SIGTERM)
    assert first.wait(120) == 143, first.text
    first.assert_nothing_left(within_s=15)
    stopped_at = steps_on_disk(first)[-1]
    assert stopped_at == first.metrics[-1]["step"] >= 2
    steps = stopped_at + 2
    run = finish(folder, *settings[:-1], f"run.steps={steps}", name="stopped")
    assert_one_history(run, steps=steps)
    assert f"run.steps was 100000 and is {steps} from here on" in run.text
    assert all(line["staleness/max"] <= 2 for line in run.metrics[1:])
    evaluated = {line["step"] for line in run.metrics if "eval/reward_mean" in line}
    assert {0, steps} <= evaluated
    best = json.loads((run.folder / "checkpoints" / "best.json").read_text())["step"]
    assert best in evaluated
    assert steps in steps_on_disk(run)
    kept = [p.name for p in run.folder.glob("checkpoints/*_*") if p.name.endswith(f"_{best}")]
    assert kept in ([f"step_{best}"], [f"weights_{best}"])
    assert not [p for p in run.folder.glob("checkpoints/weights_*") if p.name != f"weights_{best}"]


def is_starting_ray(run: Run) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("gcs_server" in process.name() for process in run.processes())
    return False


@pytest.mark.parametrize(
    ("number", "code", "reached"),
    [
        (signal.SIGTERM, 143, is_starting_ray),
        (signal.SIGINT, 130, lambda run: "starting all actors" in run.text),
    ],
    ids=["SIGTERM while Ray starts", "SIGINT while actors load"],
)
def test_a_signal_before_training_ends_the_run_at_once(
    folder: Path, number: signal.Signals, code: int, reached: Callable[[Run], bool]
) -> None:
    name = f"early-{code}"
    run = start(folder, "run.steps=1", name=name)
    wait_until(run, "its start", lambda: reached(run))
    run.interrupt(number)
    # Loading, the first push and an evaluation are left out: what takes time is Ray's own end.
    assert run.wait(60) == code, run.text
    run.assert_nothing_left(within_s=30)
    assert "before training began" in run.text
    assert "evaluating" not in run.text
    assert_one_history(finish(folder, "run.steps=1", name=name), steps=1)


COLOCATED = ("placement.mode=colocated", "schedule.kv_after_swap=recompute")


def test_a_run_killed_colocated_and_split_goes_on_the_other_way_with_equal_bits(
    folder: Path, undisturbed: Run
) -> None:
    """Against an undisturbed split run: a checkpoint does not depend on who shares a process."""
    marks = []
    placement: tuple[str, ...]
    for placement in (COLOCATED, ()):
        run = start(folder, *SYNC, *placement, name="moved")
        newest = max(steps_on_disk(run), default=0)
        wait_until(
            run,
            "a checkpoint of its own",
            lambda run=run, newest=newest: max(steps_on_disk(run), default=0) > newest,  # type: ignore[misc]
        )
        kill(run)
        marks.append(run)
    run = finish(folder, *SYNC, *COLOCATED, name="moved")
    for killed in marks:
        killed.assert_nothing_left(within_s=30)
    assert_one_history(run, steps=STEPS)
    assert "placement.mode was split and is colocated from here on" in run.text
    assert run.metrics[-1]["model/checksum"] == undisturbed.metrics[-1]["model/checksum"]
    assert numbers(run) == numbers(undisturbed)
    # The loaded weights are those that the engine computes with, after each wake.
    assert run.metrics[-1]["weight_sync/canary_diff_max"] < 1e-3


def test_a_colocated_run_killed_with_answers_carried_over_loses_none(folder: Path) -> None:
    settings = (
        *COLOCATED,
        # Takes the place of the parameters that both sides have, in each update.
        "algorithm.kl=loss",
        "reference.place=learner",
        "run.steps=5",
        "generators.slots=4",
        "schedule.pipeline_depth=1",
        "schedule.max_staleness=2",
        "checkpoint.every=1",
        "data.eval=null",
    )
    first = start(folder, *settings, name="carried")
    first.wait_for_steps(2)
    kill(first)
    run = finish(folder, *settings, name="carried")
    first.assert_nothing_left(within_s=30)
    assert_one_history(run, steps=5)
    assert "going on from" in run.text
    assert all(line["staleness/max"] <= 2 for line in run.metrics[1:])
    assert sum(line["turns/carried_samples"] for line in run.metrics[1:]) > 0
    assert run.metrics[-1]["ledger/trained"] == 5 * 2
    assert all(line["weight_sync/canary_diff_max"] < 1e-3 for line in run.metrics[1:])


def test_another_model_and_a_used_folder_exit_with_2(folder: Path, undisturbed: Run) -> None:
    for override, words in (
        ("checkpoint.resume=never", "choose another run.name"),
        (
            "model.create.hidden_size=48",
            "hidden_size: found 48, the checkpoint was made with 32",
        ),
    ):
        run = start(folder, *SYNC, override, name="undisturbed")
        assert run.wait() == 2, run.text
        assert words in run.text
    assert_one_history(undisturbed, steps=STEPS)


def test_a_run_goes_on_on_two_ranks_with_a_critic_and_a_reference_that_moved(folder: Path) -> None:
    settings = (
        "algorithm.advantage=gae",
        "algorithm.kl=loss",
        "reference.refresh_every=2",
        "reference.ema=0.5",
        "checkpoint.every=1",
        "schedule.pipeline_depth=0",
        "eval.every=0",
    )
    finish(folder, *settings, "run.steps=3", name="wide")
    run = finish(folder, *settings, "run.steps=5", "learner.ranks=2", "critic.ranks=2", name="wide")
    assert_one_history(run, steps=5)
    # Refreshed at 2, and so it was when step 3 was annotated, before and after the resume.
    assert [line["reference/version"] for line in run.metrics[1:]] == [0, 0, 2, 2, 4]
    assert all(line["reference/restored"] == 0 for line in run.metrics[1:])
