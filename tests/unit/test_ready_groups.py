"""Ready groups survive on disk with their payloads and annotations, and damage to them is noticed."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from asyncrl.checkpoint.groups import encode_ready, payloads_of, read_ready, with_payloads
from asyncrl.errors import CodecError
from asyncrl.queues.annotations import encode_annotation
from asyncrl.queues.codec import checksum, encode_group, group_meta
from asyncrl.types import Annotation, AnnotationMeta, Group, ReadyGroup, SampleFailure, Trajectory


def ready_group(ordinal: int) -> ReadyGroup:
    length = 3 + ordinal
    trajectory = Trajectory(
        sample=1,
        attempt=0,
        prompt_ids=np.arange(4, dtype=np.int32),
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.bool_),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.full(length, 2, np.int32),
        reward=0.25,
        finish_reason="stop",
        rewards={"exact": 0.25},
    )
    group = Group(ordinal, f"train-{ordinal}", 2, (trajectory,))
    payload = encode_group(group)
    meta = group_meta(group, payload, [SampleFailure(0, 0, "RewardTimeoutError", "too slow")])
    record = encode_annotation(ordinal, [length], {"reference": [np.zeros(length, np.float32)]})
    scalars = {"kl": (0.125,)}
    annotation = AnnotationMeta("reference", checksum(record), len(record), 0.5, scalars, 1)
    return ReadyGroup(meta, payload, 5, (Annotation(annotation, record),))


def test_what_is_read_is_what_was_written() -> None:
    groups = [ready_group(7), ready_group(3)]
    file = BytesIO(b"".join(encode_ready(group, 2) for group in groups))
    assert list(read_ready(file)) == [(group, 2) for group in groups]


def test_payloads_change_places_with_references_and_back() -> None:
    groups = [ready_group(0), ready_group(1)]
    stored = with_payloads(groups, [f"ref {i}" for i in range(4)])
    assert payloads_of(stored) == ["ref 0", "ref 1", "ref 2", "ref 3"]
    assert with_payloads(stored, payloads_of(groups)) == groups


def test_an_annotation_that_is_not_the_one_of_its_meta_is_refused() -> None:
    group = ready_group(0)
    swapped = replace(group.annotations[0], payload=ready_group(1).annotations[0].payload)
    file = BytesIO(encode_ready(replace(group, annotations=(swapped,)), 2))
    with pytest.raises(CodecError, match="the annotation of reference has another checksum"):
        list(read_ready(file))
