"""The control plane of a push to the reference: from the learner to all of its actors.

Invariants:
- What is pushed is what the learner holds, or has copied out: the caller sees to it that neither changes.
- A version is laid ready on all members, and all of their checksums are the sender's, before any takes it.
- After a failure the group is built anew, under another prefix, with whoever is given then.
- Each phase is bounded by ``weight_sync.timeout_s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from asyncrl.errors import ChecksumError
from asyncrl.learners.base import Learner, LearnerInfo, PushReport
from asyncrl.roles.base import FollowingMember, Received
from asyncrl.weight_sync.base import PushGroupSpec
from asyncrl.weight_sync.together import together


class ReferencePush:
    """Delivers versions to members of a role, in a push group apart from the generators'."""

    def __init__(
        self, learner: Learner, *, backend: Literal["gloo", "nccl"], bucket_bytes: int, timeout_s: float
    ) -> None:
        self._learner = learner
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._generation = 0
        self._info: LearnerInfo | None = None
        self._members: list[FollowingMember] = []

    async def open(self, info: LearnerInfo, members: Sequence[FollowingMember]) -> None:
        """Take the facts of a learner that stands, and meet. Raises ConfigError where the weights of one
        side do not fit the other."""
        self._info = info
        await self._rebuild(members)

    async def stage(self, version: int, members: Sequence[FollowingMember]) -> list[Received]:
        """Lay ``version`` ready on all ``members``, which still compute with what they have.

        Raises WeightSyncError, RoleError of a member that died, ChecksumError where bytes differ.
        """
        if self._members != list(members):
            await self._rebuild(members)
        sent: PushReport
        received: list[Received]
        try:
            sent, *received = await together(
                self._timeout_s,
                f"sending version {version} to {_names(members)}",
                self._learner.push(version, "reference"),
                *(member.receive(version) for member in members),
            )
        except BaseException:
            self._members = []  # the group may be broken, or out of step
            raise
        if any(of_member.checksum != sent.checksum for of_member in received):
            raise ChecksumError(
                f"version {version}: the learner sent {sent.checksum}, but "
                + ", ".join(f"{m.name} got {r.checksum}" for m, r in zip(members, received, strict=True))
            )
        return received

    async def take(self, version: int, decay: float, members: Sequence[FollowingMember]) -> None:
        """Have all ``members`` take what lies ready. Raises WeightSyncError or RoleError."""
        await together(
            self._timeout_s,
            f"taking version {version} on {_names(members)}",
            *(member.take(version, decay) for member in members),
        )

    async def _rebuild(self, members: Sequence[FollowingMember]) -> None:
        assert self._info is not None, "open() comes first"
        self._members = []
        self._generation += 1
        host, port = self._info.store or ("127.0.0.1", 0)
        spec = PushGroupSpec(
            host=host,
            port=port,
            prefix=f"reference{self._generation}",
            rank=0,
            world_size=1 + len(members),
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            manifest=self._info.manifest,
        )
        await together(
            self._timeout_s,
            f"building push group {spec.prefix} with {_names(members)}",
            self._learner.open_push_group(spec, "reference"),
            *(member.join(replace(spec, rank=rank)) for rank, member in enumerate(members, start=1)),
        )
        self._members = list(members)


def _names(members: Sequence[FollowingMember]) -> str:
    return ", ".join(member.name for member in members)
