"""Random schedules in virtual time: the bound holds, nothing is lost, and nothing hangs.

``schedule_harness`` checks every promise after every event; here it is given schedules to run.
"""

from collections import Counter
from statistics import fmean
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .schedule_harness import GROUP_BYTES, Params, run_schedule

SCHEDULES = 10_000
MASKING_SCHEDULES = 1_000


def test_ten_thousand_random_schedules_keep_every_promise():
    happened: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        params = Params.random(seed)
        try:
            happened += run_schedule(params).happened
        except Exception as error:
            error.add_note(f"seed {seed}: {params}")
            raise
    # What was never met was never tested.
    for kind in (
        *("trained", "failed", "filtered", "dropped", "reissued"),
        *("bad step", "queue full", "waited at the bound", "lag = S", "postponed"),
    ):
        assert happened[kind] >= SCHEDULES // 20, f"{kind} happened only {happened[kind]} times: {happened}"


def test_masking_keeps_every_promise_where_it_is_needed_most():
    happened: Counter[str] = Counter()
    for seed in range(MASKING_SCHEDULES):
        params = Params.masking(seed)
        try:
            happened += run_schedule(params).happened
        except Exception as error:
            error.add_note(f"seed {seed}: {params}")
            raise
    for kind in ("postponed", "masked", "all masked", "reissued", "bad step"):
        assert happened[kind] >= MASKING_SCHEDULES // 50, f"{kind} happened too rarely: {happened}"


@st.composite
def schedules(draw: st.DrawFn) -> Params:
    depth, every, batch = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    at_bound: Literal["wait", "drop", "mask"] = draw(st.sampled_from(("wait", "drop", "mask")))
    share = st.floats(0.0, 0.5)
    return Params(
        seed=draw(st.integers(0, 2**32)),
        steps=draw(st.integers(1, 20)),
        groups_per_step=batch,
        pipeline_depth=depth,
        max_staleness=depth + every - 1 + draw(st.integers(0, 4)),
        publish_every=every,
        at_bound=at_bound,
        in_flight=at_bound == "mask" or draw(st.booleans()),
        replicas=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 8)),
        lengths=draw(st.sampled_from(("constant", "exponential", "lognormal"))),
        rollout_time=draw(st.floats(0.01, 5.0)),
        score_time=draw(st.floats(0.0, 3.0)),
        update_time=draw(st.floats(0.0, 2.0)),
        push_time=draw(st.floats(0.0, 2.5)),
        failed=draw(share),
        filtered=draw(share),
        death=draw(st.floats(0.0, 0.2)),
        bad_step=draw(st.floats(0.0, 0.4)),
        early_publish=draw(st.floats(0.0, 1.0)),
        max_bytes=draw(st.integers(1, 3 * batch * GROUP_BYTES)),
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules())
def test_a_schedule_that_breaks_a_promise_is_shrunk(params):
    result = run_schedule(params)
    assert len(result.lags) == params.steps * params.groups_per_step


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("at_bound", ["wait", "drop", "mask"])
def test_depth_zero_is_synchronous_whatever_the_bound(staleness, at_bound):
    params = Params(pipeline_depth=0, max_staleness=staleness, at_bound=at_bound, steps=30, push_time=2.5)
    assert run_schedule(params).lags == [0] * 60


@pytest.mark.parametrize(("depth", "staleness"), [(0, 0), (1, 1), (1, 2), (2, 4), (4, 8)])
def test_mean_lag_is_near_the_depth_where_generation_is_the_faster_side(depth, staleness):
    params = Params(
        pipeline_depth=depth,
        max_staleness=staleness,
        steps=200,
        groups_per_step=4,
        lengths="lognormal",
        rollout_time=0.1,
        push_time=0.05,
        in_flight=False,
    )
    lags = run_schedule(params).lags
    assert max(lags) <= staleness
    assert fmean(lags) == pytest.approx(depth, abs=0.15 * depth + 0.05)


def test_a_run_is_a_pure_function_of_its_parameters():
    params = Params.random(17)
    assert run_schedule(params) == run_schedule(params)
