"""What colocated runs refuse, with both numbers and a way out; and what they say that they will do."""

from __future__ import annotations

import pytest

from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.plan import placement_rows, turns_text

from .controller_harness import BASE

COLOCATED = ("placement.mode=colocated", "schedule.kv_after_swap=recompute")


def colocated(*overrides: str) -> Config:
    return parse_config(BASE, (*COLOCATED, *overrides))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("generators.replicas=3", "learner.ranks=2"),
            ("generators.replicas: found 3 with learner.ranks 2", "to 3"),
        ),
        (("learner.backend=fsdp2",), ("learner.backend: found 'fsdp2'", "expected deepspeed")),
        (("learner.zero_stage=3",), ("learner.zero_stage: found 3", "at most 2")),
        (
            ("learner.zero_stage=1", "model.dtype=bfloat16"),
            ("learner.zero_stage: found 1 with model.dtype bfloat16", "expected 2"),
        ),
        (("learner.lora.rank=4",), ("learner.lora", "expected null")),
        (("weight_sync.overlap=true",), ("weight_sync.overlap", "expected false")),
        (("generators.threads=2",), ("generators.threads: found 2 with learner.threads 1",)),
        (("learner.cpu_cores=[1]",), ("generators.cpu_cores: found None with learner.cpu_cores (1,)",)),
        (("generators.device=mps",), ("generators.device: found 'mps' with learner.device 'auto'",)),
        (
            ("schedule.publish_every=2", "schedule.max_staleness=3"),
            ("schedule.publish_every: found 2", "expected 1"),
        ),
        (
            ("schedule.kv_after_swap=keep",),
            ("schedule.kv_after_swap: found 'keep' with schedule.pipeline_depth 1", "pipeline_depth 0"),
        ),
        (
            ("schedule.in_flight_updates=false",),
            ("schedule.in_flight_updates: found false with schedule.pipeline_depth 1", "pipeline_depth 0"),
        ),
        (("generators.backend=vllm",), ("generators.backend 'vllm'", "placement.mode split")),
    ],
)
def test_what_the_placement_does_not_allow_is_refused(
    overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        colocated(*overrides)
    assert all(text in str(raised.value) for text in says), str(raised.value)


def test_synchronous_turns_leave_nothing_unfinished_and_so_take_any_setting_for_it() -> None:
    colocated("schedule.pipeline_depth=0", "schedule.kv_after_swap=keep", "schedule.in_flight_updates=false")


def test_the_plan_says_who_shares_a_process_and_how_deep_the_placement_lets_it_be() -> None:
    two = colocated("learner.ranks=2", "generators.replicas=2")
    rows = dict(placement_rows(two))
    assert rows["learner 1"].endswith("in the process of generator 1")
    assert "any depth" in turns_text(two)
    assert "computed anew" in turns_text(two)
    assert "computed anew" not in turns_text(colocated("schedule.pipeline_depth=0"))
