"""The receiving half of a push for an engine whose loop must never wait: a thread stands ready for it.

A vLLM worker serves control calls between two steps of the model: what waits inside one stops generation,
and what is asked for by one waits for the step that runs. So ``join`` is such a call and returns at once,
and its thread takes all further orders, and tells the outcomes, through the push group's own ``TCPStore``:
``receive`` reaches it in less than a millisecond, whatever the worker computes.

Invariants:
- What an earlier group still receives after a new ``join`` touches nothing that the new one uses.
- ``use`` gets whole versions alone, one at a time: also where an earlier group's is still at it.
- A failure is an outcome like any other: it reaches the waiter with its message.
- A thread that was left for a newer one ends, at the latest with the push that it is in.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.base import PushGroupSpec
from asyncrl.weight_sync.broadcast import Staging, as_weight_sync_error, connect_store, make_staging
from asyncrl.weight_sync.transport import WeightGroup, join_group

log = logging.getLogger(__name__)

_JOINED = "joined"

_LEAVE: dict[str, int] = {}
"""The order after which a thread takes no other."""

_GRACE_S = 2.0
"""How long a new ``join`` waits for an earlier group to end, as it does once its sender has left."""

_PATIENCE = timedelta(days=7)
"""How long a thread waits for an order. One that has gone fails the next push, which joins anew."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one receiver's thread came to."""

    rank: int
    """Of the receiver, in the push group."""
    error: str | None = None
    checksum: str = ""
    """Of the bytes that were staged."""
    receive_s: float = 0.0
    """Seconds from the order to a full staging area and its checksum."""
    wire_s: float = 0.0
    """Of those, seconds that waited for bytes; the rest went into the checksum."""
    build_s: float = 0.0
    """Seconds after those, in which they were made ready to be used."""


class StagingReceiver:
    """Joins push groups and receives versions into staging tensors, in a thread of its own.

    ``use`` is called in that thread with each version that has arrived and its tensors by name, which are
    its until the next version is received. ``device`` is that of the process's model: with nccl and ipc, the
    staging area is there too. ``close`` belongs to the thread that calls ``join``.
    """

    def __init__(
        self, use: Callable[[int, dict[str, torch.Tensor]], None], device: torch.device | None = None
    ) -> None:
        self._use = use
        self._using = threading.Lock()
        self._device = device or torch.device("cpu")
        self._member: _Member | None = None
        self._staging: Staging | None = None

    def join(self, spec: PushGroupSpec) -> None:
        """Start to join the group of ``spec``, leaving an earlier one; then stand ready to receive."""
        before, self._member = self._member, _Member(spec)
        member = self._member
        # A daemon: a receiver whose sender is silent must not keep its process from ending.
        member.thread = threading.Thread(
            target=self._serve, args=(member, before), name=f"asyncrl-{spec.prefix}", daemon=True
        )
        member.thread.start()

    def release(self) -> None:
        """Give the staging area's memory back until the next version; while nothing is received or used."""
        self._staging = None
        if self._member is not None:
            self._member.staging = None

    def close(self) -> None:
        """Leave the group; a thread that still receives is left to the push's timeout."""
        member, self._member = self._member, None
        if member is not None and not member.busy:
            member.close()

    # The rest runs in the member's thread.

    def _serve(self, member: _Member, before: _Member | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # which device is current is a thread's own matter
        spec = member.spec
        try:
            store = connect_store(spec)
        except Exception:  # without the store there is no way to tell: the waiter's deadline passes
            log.exception("push group %r: its store cannot be reached", spec.prefix)
            return
        _tell(store, spec, _JOINED, lambda: self._enter(member, before, store))
        store.set_timeout(_PATIENCE)
        while member is self._member and member.group is not None:
            try:
                order = json.loads(store.queue_pop(_orders(spec.prefix, spec.rank)))
            except RuntimeError as error:
                if member is self._member:
                    log.warning(
                        "push group %r takes no more versions, its store is gone: %s", spec.prefix, error
                    )
                break
            if order == _LEAVE:
                break
            member.busy = True
            _tell(store, spec, _received(**order), partial(self._receive, member, order["version"]))
            member.busy = False
        member.close()

    def _enter(self, member: _Member, before: _Member | None, store: Any) -> Outcome:
        """Meet the group of ``member``, once the one before is left, or given up."""
        # gloo cannot break off a broadcast that waits: a group whose sender is silent is left to its thread,
        # until the push's timeout, with the staging area that it may still fill.
        abandoned = before is not None and not before.leave(store)
        group = join_group(member.spec, store)
        if member is not self._member:
            group.close()
            raise WeightSyncError(f"push group {member.spec.prefix!r} was left for a newer one while it met")
        if abandoned or self._staging is None or not _fits(self._staging, group):
            self._staging = make_staging(group.buckets, group.device)
        member.group, member.staging = group, self._staging
        return Outcome(member.spec.rank)

    def _receive(self, member: _Member, version: int) -> Outcome:
        began = time.perf_counter()
        group = member.group
        if group is None:
            raise WeightSyncError(f"version {version} was to arrive in a group that was left meanwhile")
        if member.staging is None:
            member.staging = self._staging = make_staging(group.buckets, group.device)
        staging = member.staging
        checksum = group.receive(version, staging)
        received = time.perf_counter()
        with self._using:
            if member is not self._member:
                raise WeightSyncError(f"version {version} arrived in a group that was left meanwhile")
            self._use(version, staging.tensors)
        built_s = time.perf_counter() - received
        return Outcome(member.spec.rank, None, checksum, received - began, group.wire_s, built_s)


class _Member:
    """One membership: a group, its staging area, and the thread that takes its orders."""

    def __init__(self, spec: PushGroupSpec) -> None:
        self.spec = spec
        self.thread: threading.Thread | None = None
        self.group: WeightGroup | None = None
        self.staging: Staging | None = None
        self.busy = False

    def leave(self, store: Any) -> bool:
        """Have the thread end; whether it did, within a moment. ``store`` is the one that it listens to."""
        assert self.thread is not None, "join() started it"
        if self.thread.is_alive():
            dismiss(store, self.spec, [self.spec.rank])
        self.thread.join(_GRACE_S)
        return not self.thread.is_alive()

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()


def await_joined(store: Any, spec: PushGroupSpec, ranks: Sequence[int]) -> list[Outcome]:
    """Block until all ``ranks`` have joined the group of ``spec``. Raises WeightSyncError."""
    return _await(store, spec, _JOINED, ranks, f"joining push group {spec.prefix!r}")


def receive(
    store: Any, spec: PushGroupSpec, version: int, ticket: int, ranks: Sequence[int]
) -> list[Outcome]:
    """Have ``ranks`` receive ``version``; block until all hold it, ready to be used.

    Each call in a group has another ``ticket``. Raises WeightSyncError.
    """
    order = json.dumps({"version": version, "ticket": ticket})
    doing = f"receiving version {version}"
    with as_weight_sync_error(f"{doing}: the order did not reach workers {list(ranks)}"):
        for rank in ranks:
            store.queue_push(_orders(spec.prefix, rank), order)
    return _await(store, spec, _received(version, ticket), ranks, doing)


def dismiss(store: Any, spec: PushGroupSpec, ranks: Sequence[int]) -> None:
    """Have ``ranks`` leave the group of ``spec`` once they are done. Raises WeightSyncError."""
    with as_weight_sync_error(f"dismissing workers {list(ranks)} from push group {spec.prefix!r}"):
        for rank in ranks:
            store.queue_push(_orders(spec.prefix, rank), json.dumps(_LEAVE))


def _await(store: Any, spec: PushGroupSpec, what: str, ranks: Sequence[int], doing: str) -> list[Outcome]:
    keys = [_key(spec.prefix, what, rank) for rank in ranks]
    try:
        store.wait(keys, timedelta(seconds=spec.timeout_s))
        outcomes = [Outcome(**json.loads(store.get(key))) for key in keys]
    except RuntimeError as error:
        raise WeightSyncError(f"{doing}: workers {list(ranks)} gave no outcome: {error}") from error
    broken = [f"worker {outcome.rank}: {outcome.error}" for outcome in outcomes if outcome.error]
    if broken:
        raise WeightSyncError(f"{doing} failed on {len(broken)} of {len(ranks)} workers: {'; '.join(broken)}")
    return outcomes


def _tell(store: Any, spec: PushGroupSpec, what: str, act: Callable[[], Outcome]) -> None:
    try:
        outcome = act()
    except Exception as error:  # noqa: BLE001 whatever it was, the waiter must hear of it
        outcome = Outcome(spec.rank, f"{type(error).__name__}: {error}")
    store.set(_key(spec.prefix, what, spec.rank), json.dumps(asdict(outcome)))


def _received(version: int, ticket: int) -> str:
    return f"received-{ticket}-{version}"


def _orders(prefix: str, rank: int) -> str:
    return f"orders/{prefix}/{rank}"


def _key(prefix: str, what: str, rank: int) -> str:
    return f"outcome/{prefix}/{what}/{rank}"


def _fits(staging: Staging, group: WeightGroup) -> bool:
    """Whether ``staging`` has the group's tensors, in the group's buckets."""
    if [len(flat) for flat in staging.flats] != [sum(s.numel for s in bucket) for bucket in group.buckets]:
        return False
    found = {name: (t.shape, str(t.dtype), t.device.type) for name, t in staging.tensors.items()}
    expected = {
        spec.name: (torch.Size(spec.shape), f"torch.{spec.dtype}", group.device.type)
        for bucket in group.buckets
        for spec in bucket
    }
    return found == expected
