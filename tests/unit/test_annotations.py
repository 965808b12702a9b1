"""Annotations on their way from a role's process to the learner's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import CodecError, LearnerError, RoleError
from asyncrl.learners.samples import SentGroup, sent_groups, train_samples
from asyncrl.queues.annotations import decode_annotation, encode_annotation
from asyncrl.queues.codec import checksum, encode_group
from asyncrl.roles.base import Findings
from asyncrl.roles.worker import annotated
from asyncrl.types import Annotation, BatchItem, Group
from tests.unit.recorded_batches import batch_of, record_batch


def columns(group: Group, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(len(t.token_ids)).astype(np.float32) for t in group.trajectories]


def lengths(group: Group) -> list[int]:
    return [len(t.token_ids) for t in group.trajectories]


class Worker:
    """Two arrays and a scalar, from nothing."""

    def start(self) -> None: ...

    def annotate(self, group: Group) -> Findings:
        scalars = {"length": tuple(float(n) for n in lengths(group))}
        return Findings({"reference": columns(group), "values": columns(group, 1)}, scalars)

    def close(self) -> None: ...


def items(groups: list[Group]) -> list[BatchItem]:
    """As the controller holds them, payloads as bytes."""
    found = []
    for item in batch_of(groups, 2).items:
        payload = encode_group(item.payload)
        meta = replace(item.meta, checksum=checksum(payload), nbytes=len(payload))
        annotation = Annotation(*annotated("worker", Worker(), payload, meta.checksum))
        found.append(BatchItem(meta, payload, item.advantages, (annotation,)))
    return found


def test_arrays_come_back_bit_for_bit() -> None:
    (group,) = record_batch(2, groups=1)
    arrays = {"reference": columns(group), "values": columns(group, 1)}
    record = encode_annotation(group.ordinal, lengths(group), arrays)
    found = decode_annotation(record, group.ordinal, lengths(group))
    assert found.keys() == arrays.keys()
    for name, column in arrays.items():
        assert [a.tobytes() for a in found[name]] == [a.tobytes() for a in column]
    # A role that has scalars alone sends no arrays.
    assert decode_annotation(encode_annotation(3, [1, 0, 4], {}), 3, [1, 0, 4]) == {}


def test_what_is_damaged_or_about_another_group_is_refused() -> None:
    (group,) = record_batch(2, groups=1)
    good = encode_annotation(group.ordinal, lengths(group), {"values": columns(group)})
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 1
        with pytest.raises(CodecError):
            decode_annotation(bytes(bad), group.ordinal, lengths(group))
    with pytest.raises(CodecError, match=rf"of group {group.ordinal} came with group 99"):
        decode_annotation(good, 99, lengths(group))
    with pytest.raises(CodecError, match="for trajectories of"):
        decode_annotation(good, group.ordinal, lengths(group)[::-1])
    with pytest.raises(CodecError, match="b'ARLG', not b'ARLA'"):
        decode_annotation(encode_group(group), group.ordinal, lengths(group))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            {"a": [np.zeros(2, np.float32)], "b": [np.zeros(3, np.float32)]},
            r"b has the lengths \[3\], expected \[2\]",
        ),
        ({"a": [np.zeros(2)]}, "an array of a is float64"),
        ({"a": [np.zeros((1, 2), np.float32)]}, r"float32\[1, 2\]"),
        ({"a": [np.array([0.0, np.nan], np.float32)]}, "a has 1 of 2 values that are not finite"),
    ],
)
def test_what_is_no_annotation_is_not_encoded(arrays: dict, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        encode_annotation(0, [2], arrays)


def test_samples_carry_what_the_roles_found() -> None:
    groups = record_batch(2, groups=3)
    batch = items(groups)
    # Of two groups, as a rank gets them: not those that come first.
    sent, payloads = sent_groups(batch[1:])
    samples = train_samples([item.meta.checksum for item in batch[1:]], sent, payloads)
    expected = [(group, i) for group in groups[1:] for i in range(len(group.trajectories))]
    assert len(samples) == len(expected)
    for sample, (group, i) in zip(samples, expected, strict=True):
        assert (sample.ordinal, sample.trajectory.sample) == (group.ordinal, i)
        np.testing.assert_array_equal(sample.reference, columns(group)[i])
        np.testing.assert_array_equal(sample.values, columns(group, 1)[i])
    annotation = batch[0].annotations[0].meta
    assert annotation.nbytes > 0
    assert annotation.scalars == {"length": tuple(lengths(groups[0]))}


def test_groups_without_roles_are_as_before() -> None:
    batch = [replace(item, annotations=()) for item in items(record_batch(2, groups=2))]
    sent, payloads = sent_groups(batch)
    assert payloads == [item.payload for item in batch]
    for sample in train_samples([item.meta.checksum for item in batch], sent, payloads):
        assert sample.reference is sample.values is None


def test_other_bytes_or_unknown_arrays_are_not_trained_on() -> None:
    (item,) = items(record_batch(2, groups=1))
    (sent,), (payload, record) = sent_groups([item])
    with pytest.raises(LearnerError, match="the worker's annotation of group 2 arrived with checksum"):
        train_samples([item.meta.checksum], [sent], [payload, record + b"x"])
    with pytest.raises(LearnerError, match="a group arrived with checksum"):
        train_samples([item.meta.checksum + 1], [sent], [payload, record])
    group = record_batch(2, groups=1)[0]
    other = encode_annotation(group.ordinal, lengths(group), {"velues": columns(group)})
    meta = replace(sent.annotations[0], checksum=checksum(other))
    with pytest.raises(LearnerError, match=r"holds \['velues'\], expected \['kl', 'reference', 'values'\]"):
        train_samples([item.meta.checksum], [SentGroup(sent.advantages, (meta,))], [payload, other])


def test_a_worker_is_held_to_its_group() -> None:
    payload = encode_group(record_batch(2, groups=1)[0])
    with pytest.raises(RoleError, match=r"the critic got a group with checksum .*, expected 0x1"):
        annotated("critic", Worker(), payload, 1)

    class Broken(Worker):
        def annotate(self, group: Group) -> Findings:
            return Findings({}, {"kl": (0.0, float("nan"), 1.0, float("inf"))})

    with pytest.raises(CodecError, match=r"kl has 2 of 4 values that are not finite, expected none"):
        annotated("reference", Broken(), payload, checksum(payload))

    class Short(Worker):
        def annotate(self, group: Group) -> Findings:
            return Findings({}, {"kl": (0.0,)})

    with pytest.raises(RoleError, match="gave 1 values of kl for the 4 trajectories of train-2"):
        annotated("critic", Short(), payload, checksum(payload))


def test_scalars_alone_are_an_annotation_too() -> None:
    class Scalars(Worker):
        def annotate(self, group: Group) -> Findings:
            return Findings({}, {"kl": tuple(float(n) for n in lengths(group))})

    (item,) = items(record_batch(2, groups=1))
    annotation = Annotation(*annotated("reference", Scalars(), item.payload, item.meta.checksum))
    sent, payloads = sent_groups([replace(item, annotations=(annotation,))])
    samples = train_samples([item.meta.checksum], sent, payloads)
    assert len(samples) == 4
    assert all(sample.reference is sample.kl is sample.values is None for sample in samples)
