from __future__ import annotations

import logging

import pytest

from asyncrl.alarms import LogprobAlarm


def figures(mean: float) -> dict[str, float]:
    return {"generator/logprob_diff_mean": mean, "generator/logprob_diff_max": 10 * mean}


def test_the_alarm_is_raised_once_and_again_when_the_difference_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarm = LogprobAlarm.for_dtype(None, "float32")
    means = [0.001, 0.01, 0.011, 0.015, 0.02, 0.021, 0.05, 0.04, 0.2]
    with caplog.at_level(logging.WARNING, logger="asyncrl"):
        raised = [alarm.check(version, figures(mean)) for version, mean in enumerate(means)]
    assert raised == [False, False, True, False, False, True, True, False, True]
    text = caplog.records[0].getMessage()
    assert "version 2" in text
    assert "0.011 on average (at most 0.11)" in text
    assert "generators.logprob_diff_alarm = 0.01" in text


def test_a_threshold_of_ones_own_and_steps_without_a_figure() -> None:
    alarm = LogprobAlarm.for_dtype(0.5, "bfloat16")
    assert not alarm.check(0, {})
    assert not alarm.check(1, figures(0.4))
    assert alarm.check(2, figures(0.6))
    assert not LogprobAlarm.for_dtype(None, "bfloat16").check(0, figures(0.09))
