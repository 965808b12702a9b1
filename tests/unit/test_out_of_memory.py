"""Errors that say that there was no memory left."""

from __future__ import annotations

import errno

import pytest
import torch

from asyncrl.out_of_memory import is_out_of_memory


def no_room_on_the_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def no_room_in_python() -> None:
    bytearray(1 << 60)


@pytest.mark.parametrize("allocate", [no_room_on_the_cpu, no_room_in_python])
def test_what_fails_for_want_of_memory_says_so(allocate) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((RuntimeError, MemoryError)) as failed:
        allocate()
    assert is_out_of_memory(failed.value)


def test_devices_and_the_system_say_it_in_their_own_way() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("can't start new thread"))


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "full"), ValueError()]
)
def test_other_errors_do_not(error: Exception) -> None:
    assert not is_out_of_memory(error)
