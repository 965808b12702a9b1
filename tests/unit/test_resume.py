"""The real controller, interrupted at any moment and resumed: nothing lost, nothing twice.

Runs are of scripted parts under the virtual clock; folders, files and the choice of a checkpoint are real.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.manifest import verify
from asyncrl.checkpoint.resume import prepare
from asyncrl.checkpoint.rollback import Line, roll_back
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.export import find_checkpoint
from asyncrl.learners.scripted import ScriptedLearner

from .resume_harness import (
    OF,
    assert_one_history,
    config_in,
    leg,
    lines,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_that_is_killed_again_and_again_ends_as_one_history(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    depth = data.draw(st.integers(0, 2), label="pipeline_depth")
    overlap = data.draw(st.booleans(), label="overlap")
    config = config_in(
        tmp_path_factory.mktemp("run"),
        "run.steps=6",
        f"eval.every={data.draw(st.sampled_from([0, 2]), label='eval.every')}",
        f"schedule.pipeline_depth={depth}",
        f"schedule.max_staleness={depth + 1}",
        f"weight_sync.overlap={overlap}",
        f"checkpoint.every={data.draw(st.integers(1, 3), label='every')}",
    )
    for _ in range(data.draw(st.integers(1, 4), label="kills")):
        after_s = data.draw(st.floats(0.0, 14.0), label="killed after")
        if leg(config, killed_after_s=after_s).summary is not None:
            break
    final = leg(config)
    if final.summary is not None and final.resumed is not None and not final.resumed.finished:
        assert final.summary.policy_version == 6
    assert_one_history(config)


def test_what_was_ready_is_trained_without_being_sampled_again(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=6", "schedule.pipeline_depth=2", "schedule.max_staleness=3")
    leg(config, stop_at_step=2)
    final = leg(config)
    assert final.resumed is not None
    ready = {group.meta.ordinal for group, _ in final.resumed.ready}
    assert ready, "nothing was ready when the run was stopped"
    assert ready <= {o for ordinals in final.learner.ordinals for o in ordinals}
    assert final.learner.version == 6
    assert_one_history(config)


def test_a_signal_takes_a_checkpoint_of_the_step_it_ended_after(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=9", "checkpoint.every=0")
    first = leg(config, stop_at_step=3)
    assert first.summary is not None
    assert first.summary.stopped_by == "SIGTERM"
    (step,) = [s for s in CheckpointStore(config.run.folder / "checkpoints").steps() if s]
    assert step == first.summary.policy_version
    second = leg(config)
    assert second.learner.batches[0].version == step
    assert second.summary is not None
    assert second.summary.steps == 9 - step
    assert_one_history(config)


def test_lines_after_the_checkpoint_move_aside(tmp_path: Path) -> None:
    undisturbed = config_in(tmp_path / "undisturbed", "run.steps=8", "checkpoint.every=3")
    leg(undisturbed)
    times = [line["time"] for line in lines(undisturbed, "metrics.jsonl")]
    config = config_in(tmp_path, "run.steps=8", "checkpoint.every=3")
    leg(config, killed_after_s=(times[5] + times[6]) / 2)
    before = lines(config, "metrics.jsonl")
    assert max(line["step"] for line in before) == 5
    leg(config)
    moved = lines(config, "metrics.rolled_back.jsonl")
    assert {line["step"] for line in moved} == {line["step"] for line in before if line["step"] > 3}
    assert_one_history(config)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path, "run.steps=5")
    leg(config, stop_at_step=3)
    store = CheckpointStore(config.run.folder / "checkpoints")
    before, newest = store.steps()[-2:]
    path = store.path(newest) / "state.json"
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"Step"'))
    final = leg(config)
    assert final.resumed is not None
    assert final.resumed.state.step == before
    assert f"{path} is damaged" in caplog.text
    assert_one_history(config)


def test_only_damaged_checkpoints_are_refused_with_every_reason(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=4")
    leg(config)
    for folder in (config.run.folder / "checkpoints").glob("step_*"):
        (folder / "learner" / "version").write_bytes(b"7")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .*step_4/learner/version.*step_3/"):
        prepare(config, OF)


def test_a_lost_line_of_the_ledger_is_noticed(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=4")
    leg(config, stop_at_step=2)
    path = config.run.folder / "ledger.jsonl"
    _, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(rest))
    with pytest.raises(CheckpointError, match="lines were lost or repeated"):
        prepare(config, OF)


def test_a_finished_run_has_nothing_left_to_do_until_it_is_to_be_longer(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=3")
    leg(config)
    resumed = prepare(config, OF)
    assert resumed is not None
    assert resumed.finished
    longer = config_in(tmp_path, "run.steps=5")
    final = leg(longer)
    assert final.learner.batches[0].version == 3
    metrics = lines(longer, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=1", r"run\.seed: found 1, the checkpoint was made with 0"),
        ("run.steps=1", r"run\.steps: found 1, the checkpoint is at policy version [23]"),
        ("algorithm.advantage=gae", "the checkpoint holds no critic"),
    ],
)
def test_what_cannot_go_on_is_refused_and_nothing_changes(tmp_path: Path, override: str, words: str) -> None:
    leg(config_in(tmp_path, "run.steps=6"), stop_at_step=2)
    config = config_in(tmp_path, "run.steps=6", override)
    files = {p: p.read_bytes() for p in config.run.folder.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=words):
        prepare(config, OF)
    assert {p: p.read_bytes() for p in config.run.folder.rglob("*") if p.is_file()} == files


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=6")
    leg(config, stop_at_step=2)
    with pytest.raises(ConfigError, match=r"data\.train: the prompts, or their order"):
        prepare(config, Origin("other data", {}))


def test_other_changes_are_said_and_what_was_sampled_under_others_is_sampled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leg(
        config_in(tmp_path, "run.steps=6", "schedule.pipeline_depth=2", "schedule.max_staleness=3"),
        stop_at_step=2,
    )
    config = config_in(
        tmp_path, "run.steps=7", "learner.lr=1.0e-4", "schedule.pipeline_depth=0", "schedule.max_staleness=0"
    )
    final = leg(config)
    assert final.resumed is not None
    assert final.resumed.ready == ()
    for text in (
        "run.steps was 6 and is 7",
        "lr was 1e-05 and is 0.0001",
        "ready groups were sampled",
    ):
        assert text in caplog.text
    assert_one_history(config)


def test_never_and_folders_without_a_checkpoint_name_both_ways_out(tmp_path: Path) -> None:
    leg(config_in(tmp_path, "run.steps=2"))
    never = config_in(tmp_path, "run.steps=2", "checkpoint.resume=never")
    with pytest.raises(ConfigError, match=r"choose another run\.name.*set checkpoint\.resume to auto"):
        prepare(never, OF)
    other = config_in(tmp_path / "other", "run.steps=2")
    other.run.folder.mkdir(parents=True)
    (other.run.folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=r"choose another run\.name, or delete the folder"):
        prepare(other, OF)


def test_a_path_starts_another_run_from_this_ones_checkpoint(tmp_path: Path) -> None:
    first = config_in(tmp_path, "run.steps=4")
    leg(first, stop_at_step=2)
    step = CheckpointStore(first.run.folder / "checkpoints").steps()[-1]
    source = first.run.folder / "checkpoints" / f"step_{step}"
    config = config_in(tmp_path / "branch", "run.steps=4", f"checkpoint.resume={source}")
    final = leg(config)
    assert final.learner.batches[0].version == step
    metrics = lines(config, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(step, 5))
    # From then on it has checkpoints of its own, and goes on from these.
    own = config_in(tmp_path / "branch", "run.steps=5")
    assert leg(own).learner.batches[0].version == 4


def test_a_path_to_an_earlier_checkpoint_of_the_same_run_sets_later_ones_aside(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=5", "checkpoint.keep_last=9")
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    back = config_in(tmp_path, "run.steps=5", f"checkpoint.resume={store.path(2)}", "checkpoint.keep_last=9")
    final = leg(back)
    assert final.learner.batches[0].version == 2
    assert store.steps() == [0, 1, 2, 3, 4, 5]
    assert (store.folder / "step_4.rolled_back").is_dir()
    assert_one_history(back)


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_run_killed_while_it_goes_back_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Once with no line moved yet, and once between the two files."""
    config = config_in(tmp_path, "run.steps=5", "checkpoint.keep_last=9")
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")

    def cut_short(path: Path, keep: Callable[[Line], bool]) -> list[Line]:
        if path.name == name:
            raise KeyboardInterrupt
        return roll_back(path, keep)

    back = config_in(tmp_path, "run.steps=5", f"checkpoint.resume={store.path(2)}", "checkpoint.keep_last=9")
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.checkpoint.resume.roll_back", cut_short)
        with pytest.raises(KeyboardInterrupt):
            prepare(back, OF)
    assert leg(config).learner.batches[0].version == 2
    assert_one_history(config)


def test_the_best_evaluation_keeps_its_weights(tmp_path: Path) -> None:
    config = config_in(
        tmp_path, "run.steps=12", "eval.every=2", "checkpoint.every=0", "checkpoint.keep_last=1"
    )
    leg(config)
    metrics = lines(config, "metrics.jsonl")
    rewards = {line["step"]: line["eval/reward_mean"] for line in metrics if "eval/reward_mean" in line}
    rewards.pop(0)  # the start model, which nobody has to keep
    store = CheckpointStore(config.run.folder / "checkpoints")
    assert set(rewards) == {2, 4, 6, 8, 10, 12}
    assert store.best() == Best(6, max(rewards.values()))
    assert (store.steps(), store.weights_steps()) == ([12], [6])
    assert (store.weights_path(6) / "learner" / "weights").read_text() == "6"
    assert {entry.path for entry in verify(store.weights_path(6)).files} == {"config.yaml", "learner/weights"}
    assert find_checkpoint(config.run.folder) == store.weights_path(6)
    with pytest.raises(CheckpointError, match="holds weights alone"):
        prepare(config_in(tmp_path / "other", f"checkpoint.resume={store.weights_path(6)}"), OF)


def test_a_checkpoint_of_the_best_version_is_kept_in_place_of_its_weights(tmp_path: Path) -> None:
    config = config_in(
        tmp_path, "run.steps=12", "eval.every=2", "checkpoint.every=3", "checkpoint.keep_last=1"
    )
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    assert store.best() == Best(6, 0.0)
    assert (store.steps(), store.weights_steps()) == ([6, 12], [])


def test_no_weights_are_kept_of_a_version_whose_evaluation_nobody_will_know(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=12", "eval.every=2", "checkpoint.every=0")
    leg(config, stop_at_step=9)
    store = CheckpointStore(config.run.folder / "checkpoints")
    assert store.weights_steps() == [6]
    leg(config)
    assert store.best() == Best(6, 0.0)
    assert store.weights_steps() == [6]
    assert_one_history(config)


def test_an_evaluation_that_was_interrupted_counts_once_it_was_made_again(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=9", "eval.every=6", "checkpoint.every=6")
    store = CheckpointStore(config.run.folder / "checkpoints")
    undisturbed = config_in(tmp_path / "undisturbed", "run.steps=9", "eval.every=6", "checkpoint.every=6")
    leg(undisturbed)
    end = lines(undisturbed, "metrics.jsonl")[6]["time"]
    leg(config, killed_after_s=end + 0.14)  # the copy takes 0.125 s, the evaluation 0.16
    assert store.steps()[-1] == 6
    assert store.best() is None, "killed too late: the evaluation was known"
    leg(config)
    assert store.best() == Best(6, 0.0)


@pytest.mark.parametrize(
    ("hf", "exported"),
    [("never", []), ("last", [4]), ("every", [1, 2, 3, 4])],
    ids=["never", "last", "every"],
)
def test_the_chosen_checkpoints_hold_the_policy_for_other_libraries(
    tmp_path: Path, hf: str, exported: list[int]
) -> None:
    config = config_in(tmp_path, "run.steps=4", f"checkpoint.hf={hf}", "checkpoint.keep_last=9")
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    assert store.steps() == [0, 1, 2, 3, 4]
    for step in store.steps():
        files = {entry.path for entry in verify(store.path(step)).files}
        assert ("hf/version" in files) == (step in exported)
        if step in exported:
            assert (store.path(step) / "hf" / "version").read_text() == str(step)


@pytest.mark.parametrize("stop_at_step", [None, 2], ids=["to its end", "by a signal"])
def test_a_run_that_wants_no_checkpoints_writes_the_first_alone(
    tmp_path: Path, stop_at_step: int | None
) -> None:
    config = config_in(
        tmp_path,
        "run.steps=4",
        "eval.every=2",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "checkpoint.keep_best=false",
    )
    final = leg(config, stop_at_step=stop_at_step)
    assert final.summary is not None
    store = CheckpointStore(config.run.folder / "checkpoints")
    assert [p.name for p in store.folder.iterdir()] == ["step_0"]


def test_the_timeline_shows_as_much_of_checkpoints_as_the_metrics_say(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=6", "eval.every=2", "checkpoint.every=4")
    leg(config)
    events = json.loads((config.run.folder / "trace.json").read_text())
    shown = [event["dur"] / 1e6 for event in events if event["name"] == "checkpoint" and event["ph"] == "X"]
    said = [line.get("timing_s/checkpoint", 0.0) for line in lines(config, "metrics.jsonl")]
    # The scripted learner copies for 0.125 s: after steps 2, 4 and 6. The last is in the last line.
    assert sum(shown) == pytest.approx(3 * 0.125)
    assert sum(said) == pytest.approx(sum(shown))
    assert said[-1] == pytest.approx(0.125)


@pytest.mark.parametrize("after_s", [3.0, 7.6, 7.83], ids=["starting", "the first push", "evaluating"])
def test_a_signal_before_training_ends_the_run_at_once_and_costs_nothing(
    tmp_path: Path, after_s: float
) -> None:
    """The learner starts for 7.5 s, the push takes 0.25, the evaluation 0.16."""
    config = config_in(tmp_path, "run.steps=3", "eval.every=1")
    stopped = leg(config, stop_after_s=after_s, start_s=7.5)
    assert stopped.summary is not None
    assert (stopped.summary.stopped_by, stopped.summary.steps) == ("SIGTERM", 0)
    assert stopped.learner.batches == []
    assert stopped.summary.wall_s == pytest.approx(after_s)
    assert lines(config, "metrics.jsonl") == []
    leg(config)
    assert_one_history(config)


def test_a_resumed_run_that_is_stopped_while_it_starts_is_where_it_was(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=6")
    leg(config, stop_at_step=2)
    before = lines(config, "metrics.jsonl"), lines(config, "ledger.jsonl")
    assert leg(config, stop_after_s=3.0, start_s=7.5).learner.batches == []
    assert (lines(config, "metrics.jsonl"), lines(config, "ledger.jsonl")) == before
    leg(config)
    assert_one_history(config)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path, "run.steps=5")
    write = ScriptedLearner.write_state

    async def write_state(self: ScriptedLearner, folder: Path) -> Any:
        if self._copied_state == 2:
            raise OSError(28, "No space left on device")
        return await write(self, folder)

    monkeypatch.setattr(ScriptedLearner, "write_state", write_state)
    leg(config)
    assert "the checkpoint of step 2 could not be written: [Errno 28] No space left on device" in caplog.text
    assert not [p for p in (config.run.folder / "checkpoints").iterdir() if "part" in p.name]
    assert_one_history(config)


def test_a_signals_checkpoint_is_made_again_where_the_one_under_way_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, "run.steps=9", "eval.every=0")
    write, failed = ScriptedLearner.write_state, set()

    async def write_state(self: ScriptedLearner, folder: Path) -> Any:
        await asyncio.sleep(0.25)
        if self._copied_state and self._copied_state not in failed:
            failed.add(self._copied_state)
            raise OSError(28, "No space left on device")
        return await write(self, folder)

    monkeypatch.setattr(ScriptedLearner, "write_state", write_state)
    leg(config, stop_at_step=2)
    stopped_at = lines(config, "metrics.jsonl")[-1]["step"]
    assert CheckpointStore(config.run.folder / "checkpoints").steps()[-1] == stopped_at
