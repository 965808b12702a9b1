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
        (("weight_sync.backend=shm",), ("weight_sync.backend: found 'shm'", "generators.backend vllm")),
    ],
)
def test_what_the_placement_does_not_allow_is_refused(
    overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        colocated(*overrides)
    assert all(text in str(raised.value) for text in says), str(raised.value)


VLLM = ("generators.backend=vllm",)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("generators.replicas=3", "learner.ranks=2"),
            ("generators.replicas: found 3 with learner.ranks 2", "each device", "to 3"),
        ),
        (
            ("learner.zero_stage=3",),
            ("learner.zero_stage: found 3 with learner.device 'auto'", "expected 2", "learner.device cpu"),
        ),
        (
            ("learner.backend=fsdp2", "learner.device=cuda"),
            ("learner.backend: found 'fsdp2' with learner.device 'cuda'", "expected deepspeed"),
        ),
        (
            ("learner.zero_stage=0", "learner.device=cuda"),
            ("learner.zero_stage: found 0 with learner.device 'cuda'", "expected 2"),
        ),
        (
            ("generators.vllm.tensor_parallel_size=2",),
            ("generators.vllm.tensor_parallel_size: found 2 with placement.mode colocated", "expected 1"),
        ),
        (
            ("generators.vllm.enable_sleep_mode=true",),
            ("generators.vllm.enable_sleep_mode", "placement.mode"),
        ),
        (("weight_sync.overlap=true",), ("weight_sync.overlap", "expected false")),
        (("learner.cpu_cores=[1]",), ("generators.cpu_cores: found None with learner.cpu_cores (1,)",)),
        (
            ("generators.device=cuda", "learner.device=cpu"),
            ("generators.device: found 'cuda' with learner.device 'cpu'",),
        ),
        (("weight_sync.backend=nccl",), ("weight_sync.backend: found 'nccl'", "two processes on one GPU")),
        (
            ("weight_sync.backend=ipc", "learner.device=cpu"),
            ("weight_sync.backend: found 'ipc'", "learner.device is cpu"),
        ),
        (
            ("weight_sync.backend=shm", "learner.device=cuda"),
            ("weight_sync.backend: found 'shm'", "learner.device is cuda"),
        ),
        (
            ("schedule.publish_every=2", "schedule.max_staleness=3"),
            ("schedule.publish_every: found 2", "expected 1", "give their weights up"),
        ),
        (
            ("schedule.kv_after_swap=keep",),
            ("schedule.kv_after_swap: found 'keep' with schedule.pipeline_depth 1", "pipeline_depth 0"),
        ),
        (
            ("algorithm.kl=loss", "reference.refresh_every=2"),
            ("reference.refresh_every: found 2", "expected 0, or reference.place learner"),
        ),
    ],
)
def test_what_two_processes_on_one_device_cannot_do_is_refused(
    overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        colocated(*VLLM, *overrides)
    assert all(text in str(raised.value) for text in says), str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("generators.threads=2",),
        ("learner.zero_stage=3", "learner.device=cpu"),
        ("learner.lora.rank=4",),
        ("weight_sync.backend=gloo",),
        ("algorithm.kl=loss", "reference.refresh_every=2", "reference.place=learner"),
        ("schedule.pipeline_depth=0", "schedule.kv_after_swap=keep", "schedule.in_flight_updates=false"),
    ],
)
def test_two_processes_have_settings_of_their_own_where_they_can(overrides: tuple[str, ...]) -> None:
    colocated(*VLLM, *overrides)


def test_handing_over_is_for_colocated_vllm_alone() -> None:
    with pytest.raises(ConfigError, match=r"weight_sync.backend: found 'ipc' with placement.mode 'split'"):
        parse_config(BASE, ("weight_sync.backend=ipc",))


def test_synchronous_turns_leave_nothing_unfinished_and_so_take_any_setting_for_it() -> None:
    colocated("schedule.pipeline_depth=0", "schedule.kv_after_swap=keep", "schedule.in_flight_updates=false")


def test_the_plan_says_who_shares_a_process_and_how_deep_the_placement_lets_it_be() -> None:
    two = colocated("learner.ranks=2", "generators.replicas=2")
    rows = dict(placement_rows(two))
    assert rows["learner 1"].endswith("in the process of generator 1")
    assert "any depth" in turns_text(two)
    assert "computed anew" in turns_text(two)
    assert "computed anew" not in turns_text(colocated("schedule.pipeline_depth=0"))
    vllm = colocated(*VLLM, "learner.ranks=2", "generators.replicas=2")
    assert dict(placement_rows(vllm))["learner 1"].endswith("in turns on the device of generator 1")
    assert "vLLM sleeps" in turns_text(vllm)
    assert "computed anew" in turns_text(vllm)
