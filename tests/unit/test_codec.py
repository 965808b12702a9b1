"""The codec: what goes in comes out, and whatever else comes in raises CodecError and nothing else."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import struct
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import CodecError, TornRecordError
from asyncrl.queues import codec
from asyncrl.queues.codec import (
    append_record,
    checksum,
    decode_group,
    encode_group,
    group_meta,
    read_records,
)
from asyncrl.types import Group, SampleFailure, Trajectory

ARRAYS = ("prompt_ids", "token_ids", "loss_mask", "logprobs", "versions")


def trajectory(sample: int = 0, tokens: int = 3, **changes: object) -> Trajectory:
    base = Trajectory(
        sample=sample,
        attempt=1,
        prompt_ids=np.arange(2, dtype=np.int32),
        token_ids=np.arange(10, 10 + tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=np.full(tokens, 4, np.int32),
        reward=0.5,
        finish_reason="stop",
        rewards={"exact": 0.5},
    )
    return dataclasses.replace(base, **changes)


def group(*trajectories: Trajectory, **changes: object) -> Group:
    return dataclasses.replace(Group(7, "train-7", 4, trajectories or (trajectory(),)), **changes)


def test_a_baseline_comes_out_beside_the_others() -> None:
    untrained = trajectory(2, loss_mask=np.zeros(3, np.bool_), reward=0.25)
    with_baseline = group(trajectory(0), trajectory(1, tokens=5), baseline=untrained)
    payload = encode_group(with_baseline)
    found = decode_group(payload)
    assert_equal(found, with_baseline)
    assert [t.sample for t in found.answers] == [0, 1, 2]
    assert found.baseline is not None
    assert found.baseline.reward == 0.25
    meta = group_meta(with_baseline, payload)
    assert meta.baseline == untrained.meta()
    assert (meta.rewards, meta.loss_tokens) == ((0.5, 0.5), 8)
    with pytest.raises(CodecError, match=r"samples \[0, 0\]"):
        encode_group(group(trajectory(0), baseline=dataclasses.replace(untrained, sample=0)))


@pytest.mark.parametrize("value", [False, 1, None])
def test_a_baseline_that_is_not_marked_by_true_is_refused(value: object) -> None:
    whole = encode_group(group(trajectory(0), baseline=trajectory(1)))
    document = msgpack.unpackb(whole[16:])
    document["baseline"] = value
    with pytest.raises(CodecError, match="baseline is"):
        decode_group(record(msgpack.packb(document)))


def assert_equal(found: Group, expected: Group) -> None:
    assert (found.ordinal, found.uid, found.start_version) == (
        expected.ordinal,
        expected.uid,
        expected.start_version,
    )
    assert len(found.trajectories) == len(expected.trajectories)
    for a, b in zip(found.answers, expected.answers, strict=True):
        for name in ARRAYS:
            left, right = getattr(a, name), getattr(b, name)
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes()
        for name in ("sample", "attempt", "reward", "finish_reason", "rewards", "environment_tokens"):
            assert getattr(a, name) == getattr(b, name)


def record(body: bytes) -> bytes:
    """A record whose header is right, whatever its body."""
    return codec._header(body) + body


def document(**changes: object) -> dict[str, object]:
    """The body of a good group, unpacked, with some of its keys changed."""
    return {**msgpack.unpackb(encode_group(group())[codec._HEADER.size :]), **changes}


@st.composite
def groups(draw: st.DrawFn) -> Group:
    start = draw(st.integers(0, 2**31 - 1))
    ids = st.integers(0, 2**31 - 1)
    trajectories = []
    for sample in range(draw(st.integers(0, 4))):
        n = draw(st.integers(0, 6))
        mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
        versions = np.array(draw(st.lists(st.integers(start, 2**31 - 1), min_size=n, max_size=n)), np.int32)
        versions[~mask] = draw(st.integers(0, start))  # tool tokens may carry anything
        logprob = st.floats(-(2.0**100), 0.0, width=32)
        trajectories.append(
            Trajectory(
                sample=sample,
                attempt=draw(st.integers(0, 3)),
                prompt_ids=np.array(draw(st.lists(ids, max_size=5)), np.int32),
                token_ids=np.array(draw(st.lists(ids, min_size=n, max_size=n)), np.int32),
                loss_mask=mask,
                logprobs=np.array(draw(st.lists(logprob, min_size=n, max_size=n)), np.float32),
                versions=versions,
                reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
                finish_reason=draw(st.sampled_from(("stop", "length", "abort"))),
                rewards=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=3)),
                environment_tokens=draw(st.integers(0, int((~mask).sum()))),
            )
        )
    uid = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=10))
    return Group(draw(st.integers(0, 2**63 - 1)), uid, start, tuple(trajectories))


@settings(max_examples=200, deadline=None)
@given(groups())
def test_round_trip(expected):
    payload = encode_group(expected)
    assert_equal(decode_group(payload), expected)
    assert encode_group(decode_group(payload)) == payload
    assert_equal(decode_group(memoryview(bytearray(payload))), expected)


def test_decoded_arrays_are_read_only_views():
    found = decode_group(encode_group(group(trajectory(0), trajectory(1)))).trajectories
    for name in ARRAYS:
        array = getattr(found[1], name)
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert array.dtype.isnative
    with pytest.raises(ValueError, match="read-only"):
        found[0].logprobs[0] = 0.0


def test_arrays_that_are_not_contiguous_are_encoded_by_value():
    every_other = np.arange(6, dtype=np.int32)[::2]
    found = decode_group(encode_group(group(trajectory(token_ids=every_other))))
    assert found.trajectories[0].token_ids.tolist() == [0, 2, 4]


def test_the_body_is_plain_msgpack():
    body = document()
    assert body["uid"] == "train-7"
    assert body["columns"]["token_ids"] == ["<i4", 3, np.array([10, 11, 12], "<i4").tobytes()]
    assert body["columns"]["loss_mask"] == ["|b1", 3, b"\1\1\1"]


def test_meta_and_checksum():
    mixed = trajectory(
        2,
        tokens=4,
        versions=np.array([0, 6, 5, 7], np.int32),
        loss_mask=np.array([False, True, True, True]),
    )
    encoded = group(trajectory(0), mixed)
    payload = encode_group(encoded)
    failure = SampleFailure(1, 0, "RewardTimeoutError", "no answer in 10 s")
    meta = group_meta(encoded, payload, [failure])
    assert (meta.ordinal, meta.uid, meta.start_version) == (7, "train-7", 4)
    assert (
        (meta.nbytes, meta.checksum)
        == (len(payload), zlib.crc32(payload))
        == (len(payload), checksum(payload))
    )
    assert [t.sample for t in meta.trajectories] == [0, 2]
    assert (meta.trajectories[1].oldest_version, meta.trajectories[1].newest_version) == (5, 7)
    assert (meta.oldest_version, meta.loss_tokens, meta.failures) == (4, 6, (failure,))


def i4(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f4(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


REFUSED = {
    "more of the environment than is untrained": (
        {"environment_tokens": 2, "loss_mask": np.array([True, False, True])},
        "environment_tokens of sample 0 is 2, expected 0 to the 1 tokens",
    ),
    "less than nothing of the environment": ({"environment_tokens": -1}, "environment_tokens .* is -1"),
    "a shorter loss mask": ({"loss_mask": np.ones(2, np.bool_)}, "differ in length: .*'loss_mask': 2"),
    "a longer versions": ({"versions": i4(4, 4, 4, 4)}, "differ in length"),
    "int64 ids": ({"token_ids": np.arange(3)}, r"token_ids of sample 0 is int64\[3\], expected .* int32"),
    "float64 log-probs": ({"logprobs": np.zeros(3)}, "logprobs of sample 0 is float64"),
    "an int mask": ({"loss_mask": i4(1, 1, 1)}, "loss_mask of sample 0 is int32"),
    "a list": ({"token_ids": [1, 2, 3]}, "token_ids of sample 0 is list"),
    "two dimensions": (
        {"prompt_ids": np.zeros((2, 2), np.int32)},
        r"prompt_ids of sample 0 is int32\[2, 2\]",
    ),
    "object arrays": ({"token_ids": np.array([1, 2, 3], object)}, "token_ids of sample 0 is object"),
    "NaN": ({"logprobs": f4(-1, math.nan, -1)}, "logprobs lie between nan"),
    "minus infinity": ({"logprobs": f4(-1, -math.inf, -1)}, "logprobs lie between -inf"),
    "infinity": ({"logprobs": f4(-1, math.inf, -1)}, "and inf"),
    "probability above 1": ({"logprobs": f4(-1, 2e-4, -1)}, "expected finite values of at most 0"),
    "a negative version": ({"versions": i4(4, -1, 4)}, "versions holds -1"),
    "older than the start": ({"versions": i4(4, 3, 4)}, "of version 3, but its group started at 4"),
    "a negative token": ({"token_ids": i4(1, -100, 3)}, "token_ids holds -100"),
    "a negative prompt token": ({"prompt_ids": i4(-1)}, "prompt_ids holds -1"),
    "a NaN reward": ({"reward": math.nan}, "reward is nan, expected a finite number"),
    "an enormous reward": ({"reward": 10**400}, "reward is 1000"),
    "no reward": ({"reward": None}, "reward is None"),
    "a boolean reward": ({"reward": True}, "reward is True"),
    "a named NaN": ({"rewards": {"f": math.nan}}, r"rewards\['f'\] is nan"),
    "a reward without a name": ({"rewards": {3: 1.0}}, "a name in rewards is 3"),
    "rewards in a list": ({"rewards": [1.0]}, "rewards is a list"),
    "another reason": ({"finish_reason": "tired"}, "finish_reason is 'tired', expected one of stop, length"),
    "a negative sample": ({"sample": -1}, "sample is -1"),
    "a float attempt": ({"attempt": 1.0}, "attempt is 1.0"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_encode_refuses(changes, message):
    with pytest.raises(CodecError, match=message):
        encode_group(group(trajectory(**changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ordinal": -1}, "ordinal is -1"),
        ({"ordinal": 2**63}, "ordinal is 9223372036854775808"),
        ({"ordinal": True}, "ordinal is True"),
        ({"uid": 7}, "uid is 7"),
        ({"uid": "\ud800"}, "cannot be encoded"),
        ({"start_version": None}, "start_version is None"),
        ({"trajectories": (trajectory(3), trajectory(3))}, r"samples \[3, 3\], expected each once"),
    ],
)
def test_encode_refuses_groups(changes, message):
    with pytest.raises(CodecError, match=message):
        encode_group(group(**changes))


def test_rounding_above_zero_is_accepted():
    payload = encode_group(group(trajectory(logprobs=f4(0, 9e-5, -1))))
    assert decode_group(payload).trajectories[0].logprobs[1] == np.float32(9e-5)


def test_oversize_bodies_are_refused_on_both_sides(monkeypatch):
    payload = encode_group(group())
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 64)
    with pytest.raises(CodecError, match=r"takes \d+ bytes, the limit is 64"):
        encode_group(group())
    with pytest.raises(CodecError, match=r"claims a body of \d+ bytes, the limit is 64"):
        decode_group(payload)


def test_any_changed_byte_is_noticed():
    payload = encode_group(group(trajectory(0), trajectory(1)))
    for position in range(len(payload)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(payload)
            damaged[position] ^= flip
            with pytest.raises(CodecError):
                decode_group(damaged)


def test_any_cut_or_addition_is_noticed():
    payload = encode_group(group())
    for length in range(len(payload)):
        with pytest.raises(CodecError, match="cut off"):
            decode_group(payload[:length])
    with pytest.raises(CodecError, match="followed by something else"):
        decode_group(payload + b"\0")


def test_other_formats_are_told_apart_from_damage():
    with pytest.raises(CodecError, match="it was not written by asyncrl"):
        decode_group(pickle.dumps({"token_ids": list(range(100))}))
    newer = codec.FORMAT_VERSION + 1
    header = struct.pack("<4sHHII", codec.MAGIC, newer, codec._header_check(newer, 0, 0), 0, 0)
    with pytest.raises(
        CodecError, match=f"format version {newer}, this asyncrl reads {codec.FORMAT_VERSION}"
    ):
        decode_group(header)


FOREIGN = {
    "not a map": [1, 2],
    "a missing key": {k: v for k, v in document().items() if k != "uid"},
    "another key": document(extra=1),
    "trajectories that are none": document(trajectories=5),
    "a short head": document(trajectories=[[0, 0, 2, 3]]),
    "a negative length": document(trajectories=[[0, 0, 2, -3, 0.5, "stop", {}]]),
    "lengths beyond the columns": document(trajectories=[[0, 0, 2, 4, 0.5, "stop", {}]]),
    "prompt lengths beyond the columns": document(trajectories=[[0, 0, 9, 3, 0.5, "stop", {}]]),
    "a repeated sample": document(
        trajectories=[[0, 0, 1, 1, 0.5, "stop", {}], [0, 0, 1, 2, 0.5, "stop", {}]],
    ),
    "columns that are none": document(columns=[]),
    "a NaN reward": document(trajectories=[[0, 0, 2, 3, math.nan, "stop", {}]]),
    "a timestamp": document(ordinal=msgpack.Timestamp(1, 0)),
    "an extension": document(ordinal=msgpack.ExtType(5, b"x")),
}


@pytest.mark.parametrize("body", FOREIGN.values(), ids=FOREIGN)
def test_a_sound_record_with_another_body_is_refused(body):
    with pytest.raises(CodecError):
        decode_group(record(msgpack.packb(body)))


@pytest.mark.parametrize(
    ("column", "raw"),
    [
        ("loss_mask", ["|b1", 3, b"\1\2\1"]),
        ("loss_mask", ["<i4", 3, b"\1" * 12]),
        ("token_ids", ["|O", 3, b"\1" * 24]),
        ("token_ids", ["<i4", 3, b"\1" * 11]),
        ("token_ids", ["<i4", -3, b""]),
        ("token_ids", ["<i4", 2, b"\1" * 8]),
        ("token_ids", "<i4"),
        ("token_ids", ["<i4", 3, [1, 2, 3]]),
        ("logprobs", ["<f4", 3, f4(-1, math.nan, -1).tobytes()]),
        ("versions", ["<i4", 3, i4(4, 2, 4).tobytes()]),
    ],
)
def test_a_column_that_lies_is_refused(column, raw):
    body = document()
    body["columns"][column] = raw
    with pytest.raises(CodecError):
        decode_group(record(msgpack.packb(body)))


def test_a_body_nested_too_deep_is_refused():
    with pytest.raises(CodecError, match="not msgpack"):
        decode_group(record(b"\x91" * 100_000 + b"\xc0"))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_codec_error_alone(noise):
    for payload in (noise, record(noise), codec._HEADER.pack(codec.MAGIC, 1, 0, len(noise), 0) + noise):
        with pytest.raises(CodecError):
            decode_group(payload)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(groups(), st.data())
def test_a_body_damaged_under_a_right_checksum_is_refused_or_valid(good, data):
    """Past the checksum: a byte, a key or a head changed at will. Never another exception."""
    body = bytearray(encode_group(good)[codec._HEADER.size :])
    how = data.draw(st.sampled_from(("byte", "key", "column", "head")))
    if how == "byte":
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    else:
        unpacked = msgpack.unpackb(bytes(body))
        if how == "key":
            unpacked[data.draw(st.sampled_from(sorted(unpacked)))] = data.draw(values)
        elif how == "column":
            unpacked["columns"][data.draw(st.sampled_from(ARRAYS))] = data.draw(values)
        elif unpacked["trajectories"]:
            unpacked["trajectories"][0][data.draw(st.integers(0, 6))] = data.draw(values)
        body = bytearray(msgpack.packb(unpacked))
    try:
        found = decode_group(record(bytes(body)))
    except CodecError:
        return
    assert_equal(decode_group(encode_group(found)), found)  # what is accepted keeps every invariant


def test_a_file_of_records():
    payloads = [encode_group(group(ordinal=n)) for n in range(5)]
    file = io.BytesIO()
    for payload in payloads:
        append_record(file, payload)
    file.seek(0)
    assert list(read_records(file)) == payloads
    assert [decode_group(payload).ordinal for payload in payloads] == list(range(5))
    assert list(read_records(io.BytesIO())) == []


def test_a_torn_last_record_is_told_with_its_place_after_all_others():
    first, second = encode_group(group(ordinal=0)), encode_group(group(ordinal=1))
    for kept in range(1, len(second)):
        records = read_records(io.BytesIO(first + second[:kept]))
        assert next(records) == first
        with pytest.raises(TornRecordError, match=f"the record at byte {len(first)} ends after") as caught:
            next(records)
        assert caught.value.offset == len(first)
        assert pickle.loads(pickle.dumps(caught.value)).offset == len(first)


def test_damage_in_a_file_is_not_taken_for_a_torn_end():
    """A length that was changed would otherwise swallow the records behind it."""
    first, second = encode_group(group(ordinal=0)), encode_group(group(ordinal=1))
    for position in range(codec._HEADER.size):
        damaged = bytearray(first + second)
        damaged[position] ^= 0x40
        with pytest.raises(CodecError) as caught:
            list(read_records(io.BytesIO(damaged)))
        assert not isinstance(caught.value, TornRecordError)
