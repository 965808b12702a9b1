"""Runs that are started again: after which failures, how often, and that nothing is lost by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import (
    BadStepsError,
    CanaryError,
    ConfigError,
    DataError,
    DeadlineError,
    InvariantError,
    LearnerError,
    NoGeneratorError,
    PlacementError,
    RoleError,
)
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.restarts import Restarts, is_infrastructure

from .resume_harness import assert_one_history
from .test_halves import config_in, go


def task_error(cause: Exception) -> BaseException:
    """As a call of an actor raises what its code raised."""
    found = RayTaskError("step", "traceback", cause).as_instanceof_cause()
    assert isinstance(found, BaseException)
    return found


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LearnerError("rank 0 died"), True),
        (RoleError("the reference hangs"), True),
        (NoGeneratorError("none is left"), True),
        (DeadlineError("an update took too long"), True),
        (ObjectLostError("00", None, "stack"), True),
        (task_error(LearnerError("a peer closed its connection")), True),
        (ExceptionGroup("", [LearnerError("a"), ExceptionGroup("", [RoleError("b")])]), True),
        (task_error(ObjectLostError("00", None, "stack")), True),
        (task_error(ValueError("a bug in a rank")), False),
        (ExceptionGroup("", [LearnerError("a"), ValueError("b")]), False),
        (CanaryError("other log-probs"), False),
        (BadStepsError("not finite"), False),
        (InvariantError("a bug"), False),
        (ConfigError("a key"), False),
        (DataError("a row"), False),
        (PlacementError("no GPU"), False),
        (OSError("no space left on device"), False),
    ],
)
def test_which_failures_another_start_may_mend(error: BaseException, expected: bool) -> None:
    assert is_infrastructure(error) is expected


class Failing:
    """An attempt that fails so often, then ends; each may leave a checkpoint."""

    def __init__(self, *errors: Exception, leaves: tuple[int, ...] = ()) -> None:
        self._errors, self._leaves = list(errors), list(leaves)
        self.step = -1
        self.waits: list[float] = []

    def __call__(self) -> str:
        if self._leaves:
            self.step = self._leaves.pop(0)
        if self._errors:
            raise self._errors.pop(0)
        return "done"

    def run(self, limit: int, *, wanted: bool = True) -> str:
        self.restarts = Restarts(limit, 10.0, lambda: self.step)
        return self.restarts.run(self, wanted=lambda: wanted, sleep=self.waits.append)


def test_each_wait_of_a_row_is_twice_the_one_before_up_to_a_limit() -> None:
    failing = Failing(*[LearnerError("died")] * 9)
    assert failing.run(9) == "done"
    assert failing.waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert failing.restarts.total == 9


def test_a_row_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(*[LearnerError("died")] * 3)
    with pytest.raises(LearnerError, match="died"):
        failing.run(2)
    assert failing.waits == [10, 20]
    assert "restart 2 of at most 2 in a row (run.max_restarts) in 20 s, from the beginning" in caplog.text


def test_a_later_checkpoint_begins_the_row_anew() -> None:
    failing = Failing(*[LearnerError("died")] * 4, leaves=(5, 5, 10, 10))
    assert failing.run(2) == "done"
    assert failing.waits == [10, 20, 10, 20]


@pytest.mark.parametrize(
    ("limit", "wanted", "error"),
    [(0, True, LearnerError("died")), (3, False, LearnerError("died")), (3, True, DataError("a row"))],
)
def test_what_is_not_started_again(limit: int, wanted: bool, error: Exception) -> None:
    failing = Failing(error)
    with pytest.raises(type(error)):
        failing.run(limit, wanted=wanted)
    assert failing.waits == []


def test_a_cluster_that_lacks_a_node_is_asked_again_but_not_at_first() -> None:
    failing = Failing(PlacementError("1 GPU is missing"))
    with pytest.raises(PlacementError):
        failing.run(3)
    failing = Failing(LearnerError("its node went away"), PlacementError("1 GPU is missing"))
    assert failing.run(3) == "done"


def test_a_run_whose_learner_dies_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.steps=6", "schedule.pipeline_depth=1", "checkpoint.every=2")
    store = CheckpointStore(config.run.folder / "checkpoints")
    learners = [ScriptedLearner(max_staleness=2, step_s=1.0, dies_at=call) for call in (3, 2, None)]
    attempts = iter(learners)
    restarts = Restarts(1, 1.0, lambda: max(store.steps(), default=-1))
    summary = restarts.run(lambda: go(config, next(attempts)), sleep=lambda seconds: None)
    # The second start is of the checkpoint of step 2, the third of that of step 4: a new row each.
    assert [len(learner.batches) for learner in learners] == [4, 3, 2]
    assert (restarts.total, summary.policy_version) == (2, 6)
    assert_one_history(config)
