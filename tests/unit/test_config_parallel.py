"""What work that is shared out over ranks and workers refuses, with both numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.plan import placement_rows

from .controller_harness import BASE

SEQUENCE = ("learner.ranks=2", "learner.sequence_parallel=2")
TENSOR = ("learner.ranks=2", "learner.tensor_parallel=2")
MADE: dict[str, Any] = {**BASE, "model": {"create": {"heads": 6, "kv_heads": 3}}}
"""6 attention heads, 3 key-value heads."""


def made(*overrides: str) -> Config:
    return parse_config(MADE, overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("learner.ranks=3", "learner.sequence_parallel=2"),
            ("learner.ranks: found 3 with learner.sequence_parallel 2", "a multiple of 2", "4 is the next"),
        ),
        (
            ("learner.ranks=2", "learner.tensor_parallel=4"),
            ("learner.ranks: found 2 with learner.tensor_parallel 4", "4 is the next"),
        ),
        (
            ("learner.ranks=4", "learner.sequence_parallel=2", "learner.tensor_parallel=2"),
            ("learner.tensor_parallel: found 2 with learner.sequence_parallel 2", "never run"),
        ),
        (
            (*SEQUENCE, "placement.mode=colocated", "schedule.kv_after_swap=recompute"),
            ("learner.sequence_parallel: found 2 with placement.mode colocated", "placement.mode split"),
        ),
        ((*SEQUENCE, "learner.packing=true"), ("learner.packing: found true", "expected false")),
        (
            (*SEQUENCE, "learner.shared_prompts=true"),
            ("learner.shared_prompts: found true", "expected false"),
        ),
        ((*SEQUENCE, "learner.attention=eager"), ("learner.attention: found 'eager'", "auto or sdpa")),
        ((*TENSOR, "learner.zero_stage=3"), ("learner.zero_stage: found 3", "at most 2")),
        ((*TENSOR, "learner.lora.rank=4"), ("learner.lora: found it set", "expected null")),
        ((*TENSOR, "weight_sync.overlap=true"), ("weight_sync.overlap: found true", "expected false")),
        (
            (*TENSOR, "algorithm.kl=loss", "reference.place=learner", "reference.refresh_every=2"),
            ("reference.refresh_every: found 2 with reference.place learner", "expected 0"),
        ),
        (
            ("learner.ranks=6", "learner.sequence_parallel=2", "rollout.groups_per_step=2"),
            ("rollout.groups_per_step: found 2", "(sequence_parallel * tensor_parallel) = 3"),
        ),
    ],
)
def test_what_sharing_does_not_allow_is_refused(overrides: tuple[str, ...], says: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(BASE, overrides)
    assert all(text in str(raised.value) for text in says), str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("learner.ranks=4", "learner.sequence_parallel=4"),
            "learner.sequence_parallel: found 4; expected a divisor of the 6 attention heads",
        ),
        (TENSOR, "learner.tensor_parallel: found 2; expected a divisor of the 3 key-value heads"),
        (
            ("generators.backend=vllm", "generators.vllm.tensor_parallel_size=4"),
            "tensor_parallel_size: found 4; expected a divisor of the 6 attention heads of model.create: one "
            "of 1, 2, 3, 6",
        ),
        (
            ("generators.backend=vllm", "generators.vllm.tensor_parallel_size=2"),
            "tensor_parallel_size: found 2; expected a divisor or a multiple of the 3 key-value heads",
        ),
    ],
)
def test_heads_that_cannot_be_shared_out_are_named_with_both_numbers(
    overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        made(*overrides)
    assert says in str(raised.value), str(raised.value)


def test_groups_of_ranks_are_what_samples_are_split_over() -> None:
    learner = made("learner.ranks=6", "learner.tensor_parallel=3").learner
    assert (learner.shared, learner.replicas) == (3, 2)
    assert made("generators.backend=vllm", "generators.vllm.tensor_parallel_size=6").generators.workers == 6
    alone = parse_config(BASE).learner
    assert (alone.shared, alone.replicas) == (1, 1)


def test_the_plan_says_who_shares_what() -> None:
    rows = dict(placement_rows(parse_config(BASE, SEQUENCE)))
    assert "2 ranks share each sequence" in rows["learner 1"]
    assert "2 ranks share each layer" in dict(placement_rows(parse_config(BASE, TENSOR)))["learner 0"]
