"""The processes that Ray actors run in, for those that have to end now.

Invariant: an actor whose process runs on this machine is gone once ``kill_actor`` has returned, also where
the process was stopped: Ray asks first, and a stopped one does not answer.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import psutil
import ray


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The node and the process that an actor runs in."""

    node: str
    pid: int


def whereabouts() -> Whereabouts:
    """Those of the calling actor."""
    return Whereabouts(ray.get_runtime_context().get_node_id(), os.getpid())


def process_at(place: Whereabouts) -> psutil.Process | None:
    """The process, where that runs on this machine and still does."""
    if place.node == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(place.pid)
    return None


def kill_actor(actor: Any, process: psutil.Process | None) -> None:
    """SIGKILL to ``process``, if it is known, and Ray's own end of the actor."""
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    ray.kill(actor)
