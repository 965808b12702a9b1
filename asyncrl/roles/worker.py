"""From a group's payload to its annotation, around whatever a role computes, in the role's process.

Invariant: a group whose payload is not the one that its meta speaks of is refused before anything is
computed, and findings that are not about its trajectories are before anything is sent.
"""

from __future__ import annotations

import time

from asyncrl.errors import RoleError
from asyncrl.queues.annotations import encode_annotation, require_finite
from asyncrl.queues.codec import checksum, decode_group
from asyncrl.roles.base import RoleWorker
from asyncrl.types import AnnotationMeta


def annotated(role: str, worker: RoleWorker, payload: bytes, expected: int) -> tuple[AnnotationMeta, bytes]:
    """What ``worker`` finds about the group in ``payload``, whose CRC-32 has to be ``expected``."""
    start = time.perf_counter()
    found = checksum(payload)
    if found != expected:
        raise RoleError(f"the {role} got a group with checksum {found:#x}, expected {expected:#x}")
    group = decode_group(payload)
    findings = worker.annotate(group)
    for name, scalars in findings.scalars.items():
        if len(scalars) != len(group.trajectories):
            raise RoleError(
                f"the {role} gave {len(scalars)} values of {name} for the {len(group.trajectories)} "
                f"trajectories of {group.uid}"
            )
        require_finite(name, scalars)
    record = encode_annotation(group.ordinal, group.response_lengths, findings.arrays)
    seconds = time.perf_counter() - start
    meta = AnnotationMeta(
        role, checksum(record), len(record), seconds, findings.scalars, findings.reference_version
    )
    return meta, record
