"""When the canary is due, what it says, and what the controller makes of it; on a virtual clock."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.errors import CanaryError, ConfigError, WeightSyncError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.run import make_canary, root_cause
from asyncrl.types import Float32Array, GenerationRequest, Task
from asyncrl.weight_sync.canary import TOKENS, Canary, canary_tokens
from asyncrl.weight_sync.scripted import scripted_logprobs

from .controller_harness import Outcome, config, run

STEPS = "run.steps=25"
OVERLAP = ("weight_sync.overlap=true", "schedule.pipeline_depth=1", "schedule.max_staleness=2")


def fast(**script) -> ScriptedGenerator:
    return ScriptedGenerator(**{"length": constant_length(10), "token_s": 0.1, **script})


def learner(settings: Config, **script) -> ScriptedLearner:
    return ScriptedLearner(max_staleness=settings.schedule.max_staleness, **{"step_s": 1.0, **script})


def tasks(*prompts: Sequence[int]) -> list[Task]:
    return [Task(i, f"train-{i}", "", tuple(ids)) for i, ids in enumerate(prompts)]


# ------------------------------------------------------------------ tokens, and the comparison alone


def test_tokens_are_the_first_prompts_one_after_the_other() -> None:
    assert canary_tokens(tasks([1, 2], [3], [4, 5, 6], [7]), limit=5) == (1, 2, 3, 4, 5)
    assert canary_tokens(tasks(range(200)), limit=500) == tuple(range(TOKENS))
    assert canary_tokens(tasks([1, 2], [3]), limit=500) == (1, 2, 3)
    endless = (Task(i, "", "", (i,)) for i in count())
    assert canary_tokens(endless, limit=500) == tuple(range(TOKENS))


def test_the_config_decides_interval_and_tolerance() -> None:
    def made(*overrides: str) -> Canary:
        canary = make_canary(config(*overrides), tasks(range(100)))
        assert canary is not None
        return canary

    def due(canary: Canary) -> list[int]:
        return [version for version in range(41) if canary.due(version, newcomers=False)]

    assert due(made()) == [0, 10, 20, 30, 40]
    spaced = made("weight_sync.canary_every=3", "schedule.publish_every=4", "schedule.max_staleness=4")
    assert due(spaced) == [0, 12, 24, 36]
    assert made().due(7, newcomers=True)
    assert make_canary(config("weight_sync.canary_every=0"), tasks([1, 2])) is None
    with pytest.raises(ConfigError, match=r"canary_every: found 10 with .* = 2; expected at least 3 tokens"):
        config("data.max_prompt_tokens=1", "rollout.max_new_tokens=1")

    def tolerates(canary: Canary, difference: float) -> bool:
        expected = np.full(len(canary.token_ids) - 1, -2.0, dtype=np.float32)
        canary.expect(0, expected, 0.0)
        try:
            canary.compare(0, {"generator 0": expected + np.float32(difference)}, 0.0)
        except CanaryError:
            return False
        return True

    assert [tolerates(made(), d) for d in (8e-3, 2e-2)] == [True, False]
    assert [tolerates(made("model.dtype=bfloat16"), d) for d in (0.15, 0.3)] == [True, False]
    assert [tolerates(made("weight_sync.canary_tolerance=0.5"), d) for d in (0.4, 0.6)] == [True, False]


def test_the_error_names_replica_version_position_and_both_numbers() -> None:
    canary = Canary((5, 6, 7, 8), every=1, tolerance=0.01, overlap=False)
    canary.expect(3, np.array([-1.0, -2.0, -3.0], dtype=np.float32), 0.5)
    good = np.array([-1.0, -2.001, -3.0], dtype=np.float32)
    bad = np.array([-1.0, -2.001, -4.5], dtype=np.float32)
    canary.compare(3, {"generator 0": good}, 0.25)
    found = canary.take_metrics()
    assert found == pytest.approx(
        {
            "timing_s/canary": 0.75,
            "weight_sync/canary_diff_mean": 1e-3 / 3,
            "weight_sync/canary_diff_max": 1e-3,
        },
        rel=1e-3,
    )
    assert canary.take_metrics() == {"timing_s/canary": 0.0}
    words = (
        r"generator 1 at version 3 \(and likewise generator 2\): log-probs of the canary's tokens differ "
        r"from the learner's by 0.5 on average, expected at most weight_sync.canary_tolerance = 0.01; the "
        r"furthest is token 4 of 4, -4.5 where the learner has -3"
    )
    with pytest.raises(CanaryError, match=words) as caught:
        canary.compare(3, {"generator 0": good, "generator 1": bad, "generator 2": bad}, 0.0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_log_prob_that_is_no_number_is_no_match() -> None:
    canary = Canary((5, 6, 7), every=1, tolerance=0.01, overlap=False)
    expected = np.array([-1.0, -2.0], dtype=np.float32)
    canary.expect(0, expected, 0.0)
    with pytest.raises(CanaryError, match=r"by nan on average.*token 3 of 3, nan where the learner has -2"):
        canary.compare(0, {"generator 0": np.array([-1.0, np.nan], dtype=np.float32)}, 0.0)


# ------------------------------------------------------------------ in a run


@pytest.mark.parametrize("overlap", [(), OVERLAP])
def test_the_first_push_and_each_kth_are_checked_and_reported(overlap: tuple[str, ...]) -> None:
    settings = config(STEPS, *overlap)
    outcome = run(
        settings, [fast(score_s=0.25), fast()], learner(settings, score_s=0.5, push_s=0.1, copy_s=0.1)
    )
    assert outcome.learner.scored == [0, 10, 20]
    assert [generator.scored for generator in outcome.generators] == [[0, 10, 20]] * 2
    lines = {line["policy_version"]: line for line in outcome.log.lines}
    checked = [v for v, line in lines.items() if "weight_sync/canary_diff_max" in line]
    assert len(checked) == 3
    assert checked[0] == 0
    assert {lines[v]["weight_sync/canary_diff_max"] for v in checked} == {0.0}
    assert sum(line["timing_s/canary"] for line in outcome.log.lines) == pytest.approx(3 * 0.75)


def test_every_kth_push_is_meant_of_those_that_publish_every_makes() -> None:
    settings = config(
        STEPS, "schedule.publish_every=3", "schedule.max_staleness=3", "weight_sync.canary_every=2"
    )
    assert run(settings).learner.scored == [0, 6, 12, 18, 24]


def test_without_a_canary_nobody_is_asked() -> None:
    outcome = run(config(STEPS, "weight_sync.canary_every=0"))
    assert outcome.learner.scored == outcome.generators[0].scored == []
    assert not any("canary" in name for line in outcome.log.lines for name in line)


def wrong_from(version: int):
    """Log-probs of an engine whose weights stay behind from ``version`` on."""

    def logprobs(live: int, token_ids: Sequence[int]) -> Float32Array:
        return scripted_logprobs(min(live, version - 1), token_ids)

    return logprobs


@pytest.mark.parametrize("overlap", [(), OVERLAP])
def test_a_replica_that_computes_something_else_ends_the_run_and_no_push_is_sent_again(
    overlap: tuple[str, ...],
) -> None:
    settings = config(STEPS, *overlap)
    sender = learner(settings)
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [fast(), fast(logprobs=wrong_from(15))], sender)
    error = root_cause(caught.value)
    assert isinstance(error, CanaryError)
    # Version 15 is not checked; at 20 it is six versions behind, and so are scripted log-probs.
    assert "generator 1 at version 20: log-probs" in str(error)
    assert "by 6 on average, expected at most" in str(error)
    assert sender.pushed.count(20) == 1


def dies_at(seconds: float):
    async def during(outcome: Outcome) -> None:
        await asyncio.sleep(seconds)
        outcome.generators[0].die()

    return during


def test_a_restarted_replica_is_checked_before_it_is_let_in() -> None:
    settings = config("run.steps=30")
    outcome = run(settings, [fast(), fast()], during=dies_at(9.3), spare=fast)
    spare = outcome.generators[2]
    assert spare.scored[0] not in (0, 10, 20, 30)
    assert spare.scored[1:] == [v for v in (10, 20, 30) if v > spare.scored[0]]
    assert outcome.learner.scored == sorted({0, 10, 20, 30, spare.scored[0]})


def test_a_restarted_replica_that_computes_something_else_is_never_let_in() -> None:
    served: list[GenerationRequest] = []

    def length(request: GenerationRequest) -> int:
        served.append(request)
        return 10

    def misloaded() -> ScriptedGenerator:
        return fast(logprobs=wrong_from(1), length=length)

    with pytest.raises(ExceptionGroup) as caught:
        run(config("run.steps=30"), [fast(), fast()], during=dies_at(9.3), spare=misloaded)
    error = root_cause(caught.value)
    assert isinstance(error, CanaryError)
    assert "generator 0 at version" in str(error)
    assert not served


def test_with_overlap_a_replica_let_in_beside_an_update_is_checked_at_the_next_version() -> None:
    settings = config("run.steps=30", *OVERLAP)
    sender = learner(settings, step_s=5.0)
    outcome = run(settings, [fast(), fast()], sender, during=dies_at(9.3), spare=fast)
    spare = outcome.generators[2]
    first = spare.scored[0]
    assert first not in (0, 10, 20, 30)
    assert outcome.generators[1].scored == sender.scored == sorted({0, 10, 20, 30, first})
    # Let in at the version before, which the learner had left: it worked meanwhile, unchecked.
    assert first - 1 in spare._versions


def test_a_replica_that_dies_while_it_is_asked_is_a_death_like_any_other() -> None:
    settings = config("run.steps=12")
    dying = fast(score_s=3.0)

    async def during(outcome: Outcome) -> None:
        while len(outcome.learner.scored) < 2:  # noqa: ASYNC110 the clock is virtual
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        dying.die()

    outcome = run(settings, [dying, fast()], during=during)
    assert outcome.learner.pushed.count(10) == 2
    assert outcome.learner.scored == [0, 10]
    assert outcome.generators[1].scored == [0, 10, 10]


def test_a_replica_that_never_answers_is_a_push_that_timed_out() -> None:
    settings = config("run.steps=12", "weight_sync.timeout_s=30")
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [fast(), fast(score_s=100.0)])
    error = root_cause(caught.value)
    assert isinstance(error, WeightSyncError)
    assert "scoring the canary of version 0 on generator 0, generator 1: not done after" in str(error)
