"""The staging receiver: calls that never wait, outcomes that always arrive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync import staging
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec
from asyncrl.weight_sync.broadcast import PushGroup, connect_store, create_store
from asyncrl.weight_sync.staging import Outcome, StagingReceiver, await_joined, dismiss, receive

MANIFEST = (TensorSpec("a", (3, 4), "float32"), TensorSpec("b", (5,), "bfloat16"))
TIMEOUT_S = 20.0


def values(version: int) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, version, dtype=getattr(torch, spec.dtype)) for spec in MANIFEST}


class Push:
    """A sender, two receivers, and a waiter with a connection of its own."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(8)
        self.store = create_store("127.0.0.1", TIMEOUT_S)
        self.used: list[dict[int, dict[str, torch.Tensor]]] = [{}, {}]
        """Of each receiver, the tensors that it had of each version."""
        self.receivers = [StagingReceiver(held.__setitem__) for held in self.used]
        self.waiter = connect_store(self.spec("waiter"))
        self.sender: PushGroup | None = None
        self.last: PushGroupSpec | None = None

    def spec(self, prefix: str, timeout_s: float = TIMEOUT_S) -> PushGroupSpec:
        return PushGroupSpec("127.0.0.1", self.store.port, prefix, 0, 3, "gloo", 1 << 10, timeout_s, MANIFEST)

    def join(self, prefix: str) -> PushGroupSpec:
        spec = self.spec(prefix)
        joining = self.threads.submit(PushGroup, spec, self.store)
        for rank, receiver in enumerate(self.receivers, start=1):
            receiver.join(replace(spec, rank=rank))
        assert [outcome.rank for outcome in await_joined(self.waiter, spec, (1, 2))] == [1, 2]
        self.sender, self.last = joining.result(), spec
        return spec

    def receive(
        self, spec: PushGroupSpec, version: int, ticket: int = 1, ranks: Sequence[int] = (1, 2)
    ) -> Future[list[Outcome]]:
        """Order it, and wait for the outcomes, in a thread with a connection of its own."""
        return self.threads.submit(receive, connect_store(spec), spec, version, ticket, ranks)

    def send(self, version: int) -> str:
        assert self.sender is not None
        source = values(version)

        def gather(bucket: Sequence[TensorSpec]) -> torch.Tensor:
            return torch.cat([source[spec.name].reshape(-1) for spec in bucket])

        return self.sender.send(version, gather)[0]


@pytest.fixture
def push() -> Iterator[Push]:
    made = Push()
    yield made
    if made.last is not None:
        dismiss(made.waiter, made.last, (1, 2))
    for receiver in made.receivers:
        receiver.close()
    if made.sender is not None:
        made.sender.close()
    made.threads.shutdown()


def test_receivers_stand_ready_for_one_version_after_the_other(push: Push) -> None:
    spec = push.join("one")
    for version, ticket in ((4, 1), (4, 2), (9, 3)):
        for held in push.used:
            held.clear()
        receiving = push.receive(spec, version, ticket)
        sent = push.send(version)
        outcomes = receiving.result(TIMEOUT_S)
        assert [outcome.checksum for outcome in outcomes] == [sent, sent]
        assert all(0 <= outcome.wire_s <= outcome.receive_s for outcome in outcomes)
        for held in push.used:
            assert all(torch.equal(held[version][name], tensor) for name, tensor in values(version).items())


def test_memory_that_was_given_back_is_there_again_for_the_next_version(push: Push) -> None:
    spec = push.join("one")
    for version in (1, 2):
        receiving = push.receive(spec, version, version)
        push.send(version)
        receiving.result(TIMEOUT_S)
        for receiver, held in zip(push.receivers, push.used, strict=True):
            staged = weakref.ref(held.pop(version)["a"])
            assert staged() is not None, "nobody holds it any more: the test shows nothing"
            receiver.release()
            assert staged() is None


def test_a_failure_reaches_the_waiter_with_its_rank_and_words(push: Push) -> None:
    spec = push.join("one")
    right, wrong = push.receive(spec, 1, ranks=[1]), push.receive(spec, 2, ranks=[2])
    sending = push.threads.submit(push.send, 1)
    with pytest.raises(WeightSyncError, match=r"(?s)on 1 of 1 workers: worker 2: .*announced version 1"):
        wrong.result(TIMEOUT_S)
    # The sender waits for the receiver that left, until somebody ends the group.
    push.receivers[1].close()
    assert push.sender is not None
    push.sender.close()
    assert isinstance(sending.exception(TIMEOUT_S), WeightSyncError)
    assert push.used[1] == {}
    assert right.exception(TIMEOUT_S) is None or isinstance(right.exception(), WeightSyncError)


def test_a_rebuilt_group_ends_what_the_old_one_waited_for(push: Push) -> None:
    push.receive(push.join("one"), 1)  # and nobody sends
    spec = push.join("two")
    receiving = push.receive(spec, 1)
    sent = push.send(1)
    assert {outcome.checksum for outcome in receiving.result(TIMEOUT_S)} == {sent}


def test_a_thread_that_is_left_ends(push: Push) -> None:
    def listening() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name in ("asyncrl-one", "asyncrl-two")}

    push.join("one")
    assert listening() == {"asyncrl-one"}
    spec = push.join("two")
    assert listening() == {"asyncrl-two"}
    threads = [t for t in threading.enumerate() if t.name == "asyncrl-two"]
    dismiss(push.waiter, spec, (1, 2))
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert listening() == set()


def test_a_use_that_a_rebuild_finds_at_work_ends_before_the_next_begins(
    push: Push, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_GRACE_S", 0.05)
    at_work, go_on = threading.Event(), threading.Event()
    events: list[str] = []

    def use(version: int, _: object) -> None:
        events.append(f"begins {version}")
        at_work.set()
        go_on.wait(TIMEOUT_S)
        events.append(f"ends {version}")

    push.receivers[0] = StagingReceiver(use)
    push.receive(push.join("one"), 1)
    push.send(1)
    assert at_work.wait(TIMEOUT_S)
    spec = push.join("two")
    first, second = push.receive(spec, 2, ranks=[1]), push.receive(spec, 2, ranks=[2])
    push.send(2)
    second.result(TIMEOUT_S)
    assert events == ["begins 1"]
    go_on.set()
    first.result(TIMEOUT_S)
    assert events == ["begins 1", "ends 1", "begins 2", "ends 2"]


def test_a_silent_worker_is_an_error_with_its_rank(push: Push) -> None:
    spec = push.spec("nobody", timeout_s=0.5)
    with pytest.raises(
        WeightSyncError, match=r"joining push group 'nobody': workers \[1, 2\] gave no outcome"
    ):
        await_joined(push.waiter, spec, (1, 2))
