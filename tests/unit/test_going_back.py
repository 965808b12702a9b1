"""Going back to a checkpoint by its path: once, whatever happens to the run after that.

Runs are of scripted parts under the virtual clock; folders, files and the choice of a checkpoint are real.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.going_back import NOTE
from asyncrl.checkpoint.resume import prepare
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.run import from_own

from .resume_harness import OF, assert_one_history, config_in, leg, lines

KEEP_ALL = "checkpoint.keep_last=99"


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=4), elsewhere=st.booleans())
def test_a_run_that_went_back_and_is_killed_goes_on_from_what_it_made_since(
    tmp_path_factory: pytest.TempPathFactory, kills: list[float], elsewhere: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    first = config_in(folder, "run.steps=7", "eval.every=2", KEEP_ALL)
    leg(first)
    path = first.run.folder / "checkpoints" / "step_2"
    place = folder / "branch" if elsewhere else folder
    back = config_in(place, "run.steps=7", "eval.every=2", KEEP_ALL, f"checkpoint.resume={path}")
    reached, store = 2, CheckpointStore(back.run.folder / "checkpoints")
    for after_s in kills:
        made = leg(back, killed_after_s=after_s)
        assert made.resumed is not None
        assert made.resumed.state.step >= reached, "it went back once more"
        reached = max([reached, *store.steps()])
    final = leg(back)
    assert final.resumed is not None
    assert final.resumed.state.step >= reached
    if not elsewhere:
        assert_one_history(back)
    else:
        assert [line["step"] for line in lines(back, "metrics.jsonl")] == list(range(2, 8))


def test_another_branch_goes_on_before_it_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    first = config_in(tmp_path, "run.steps=4", KEEP_ALL)
    leg(first)
    path = first.run.folder / "checkpoints" / "step_2"
    branch = config_in(tmp_path / "branch", "run.steps=4", KEEP_ALL, f"checkpoint.resume={path}")
    branch.run.folder.mkdir(parents=True)
    resumed = prepare(branch, OF)
    assert resumed is not None
    assert resumed.elsewhere
    (branch.run.folder / "metrics.jsonl").write_text(
        '{"step": 2, "policy_version": 2}\n{"step": 3'
    )  # cut off
    final = leg(branch)
    assert final.resumed is not None
    assert final.resumed.elsewhere
    assert [line["step"] for line in lines(branch, "metrics.jsonl")] == [2, 3, 4]


def back_to(store: CheckpointStore, step: int) -> Config:
    """A start of five steps that goes back."""
    resume = f"checkpoint.resume={store.path(step)}"
    return config_in(store.folder.parent.parent, "run.steps=5", KEEP_ALL, resume)


def test_who_wants_to_go_back_again_can(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=5", KEEP_ALL)
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    to_two, to_three = (back_to(store, step) for step in (2, 3))
    starts = []
    for start in (to_two, to_two, to_three, to_two, config, to_two):
        resumed = prepare(start, OF)
        assert resumed is not None
        starts.append(resumed.state.step)
        leg(start)
    assert starts == [2, 5, 3, 2, 5, 2]
    (config.run.folder / NOTE).unlink()
    resumed = prepare(to_two, OF)
    assert resumed is not None
    assert resumed.state.step == 2


def test_the_checkpoint_that_a_run_went_back_to_may_be_gone_since(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=6", KEEP_ALL)
    leg(config)
    path = CheckpointStore(config.run.folder / "checkpoints").path(2)
    back = config_in(tmp_path, "run.steps=6", "checkpoint.keep_last=1", f"checkpoint.resume={path}")
    leg(back, stop_at_step=4)
    assert not path.exists()
    assert leg(back).learner.batches[0].version == 4
    other = config_in(tmp_path, "run.steps=6", f"checkpoint.resume={path.with_name('step_1')}")
    with pytest.raises(ConfigError, match=r"where there is no manifest\.json"):
        prepare(other, OF)


def test_a_run_moved_to_another_place_is_not_sent_back(tmp_path: Path) -> None:
    config = config_in(tmp_path / "here", "run.steps=6", KEEP_ALL)
    leg(config)
    path = "{}/r/checkpoints/step_2"
    leg(
        config_in(
            tmp_path / "here", "run.steps=6", KEEP_ALL, f"checkpoint.resume={path.format(tmp_path / 'here')}"
        )
    )
    (tmp_path / "here").rename(tmp_path / "there")
    moved = config_in(
        tmp_path / "there", "run.steps=7", KEEP_ALL, f"checkpoint.resume={path.format(tmp_path / 'there')}"
    )
    assert leg(moved).learner.batches[0].version == 6


def test_a_checkpoint_that_is_a_link_is_still_the_runs_own(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=5", KEEP_ALL)
    leg(config, stop_at_step=3)
    store = CheckpointStore(config.run.folder / "checkpoints")
    newest = store.path(store.steps()[-1])
    newest.rename(tmp_path / newest.name)
    newest.symlink_to(tmp_path / newest.name)
    resumed = prepare(config, OF)
    assert resumed is not None
    assert not resumed.elsewhere
    leg(config)
    assert_one_history(config)


def test_going_back_that_is_cut_short_is_forgotten_by_no_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, "run.steps=5", KEEP_ALL)
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    to_two, to_three = (back_to(store, step) for step in (2, 3))
    leg(to_two)
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.checkpoint.resume.note_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(to_three, OF)
    resumed = prepare(to_two, OF)
    assert resumed is not None
    assert resumed.state.step == 2


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_a_restart_of_its_own_begins_neither_anew_nor_back(tmp_path: Path) -> None:
    never = config_in(tmp_path, "checkpoint.resume=never")
    assert from_own(never).checkpoint.resume == "auto"
    path = config_in(tmp_path, "checkpoint.resume=runs/other/checkpoints/step_3")
    assert from_own(path) is path, "or the next start would not know that it went back there"


def test_the_best_evaluation_is_the_best_one_that_is_left(tmp_path: Path) -> None:
    """The reward of version 6 is the best, then those next to it."""
    settings = ("run.steps=8", "eval.every=1", KEEP_ALL)
    config = config_in(tmp_path, *settings)
    leg(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    assert store.best() == Best(6, 0.0)
    back = config_in(tmp_path, *settings, f"checkpoint.resume={store.path(4)}")
    assert prepare(back, OF) is not None
    assert store.best() == Best(4, -2.0)
    store.path(4).rename(tmp_path / "gone")
    (store.folder / "best.json").unlink()
    to_three = config_in(tmp_path, *settings, f"checkpoint.resume={store.path(3)}")
    assert prepare(to_three, OF) is not None
    assert store.best() == Best(3, -3.0)
