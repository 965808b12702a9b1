"""Roles beside the real controller, on a virtual clock: overlap, accounting, deaths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.errors import CodecError, RoleError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length, log_normal_length
from asyncrl.learners.samples import sent_groups, train_samples
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.roles.base import Findings
from asyncrl.roles.group import RoleGroup
from asyncrl.roles.scripted import ScriptedRoleMember
from asyncrl.types import Group

from .controller_harness import Outcome, config, run

FAST = {"length": constant_length(10), "token_s": 0.1}  # a group takes 1 s


def role(
    *members: ScriptedRoleMember, spares: list[ScriptedRoleMember] | None = None, **options: Any
) -> RoleGroup:
    restart = None if spares is None else lambda name: spares.pop(0)
    settings = {"timeout_s": 100.0, "setting": "scripted.timeout_s", **options}
    return RoleGroup("scripted", members, restart=restart, **settings)


def learner(settings, **script) -> ScriptedLearner:
    return ScriptedLearner(max_staleness=settings.schedule.max_staleness, **script)


def lag_findings(group: Group) -> Findings:
    """Arrays that tell which group and sample they are of."""
    arrays = [
        np.full(len(t.token_ids), 100.0 * group.ordinal + t.sample, np.float32) for t in group.trajectories
    ]
    return Findings({"reference": arrays}, {"kl": tuple(float(t.sample) for t in group.trajectories)})


def test_every_group_is_trained_with_its_own_annotation() -> None:
    settings = config("run.steps=5")
    members = [ScriptedRoleMember(f"r{i}", annotate_s=0.3, findings=lag_findings) for i in range(2)]
    outcome = run(settings, [ScriptedGenerator(**FAST)], roles=[role(*members)])
    for batch in outcome.learner.batches:
        groups, payloads = sent_groups(batch.items)
        samples = train_samples([item.meta.checksum for item in batch.items], groups, payloads)
        for sample in samples:
            assert sample.reference is not None
            assert set(sample.reference.tolist()) == {100.0 * sample.ordinal + sample.trajectory.sample}
        for item in batch.items:
            (annotation,) = item.annotations
            assert annotation.meta.scalars == {"kl": (0.0, 1.0)}
    annotated = sorted(ordinal for member in members for ordinal in member.annotated)
    assert annotated == list(range(len(annotated)))
    assert all(len(member.annotated) > 2 for member in members)
    assert all(member.ended for member in members) is False  # who built them closes them


def times(outcome: Outcome, name: str, after: int = 3) -> list[float]:
    return [line[f"timing_s/{name}"] for line in outcome.log.lines[after:]]


def test_overlapped_annotation_is_hidden_behind_the_learner() -> None:
    settings = config("run.steps=12", "schedule.pipeline_depth=1", "schedule.max_staleness=1")
    alone = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=2.0))
    # Two groups a step, half a second each: 1 s of generation and 1 s of it fit into an update of 2 s.
    member = ScriptedRoleMember(annotate_s=0.5)
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=2.0), roles=[role(member)])
    assert times(outcome, "scripted")[:-1] == pytest.approx([1.0] * 9)
    assert times(outcome, "scripted")[-1] == 0.0  # no group is left to come
    assert times(outcome, "annotate_wait") == pytest.approx([0.0] * 10)
    # All that it costs is the first batch, which nothing hides.
    assert outcome.log.lines[1]["timing_s/annotate_wait"] == pytest.approx(1.0)
    assert outcome.summary.wall_s == pytest.approx(alone.summary.wall_s + 1.0)
    assert not any(key.startswith("timing_s/annotate") for key in alone.log.lines[-1])


def test_annotation_that_nothing_hides_is_reported_as_the_wait_that_it_is() -> None:
    settings = config("run.steps=6", "schedule.pipeline_depth=0", "schedule.max_staleness=0")
    alone = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0))
    member = ScriptedRoleMember(annotate_s=0.5)
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0), roles=[role(member)])
    waited = sum(line.get("timing_s/annotate_wait", 0.0) for line in outcome.log.lines)
    assert waited == pytest.approx(6 * 1.0)
    assert outcome.summary.wall_s - alone.summary.wall_s == pytest.approx(waited)


def test_two_roles_work_at_the_same_time() -> None:
    settings = config("run.steps=3", "schedule.pipeline_depth=0", "schedule.max_staleness=0")
    roles = []
    for name, seconds in (("a", 0.5), ("b", 0.4)):
        member = ScriptedRoleMember(name, role=name, annotate_s=seconds)
        roles.append(RoleGroup(name, [member], restart=None, timeout_s=9.0, setting="x"))
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0), roles=roles)
    assert times(outcome, "annotate_wait", 1) == pytest.approx([1.0] * 3)
    assert times(outcome, "a", 1) == pytest.approx([1.0] * 3)
    assert times(outcome, "b", 1) == pytest.approx([0.8] * 3)
    assert [a.meta.role for a in outcome.learner.batches[0].items[0].annotations] == ["a", "b"]


def test_the_queue_counts_the_bytes_of_annotations() -> None:
    settings = config("run.steps=4", "schedule.pipeline_depth=1", "schedule.max_staleness=1")
    plain = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=5.0))
    outcome = run(
        settings,
        [ScriptedGenerator(**FAST)],
        learner(settings, step_s=5.0),
        roles=[role(ScriptedRoleMember())],
    )
    for line, without in zip(outcome.log.lines[1:], plain.log.lines[1:], strict=True):
        # Two samples of ten tokens a group, four bytes a token and some for the record.
        extra = line["queue/bytes"] - without["queue/bytes"]
        assert line["queue/ready"] * 80 <= extra <= line["queue/ready"] * 160
    assert outcome.log.lines[1]["queue/ready"] == 2


def test_a_dead_member_is_replaced_and_its_groups_are_annotated_again() -> None:
    settings = config("run.steps=6")
    dying, spare = (
        ScriptedRoleMember("r0", annotate_s=0.1, dies_at=[3]),
        ScriptedRoleMember("r0", start_s=2.0),
    )
    group = role(dying, spares=[spare])
    outcome = run(settings, [ScriptedGenerator(**FAST)], roles=[group])
    assert outcome.summary.counts["trained"] == 12
    assert (group.restarts, group.members, dying.ended) == (1, [spare], True)
    # The one that it died of, and the one that waited behind it.
    assert sorted(dying.annotated[:3] + spare.annotated) == list(
        range(len(dying.annotated[:3] + spare.annotated))
    )


def test_others_go_on_while_one_restarts() -> None:
    settings = config("run.steps=6", "rollout.groups_per_step=4")
    dying, healthy = ScriptedRoleMember("r0", dies_at=[0]), ScriptedRoleMember("r1", annotate_s=0.1)
    group = role(dying, healthy, spares=[ScriptedRoleMember("r0", start_s=50.0)])
    outcome = run(settings, [ScriptedGenerator(**FAST)], roles=[group])
    assert outcome.summary.counts["trained"] == 24
    assert len(healthy.annotated) > 6


def test_a_member_that_hangs_is_given_up_at_the_deadline() -> None:
    settings = config("run.steps=4")
    hung = ScriptedRoleMember("r0", hangs_at=[2])
    group = role(hung, spares=[ScriptedRoleMember("r0")], timeout_s=7.0)
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0), roles=[group])
    assert outcome.summary.counts["trained"] == 8
    assert 7.0 < outcome.summary.wall_s < 15.0
    assert hung.ended


def causes(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes(inner)]
    return [error]


def failure(*members: ScriptedRoleMember, spares: list[ScriptedRoleMember] | None) -> str:
    with pytest.raises(BaseExceptionGroup) as caught:
        run(config("run.steps=6"), [ScriptedGenerator(**FAST)], roles=[role(*members, spares=spares)])
    (cause,) = {str(c): c for c in causes(caught.value)}.values()
    assert isinstance(cause, RoleError)
    return str(cause)


def test_a_second_failure_ends_the_run() -> None:
    message = failure(
        ScriptedRoleMember("r0", dies_at=[1]), spares=[ScriptedRoleMember("r0", dies_at=[0])] * 2
    )
    assert message == "r0 is not up"


def test_the_death_of_what_cannot_be_replaced_ends_the_run() -> None:
    message = failure(ScriptedRoleMember("r0", dies_at=[1]), spares=None)
    assert message.startswith("what r0 held is lost with it, and the run with that")


def test_an_error_that_is_no_death_ends_the_run_at_once() -> None:
    def nan(group: Group) -> Findings:
        return Findings(
            {"values": [np.full(len(t.token_ids), np.nan, np.float32) for t in group.trajectories]}
        )

    with pytest.raises(BaseExceptionGroup) as caught:
        run(
            config("run.steps=2"), [ScriptedGenerator(**FAST)], roles=[role(ScriptedRoleMember(findings=nan))]
        )
    assert all(isinstance(cause, CodecError) for cause in causes(caught.value))
    assert "values that are not finite" in str(causes(caught.value)[0])


def test_a_stall_report_names_the_roles_that_a_group_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    settings = config("run.steps=2", "run.stall_after_s=10")
    roles = []
    for name, hangs_at in (("a", ()), ("b", [1])):
        members = [ScriptedRoleMember(f"{name} 0", role=name, hangs_at=hangs_at)]
        restart = lambda seat: ScriptedRoleMember(seat, role="b")  # noqa: E731
        roles.append(RoleGroup(name, members, restart=restart, timeout_s=50.0, setting="x"))
    run(settings, [ScriptedGenerator(**FAST)], roles=roles)
    (report,) = {r.getMessage() for r in caplog.records if "no progress for 10 s" in r.getMessage()}
    assert "train-1 (ordinal 1) runs for 11 s, try 1, on b for its annotation" in report
    assert "no replica" not in report


def test_a_group_that_is_dropped_while_it_is_annotated_leaves_nothing_behind() -> None:
    settings = config(
        "run.steps=8", "schedule.pipeline_depth=1", "schedule.max_staleness=1", "schedule.at_bound=drop"
    )
    slow = ScriptedRoleMember("r0", hangs_at=[3])
    members = [slow, ScriptedRoleMember("r1", annotate_s=0.1)]
    outcome = run(
        settings,
        [ScriptedGenerator(**FAST)],
        learner(settings, step_s=1.0),
        roles=[role(*members, timeout_s=1e4)],
    )
    dropped = [r for r in outcome.log.retired_ if r.state == "dropped"]
    assert [r.ordinal for r in dropped] == [slow.annotated[3]]
    assert outcome.summary.wall_s < 30
    assert len(slow.annotated) > 4  # it was free again


def test_groups_that_are_not_trained_are_not_annotated() -> None:
    settings = config("run.steps=4", "algorithm.filter_zero_variance=refill")
    member = ScriptedRoleMember()
    generator = ScriptedGenerator(length=log_normal_length(20.0, 0.8))
    outcome = run(settings, [generator], roles=[role(member)])
    filtered = {r.ordinal for r in outcome.log.retired_ if r.state == "filtered"}
    assert filtered
    assert not filtered & set(member.annotated)
