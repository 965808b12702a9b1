"""Which errors say that there was no memory left: a process that meets one is as good as dead."""

from __future__ import annotations

import errno

_TEXTS = ("can't allocate memory", "not enough memory", "can't start new thread", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own, the system's, and PyTorch's, which are RuntimeErrors, those of devices included."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )
