from __future__ import annotations

import pytest
import torch

from asyncrl.errors import InvariantError
from asyncrl.weight_sync import verify
from asyncrl.weight_sync.verify import ChecksumBuilder, Method, state_checksum, tensor_checksum

pytestmark = pytest.mark.parametrize("method", ["xxh3", "sums"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def weights(dtype: torch.dtype, numel: int = 5001) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small tensor spans several chunks."""
    monkeypatch.setattr(verify, "_CPU_ROWS", 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_have_equal_checksums(method: Method, dtype: torch.dtype) -> None:
    first = weights(dtype)
    assert tensor_checksum(first, method) == tensor_checksum(first.clone(), method)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("i", "j"), [(0, 1), (3, 900), (511, 512), (1023, 1024), (0, 4096), (4999, 5000)])
def test_exchanging_two_elements_shows(method: Method, dtype: torch.dtype, i: int, j: int) -> None:
    first = weights(dtype)
    other = first.clone()
    other[[i, j]] = first[[j, i]]
    assert not torch.equal(first, other)
    assert tensor_checksum(first, method) != tensor_checksum(other, method)


@pytest.mark.parametrize("numel", [1, 3, 1000, 1001])
def test_any_one_flipped_bit_shows(method: Method, numel: int) -> None:
    first = weights(torch.bfloat16, numel)
    expected = tensor_checksum(first, method)
    for position in {0, numel // 2, numel - 1}:
        for bit in range(16):
            other = first.clone()
            other.view(torch.int16)[position] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert tensor_checksum(other, method) != expected, (position, bit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_zero_shows(method: Method, dtype: torch.dtype) -> None:
    assert tensor_checksum(torch.zeros(5, dtype=dtype), method) != tensor_checksum(
        -torch.zeros(5, dtype=dtype), method
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negated_tensor_shows(method: Method, dtype: torch.dtype) -> None:
    # Every sign bit flips: in one 64-bit word their sums would cancel.
    first = weights(dtype, 1000)
    assert tensor_checksum(first, method) != tensor_checksum(-first, method)


def test_chunk_size_does_not_matter(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights(torch.float32)
    small = tensor_checksum(first, method)
    monkeypatch.setattr(verify, "_CPU_ROWS", 1 << 10)
    assert tensor_checksum(first, method) == small


def test_a_slice_of_a_bucket_counts_as_the_tensor_it_carries(method: Method) -> None:
    odd = weights(torch.bfloat16, 7)
    bucket = torch.cat([weights(torch.bfloat16, 3), odd])
    assert tensor_checksum(bucket[3:], method) == tensor_checksum(odd, method)


def test_a_view_with_strides_counts_by_its_elements(method: Method) -> None:
    matrix = weights(torch.float32, 30).view(5, 6)
    assert tensor_checksum(matrix.T, method) == tensor_checksum(matrix.T.contiguous(), method)
    assert tensor_checksum(matrix.T, method) != tensor_checksum(matrix, method)


def test_state_depends_on_name_shape_and_dtype_but_not_on_order(method: Method) -> None:
    a, b = weights(torch.float32, 12), weights(torch.float32, 5)
    expected = state_checksum([("a", a), ("b", b)], method)
    assert len(expected) == 32
    assert state_checksum([("b", b), ("a", a)], method) == expected
    assert state_checksum([("a", a), ("c", b)], method) != expected
    assert state_checksum([("a", a.view(3, 4)), ("b", b)], method) != expected
    assert state_checksum([("a", a.view(torch.int32)), ("b", b)], method) != expected
    assert state_checksum([("a", a)], method) != expected


def test_memory_may_be_reused_once_a_tensor_was_added(method: Method) -> None:
    staging = torch.empty(8)
    builder = ChecksumBuilder(method)
    for name, value in (("a", 1.0), ("b", 2.0)):
        builder.add(name, staging.fill_(value))
    assert builder.hexdigest() == state_checksum(
        [("a", torch.full((8,), 1.0)), ("b", torch.full((8,), 2.0))], method
    )


def test_adding_a_name_twice_is_refused(method: Method) -> None:
    builder = ChecksumBuilder(method)
    builder.add("a", torch.ones(2))
    with pytest.raises(InvariantError, match="'a' was added twice"):
        builder.add("a", torch.ones(2))
