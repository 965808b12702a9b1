"""A reference that follows the policy, beside the real controller on a virtual clock: versions, deaths."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ChecksumError, ConfigError, PushTimeoutError, ReferenceLostError, WeightSyncError
from asyncrl.generators.scripted import ScriptedGenerator, log_normal_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.plan import placement_rows
from asyncrl.roles.base import Received
from asyncrl.roles.group import RoleGroup
from asyncrl.roles.moving import MovingReference
from asyncrl.roles.scripted import ScriptedRoleMember
from asyncrl.weight_sync.refresh import ReferencePush

from .controller_harness import Outcome, config, run
from .test_roles import FAST, causes

SYNC = ("schedule.pipeline_depth=0", "schedule.max_staleness=0")
KL = "algorithm.kl=loss"


def reference(
    settings: Config,
    learner: ScriptedLearner,
    members: list[ScriptedRoleMember],
    spares: list[ScriptedRoleMember] | None = None,
    push_timeout_s: float = 100.0,
) -> MovingReference:
    section = settings.reference
    spares = [] if spares is None else spares
    group = RoleGroup(
        "reference",
        members,
        restart=lambda name: spares.pop(0),
        timeout_s=100.0,
        setting="reference.timeout_s",
    )
    return MovingReference(
        group,
        ReferencePush(learner, backend="gloo", bucket_bytes=1 << 20, timeout_s=push_timeout_s),
        every=section.refresh_every,
        ema=section.ema,
        deterministic=settings.run.deterministic,
    )


def member(name: str = "reference 0", **script: Any) -> ScriptedRoleMember:
    return ScriptedRoleMember(name, role="reference", **{"annotate_s": 0.3, **script})


def go(
    settings: Config,
    *members: ScriptedRoleMember,
    spares: list[ScriptedRoleMember] | None = None,
    generators: list[ScriptedGenerator] | None = None,
    push_timeout_s: float = 100.0,
    **script: Any,
) -> tuple[Outcome, MovingReference]:
    script = {"step_s": 1.0, "push_s": 0.5, **script}
    learner = ScriptedLearner(max_staleness=settings.schedule.max_staleness, **script)
    role = reference(settings, learner, list(members), spares, push_timeout_s)
    return run(settings, generators or [ScriptedGenerator(**FAST)], learner, roles=[role]), role


def used(outcome: Outcome) -> dict[int, set[int]]:
    """The reference's versions that the groups of each update were annotated with."""
    found: dict[int, set[int]] = defaultdict(set)
    for batch in outcome.learner.batches:
        for item in batch.items:
            (annotation,) = item.annotations
            found[batch.version].add(annotation.meta.reference_version)
    return found


def failure(settings: Config, *members: ScriptedRoleMember, **options: Any) -> BaseException:
    with pytest.raises(BaseExceptionGroup) as caught:
        go(settings, *members, **options)
    (cause,) = {str(c): c for c in causes(caught.value)}.values()
    return cause


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_synchronous_groups_are_annotated_by_the_newest_reference(overlap: bool, ema: str) -> None:
    settings = config(
        "run.steps=7",
        KL,
        "reference.refresh_every=3",
        f"reference.ema={ema}",
        f"weight_sync.overlap={overlap}",
        *SYNC,
    )
    members = [member(f"reference {i}") for i in range(2)]
    outcome, role = go(settings, *members)
    assert used(outcome) == {0: {0}, 1: {0}, 2: {0}, 3: {3}, 4: {3}, 5: {3}, 6: {6}}
    decay = 0.0 if ema == "null" else 0.9
    assert [m.taken for m in members] == [[(3, decay), (6, decay)]] * 2
    assert outcome.learner.referred == [3, 6]
    lines = outcome.log.lines[1:]
    assert [line["reference/version"] for line in lines] == [0, 0, 0, 3, 3, 3, 6]
    assert [line["reference/version_min"] for line in lines] == [0, 0, 0, 3, 3, 3, 6]
    assert [line["timing_s/reference_refresh"] for line in lines].count(0.0) == 5
    assert role.restored == lines[-1]["reference/restored"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_overlapped_groups_are_annotated_by_one_reference_that_only_moves_on(overlap: bool) -> None:
    settings = config(
        "run.steps=20",
        KL,
        "reference.refresh_every=2",
        "schedule.pipeline_depth=2",
        "schedule.max_staleness=3",
        "rollout.groups_per_step=3",
        f"weight_sync.overlap={overlap}",
    )
    members = [member(f"reference {i}", annotate_s=0.1 + 0.7 * i) for i in range(2)]
    slow = ScriptedGenerator(length=log_normal_length(20.0, 0.8), token_s=0.3)
    outcome, _ = go(settings, *members, generators=[slow], step_s=0.2)
    versions = used(outcome)
    for version, found in versions.items():
        # Never of a policy that does not exist yet, and never an odd one.
        assert all(v <= version and v % 2 == 0 for v in found)
    assert max(versions[19]) >= 16
    assert any(len(found) > 1 for found in versions.values())
    for line, (_, found) in zip(outcome.log.lines[1:], sorted(versions.items()), strict=True):
        assert (line["reference/version_min"], line["reference/version"]) == (min(found), max(found))


def test_a_refresh_waits_for_the_groups_that_are_annotated_and_they_for_it() -> None:
    class Watched(ScriptedRoleMember):
        """Fails where both happen at a time."""

        annotating = 0

        async def annotate(self, meta, payload):
            Watched.annotating += 1
            try:
                return await super().annotate(meta, payload)
            finally:
                Watched.annotating -= 1

        async def receive(self, version: int) -> Received:
            assert Watched.annotating == 0
            received = await super().receive(version)
            assert Watched.annotating == 0
            return received

    settings = config("run.steps=8", KL, "reference.refresh_every=1", "schedule.max_staleness=1")
    members = [Watched(f"reference {i}", role="reference", annotate_s=2.0, receive_s=3.0) for i in range(2)]
    outcome, _ = go(settings, *members)
    assert outcome.learner.referred == [1, 2, 3, 4, 5, 6, 7]


def test_the_death_of_a_member_before_the_first_refresh_costs_nothing() -> None:
    settings = config("run.steps=4", KL, "reference.refresh_every=3", "run.deterministic=true", *SYNC)
    outcome, role = go(settings, member(dies_at=[1]), spares=[member()])
    assert used(outcome) == {0: {0}, 1: {0}, 2: {0}, 3: {3}}
    assert (role.restored, outcome.learner.referred) == (0, [3])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_replaced_member_annotates_nothing_before_all_hold_the_present_policy(overlap: bool) -> None:
    settings = config("run.steps=6", KL, "reference.refresh_every=2", f"weight_sync.overlap={overlap}", *SYNC)
    # Two groups a step: the seventh call is in the step from version 3, whose reference is that of 2.
    dying, spare, other = member(dies_at=[3]), member(start_s=5.0), member("reference 1")
    outcome, role = go(settings, dying, other, spares=[spare])
    # The other one had annotated its group of that step by the reference of 2.
    assert used(outcome) == {0: {0}, 1: {0}, 2: {2}, 3: {2, 3}, 4: {4}, 5: {4}}
    assert other.taken == [(2, 0.0), (3, 0.0), (4, 0.0)]
    assert spare.taken == [(3, 0.0), (4, 0.0)]
    assert outcome.learner.referred == [2, 3, 4]
    assert role.restored == outcome.log.lines[-1]["reference/restored"] == 1


def test_a_lost_average_starts_over_from_the_policy() -> None:
    settings = config("run.steps=6", KL, "reference.refresh_every=2", "reference.ema=0.5", *SYNC)
    dying, spare, other = member(dies_at=[2]), member(), member("reference 1")
    outcome, role = go(settings, dying, other, spares=[spare])
    # Of the version that it was refreshed to a moment ago, but not its average.
    assert used(outcome)[2] == {2}
    assert other.taken == [(2, 0.5), (2, 0.0), (4, 0.5)]
    assert spare.taken == [(2, 0.0), (4, 0.5)]
    assert role.restored == 1


def test_a_deterministic_run_ends_where_the_reference_is_lost() -> None:
    overrides = ("run.steps=6", KL, "reference.refresh_every=2", "run.deterministic=true", *SYNC)
    cause = failure(config(*overrides), member(dies_at=[6]), spares=[member()])
    assert isinstance(cause, ReferenceLostError)
    assert "the reference of version 2 was lost" in str(cause)
    assert "the policy at version 3" in str(cause)
    # In the step from version 2 the policy is the reference: nothing is lost.
    outcome, role = go(config(*overrides), member(dies_at=[4]), spares=[member()])
    assert used(outcome) == {0: {0}, 1: {0}, 2: {2}, 3: {2}, 4: {4}, 5: {4}}
    assert (role.restored, outcome.learner.referred) == (0, [2, 2, 4])
    # An average is.
    cause = failure(config(*overrides, "reference.ema=0.5"), member(dies_at=[4]), spares=[member()])
    assert isinstance(cause, ReferenceLostError)
    assert "the reference of version 2, an average, was lost" in str(cause)


@pytest.mark.parametrize("phase", ["dies_receiving", "dies_taking"])
def test_a_member_that_dies_of_a_refresh_is_replaced_and_the_refresh_comes_again(phase: str) -> None:
    settings = config("run.steps=4", KL, "reference.refresh_every=2", "run.deterministic=true", *SYNC)
    dying, spare, other = member(**{phase: [2]}), member(start_s=3.0), member("reference 1")
    outcome, role = go(settings, dying, other, spares=[spare])
    assert used(outcome) == {0: {0}, 1: {0}, 2: {2}, 3: {2}}
    assert spare.taken == [(2, 0.0)]
    # It dies before the learner has sent all, or after that.
    assert outcome.learner.referred == [2] * (1 if phase == "dies_receiving" else 2)
    assert role.restored == 0
    prefixes = [spec.prefix for spec in outcome.learner.push_groups if spec.prefix.startswith("reference")]
    assert prefixes == ["reference1", "reference2"]


@pytest.mark.parametrize("phase", ["dies_receiving", "dies_taking"])
def test_nobody_mixes_a_version_in_twice(phase: str) -> None:
    settings = config("run.steps=6", KL, "reference.refresh_every=2", "reference.ema=0.5", *SYNC)
    other = member("reference 1")
    # Before the first refresh nothing is lost: the spare starts where all did.
    _, role = go(settings, member(**{phase: [2]}), other, spares=[member()])
    assert other.taken == [(2, 0.5), (4, 0.5)]
    assert role.restored == 0
    # After it the average is.
    other, spare = member("reference 1"), member()
    _, role = go(settings, member(**{phase: [4]}), other, spares=[spare])
    assert spare.taken == [(4, 0.0)]
    assert other.taken == [(2, 0.5), (4, 0.5), (4, 0.0)][:: 1 if phase == "dies_taking" else 2]
    assert role.restored == 1


def test_a_failed_push_is_sent_once_more_and_a_second_failure_ends_the_run() -> None:
    settings = config("run.steps=4", KL, "reference.refresh_every=2", *SYNC)
    # Of the learner's pushes, 0 to 2 were of versions 0, 1 and the first to the reference.
    outcome, _ = go(settings, member(), failed_pushes=[2])
    assert outcome.learner.referred == [2]
    cause = failure(settings, member(), failed_pushes=[2, 3])
    assert isinstance(cause, WeightSyncError)
    assert "push call 3 of version 2 failed" in str(cause)
    cause = failure(settings, member(receive_s=200.0))
    assert isinstance(cause, PushTimeoutError)
    assert "sending version 2 to reference 0: not done after weight_sync.timeout_s = 100 s" in str(cause)


def test_a_member_that_hangs_in_a_refresh_is_replaced() -> None:
    class Hung(ScriptedRoleMember):
        async def receive(self, version: int) -> Received:
            return await asyncio.get_running_loop().create_future()

        async def ping(self) -> None:
            await asyncio.get_running_loop().create_future()

    settings = config("run.steps=4", KL, "reference.refresh_every=2", *SYNC)
    hung, spare, other = Hung("reference 0", role="reference"), member(), member("reference 1")
    outcome, role = go(settings, hung, other, spares=[spare])
    assert used(outcome) == {0: {0}, 1: {0}, 2: {2}, 3: {2}}
    assert (hung.ended, spare.taken, other.taken) == (True, [(2, 0.0)], [(2, 0.0)])
    assert role.restored == 0
    # The push's deadline, and that of the ping.
    assert 110 < outcome.log.lines[2]["timing_s/reference_refresh"] < 112


def test_other_bytes_than_the_learners_end_the_run_at_once() -> None:
    class Flipped(ScriptedRoleMember):
        async def receive(self, version: int) -> Received:
            return Received("flipped", (await super().receive(version)).held_version)

    settings = config("run.steps=4", KL, "reference.refresh_every=2", *SYNC)
    bad = Flipped("reference 0", role="reference")
    cause = failure(settings, bad)
    assert isinstance(cause, ChecksumError)
    assert str(cause) == "version 2: the learner sent scripted-2, but reference 0 got flipped"
    assert bad.taken == []


def test_the_plan_says_whether_the_reference_moves() -> None:
    def row(*overrides: str) -> str:
        return dict(placement_rows(config(KL, *overrides)))["reference 0"]

    assert row().endswith(", frozen")
    assert row("reference.refresh_every=3").endswith(", takes the policy at every 3rd version")
    average = row("reference.refresh_every=1", "reference.ema=0.99")
    assert average.endswith(", takes an average of the policy with decay 0.99 at every version")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((KL, "reference.ema=0.9"), "reference.ema: found 0.9 with reference.refresh_every 0"),
        (("reference.refresh_every=2",), "reference.refresh_every: found 2 with algorithm.kl 'none'"),
        (
            (KL, "reference.refresh_every=3", "schedule.publish_every=2", "schedule.max_staleness=2"),
            "found 3 with schedule.publish_every 2; expected a multiple of it.* the next one is 4",
        ),
    ],
)
def test_contradictions(overrides: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(*overrides)
