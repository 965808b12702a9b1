"""The receiving half of a push for an engine whose loop must never wait: a thread fills the staging.

A vLLM worker serves control calls between two steps of the model, so whatever waits inside one stops
generation. Here every call returns at once; a thread joins or receives, and tells the outcome through
the push group's own ``TCPStore``, where ``await_outcomes`` waits for it without asking again and again.

Invariants:
- What an earlier group still receives after a new ``join`` touches nothing that the new one uses.
- ``use`` gets whole versions alone, one at a time: also where an earlier group's is still at it.
- A failure is an outcome like any other: it reaches the waiter with its message.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.base import PushGroupSpec
from asyncrl.weight_sync.broadcast import PushGroup, Staging, connect_store, make_staging

log = logging.getLogger(__name__)

_JOINED = "joined"

_GRACE_S = 2.0
"""How long a new ``join`` waits for an earlier group to end, as it does once its sender has left."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one receiver's thread came to."""

    rank: int
    """Of the receiver, in the push group."""
    error: str | None = None
    checksum: str = ""
    """Of the bytes that were staged."""
    receive_s: float = 0.0
    """Seconds from the call to a full staging area."""
    wire_s: float = 0.0
    """Of those, seconds that waited for bytes; the rest went into unpacking and the checksum."""
    build_s: float = 0.0
    """Seconds after those, in which they were made ready to be used."""


class StagingReceiver:
    """Joins push groups and receives versions into staging tensors, in a thread of its own.

    ``use`` is called in that thread with each version that has arrived and its tensors by name, which are
    its until the next ``receive``. ``device`` is that of the process's model: with nccl, the staging area
    is there too. ``close`` belongs to the thread that calls ``join`` and ``receive``.
    """

    def __init__(
        self, use: Callable[[int, dict[str, torch.Tensor]], None], device: torch.device | None = None
    ) -> None:
        self._use = use
        self._using = threading.Lock()
        self._device = device or torch.device("cpu")
        self._group: PushGroup | None = None
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._staging: Staging | None = None

    def join(self, spec: PushGroupSpec) -> None:
        """Start to join the group of ``spec``, leaving an earlier one."""
        left, busy = self._group, self._thread
        self._group = None

        def run(store: Any) -> Outcome:
            if busy is not None:
                busy.join(_GRACE_S)
            # gloo cannot break off a broadcast that waits: a group whose sender is silent is left to its
            # thread, until the push's timeout, with the staging area that it may still fill.
            abandoned = busy is not None and busy.is_alive()
            if left is not None and not abandoned:
                left.close()
            group = PushGroup(spec, store)
            if self._thread is not threading.current_thread():
                group.close()
                raise WeightSyncError(f"push group {spec.prefix!r} was left for a newer one while it met")
            if abandoned or self._staging is None or not _fits(self._staging, group):
                self._staging = make_staging(group.buckets, group.device)
            self._group, self._store = group, store
            return Outcome(spec.rank)

        self._start(spec, _JOINED, lambda: connect_store(spec), run)

    def receive(self, version: int, ticket: int) -> None:
        """Start to receive and use ``version``; each call in a group has another ``ticket``.

        Raises WeightSyncError before ``join``.
        """
        group = self._group
        if group is None:
            raise WeightSyncError(f"asked to receive version {version} before joining a push group")
        staging = self._staging
        assert staging is not None, "a group comes with its staging area"
        began = time.perf_counter()

        def run(_: Any) -> Outcome:
            checksum = group.receive(version, staging)
            received = time.perf_counter()
            with self._using:
                if group is not self._group:
                    raise WeightSyncError(f"version {version} arrived in a group that was left meanwhile")
                self._use(version, staging.tensors)
            built_s = time.perf_counter() - received
            return Outcome(group.spec.rank, None, checksum, received - began, group.wire_s, built_s)

        self._start(group.spec, _received(version, ticket), lambda: self._store, run)

    def close(self) -> None:
        """Leave the group; a thread that still receives is left to the push's timeout."""
        busy = self._thread is not None and self._thread.is_alive()
        if self._group is not None and not busy:
            self._group.close()
        self._group = None

    def _start(
        self, spec: PushGroupSpec, what: str, connect: Callable[[], Any], run: Callable[[Any], Outcome]
    ) -> None:
        def work() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # which device is current is a thread's own matter
            try:
                store = connect()
            except Exception:  # without the store there is no way to tell: the waiter's deadline passes
                log.exception("%s of push group %r: its store cannot be reached", what, spec.prefix)
                return
            try:
                outcome = run(store)
            except Exception as error:  # noqa: BLE001 whatever it was, the waiter must hear of it
                outcome = Outcome(spec.rank, f"{type(error).__name__}: {error}")
            store.set(_key(spec.prefix, what, spec.rank), json.dumps(asdict(outcome)))

        # A daemon: a receiver whose sender is silent must not keep its process from ending.
        self._thread = threading.Thread(target=work, name=f"asyncrl-{what}", daemon=True)
        self._thread.start()


def await_joined(store: Any, spec: PushGroupSpec, ranks: Sequence[int]) -> list[Outcome]:
    """Block until all ``ranks`` have joined the group of ``spec``. Raises WeightSyncError."""
    return _await(store, spec, _JOINED, ranks, f"joining push group {spec.prefix!r}")


def await_received(
    store: Any, spec: PushGroupSpec, version: int, ticket: int, ranks: Sequence[int]
) -> list[Outcome]:
    """Block until all ``ranks`` hold ``version`` in their staging areas. Raises WeightSyncError."""
    return _await(store, spec, _received(version, ticket), ranks, f"receiving version {version}")


def _received(version: int, ticket: int) -> str:
    return f"received-{ticket}-{version}"


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


def _key(prefix: str, what: str, rank: int) -> str:
    return f"outcome/{prefix}/{what}/{rank}"


def _fits(staging: Staging, group: PushGroup) -> bool:
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
