"""Half a run alone, with real parts: recorded without a learner, then trained on without a generator."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from .runs import Run, finish, start

STEPS = 60
HALF = (
    f"run.steps={STEPS}",
    "rollout.max_new_tokens=8",
    f"schedule.max_staleness={STEPS - 1}",
    "checkpoint.every=5",
    "log.trackers=[]",
)


def actors(run: Run, name: str) -> list[psutil.Process]:
    """Ray names a process after its actor."""
    return [p for p in run.processes() if name in " ".join(p.cmdline())]


def test_rollouts_are_recorded_and_trained_on_though_the_learner_is_killed(tmp_path: Path) -> None:
    recorded = finish(tmp_path, "run.rollout_only=true", *HALF, name="recorded")
    assert len(list((recorded.folder / "rollouts").glob("step_*.msgpack"))) == STEPS
    assert {(end["state"], end["reason"], end["lag"]) for end in recorded.ledger} == {
        ("dropped", "recorded", 0)
    }
    assert "LearnerActor" not in recorded.text
    replay = (f"run.replay={recorded.folder}", "run.max_restarts=1", "run.restart_backoff_s=0.1")
    run = start(tmp_path, *replay, *HALF, name="replayed")
    try:
        run.wait_for_steps(6)
        assert actors(run, "GeneratorActor") == []
        (learner,) = actors(run, "LearnerActor")
        learner.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.text
        run.assert_nothing_left(within_s=15)
    finally:
        for process in run.processes():
            process.kill()
    assert "restart 1 of at most 1 in a row" in run.text
    assert "the run was started again 1 times" in run.text
    metrics = run.metrics
    assert [line["step"] for line in metrics] == [*range(STEPS + 1)]
    # One policy recorded all of it: it lags as far as the run has come.
    assert [line["staleness/max"] for line in metrics[1:]] == [*range(STEPS)]
    assert sorted(end["ordinal"] for end in run.ledger) == [*range(2 * STEPS)]
    assert {end["state"] for end in run.ledger} == {"trained"}
    assert metrics[-1]["policy_version"] == STEPS
    assert metrics[1]["generator/logprob_diff_max"] < 1e-3, "the first batch is of the very start model"
