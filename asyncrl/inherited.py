"""What the processes of a run inherit, set before the first of them starts: environment variables, a umask.

Invariants:
- Variables that the user has set stay as they are.
- Nothing that a run writes can be written by everybody, whatever umask it is started under.
"""

from __future__ import annotations

import os
import stat

_VARIABLES = {
    # No usage reports, no bars between the lines of the log.
    "RAY_USAGE_STATS_ENABLED": "0",
    # No errors of an autoscaler about room that is waited for: what does not fit is said by us.
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Ray runs workers at niceness 15: beside anything else on the machine they would starve.
    "RAY_worker_niceness": "0",
    # From 1 MiB on, glibc's memcpy writes past the cache, which makes copies of weights half as fast again.
    # Left to itself it waits for three quarters of all the cache that it believes to have.
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000",
}


def set_inherited() -> None:
    """Set them in this process's environment, from which its children take theirs."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def close_to_others() -> None:
    """Have what this process and its children make be writable by owner and group at most."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)
