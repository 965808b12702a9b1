"""One life of a replica, from its start to its death, and what the pool knows of it.

Invariants:
- Dead is for ever: a replica that is restarted is a new ``Member`` of the same name.
- Whoever awaits ``call`` hears of the death at once, with GeneratorError, however deep the replica
  hangs; a call that fails with GeneratorError is itself the death.
- A member takes work only while ``live``, and is let in only at the version that it holds.
- Its newest snapshot stays with it when it dies, for its groups to go on from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from asyncrl.errors import GeneratorError, InfrastructureError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import GroupKey, Snapshot
from asyncrl.types import Float32Array, GroupMeta
from asyncrl.waiting import now
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho

log = logging.getLogger(__name__)

T = TypeVar("T")

_STOOD_STILL_S = 1.0
"""A deadline that is noticed so much later tells of whoever waited, not of whom it waited for."""

State = Literal["starting", "joining", "live", "dead"]
"""``joining``: it runs, but waits for the weights of a version to take work with."""


class Replica(Protocol):
    """One generator with its rollout host, wherever it runs. Raises GeneratorError when it died."""

    name: str
    push_ranks: int
    """Ranks that it takes in the push group: one for each process that holds weights."""

    async def start(self) -> None: ...

    async def run_group(self, request: GroupRequest, salvage: Any = None) -> tuple[GroupMeta, Any]:
        """The group's meta, and a reference to (or the bytes of) its payload.

        ``salvage``: the payload of another replica's snapshot that holds the group, to go on from.
        Cancelling the awaiting task cancels the rollout and frees its slots.
        """
        ...

    async def snapshot(self) -> Snapshot | None:
        """What its groups have so far, where its death does not reach it; None: the one before will do."""
        ...

    async def ping(self) -> None:
        """Return while the engine can sample; raise GeneratorError once it cannot."""
        ...

    async def join(self, spec: PushGroupSpec) -> None: ...

    async def receive(self, version: int) -> None: ...

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho: ...

    async def sleep(self) -> Asleep:
        """Stop between two tokens and give up the memory that only sampling needs; groups wait."""
        ...

    async def make_room(self) -> None:
        """Asleep: take memory for the weights that are to come, where sleep gave that up."""
        ...

    async def wake(self) -> None:
        """Go on with all groups, by the weights of now."""
        ...

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T by the live weights, at temperature 1."""
        ...

    async def statistics(self) -> GeneratorStatistics: ...

    async def close(self) -> None:
        """End in good order, within seconds."""
        ...

    async def kill(self) -> None:
        """End now, whatever state it is in: it may be hung, or dead already."""
        ...


@dataclass(slots=True, eq=False)
class Member:
    """A replica and its state; ``on_change`` is called after each change of it."""

    replica: Replica
    on_change: Callable[[], None]
    life: int = 0
    """How often the replica of this name was restarted before."""
    fruitless: int = 0
    """Restarts in a row before this life, since a life that completed a group."""
    state: State = "starting"
    version: int = 0
    why: str = ""
    """Why it is dead."""
    completed: int = 0
    """Groups that came back."""
    outstanding_tokens: int = 0
    groups: set[GroupKey] = field(default_factory=set)
    """Uid and ordinal of each group that it works on, evaluation included."""
    reserved: bool = False
    """It gets no other work, for the sake of a group that is to run alone."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    """The newest one."""
    _died: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def alive(self) -> bool:
        return self.state != "dead"

    def started(self) -> None:
        """It runs, and waits for weights."""
        if self.state == "starting":
            self._become("joining")

    def let_in(self, version: int) -> None:
        """It holds ``version``'s weights, and may work with them. No effect on the dead."""
        self.version = version
        if self.state == "joining":
            self._become("live")

    def give_up(self, why: str) -> None:
        """It is dead: it gets no more work, and all that wait for it hear so now."""
        if self.alive:
            self.why = why
            log.error("%s is out with %d groups: %s", self.name, len(self.groups), why)
            self._become("dead")
            self._died.set()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a call of the replica; raises GeneratorError as soon as it fails or is given up."""
        if not self.alive:
            work.close()
            raise GeneratorError(f"{self.name} is dead: {self.why}")
        task = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise GeneratorError(f"{self.name} was given up: {self.why}")
        except GeneratorError as error:
            self.give_up(str(error))
            raise
        finally:
            task.cancel()
            death.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def check(self, timeout_s: float) -> None:
        """Ping it, and give it up when it does not answer, or not in time.

        Where this process itself stood still meanwhile (stopped, or starved), no answer says nothing: it is
        asked again.
        """
        while True:
            began = now()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.call(self.replica.ping())
            except TimeoutError:
                late_s = now() - began - timeout_s
                if late_s > _STOOD_STILL_S:
                    log.warning("this process stood still for %.1f s: %s is asked again", late_s, self.name)
                    continue
                self.give_up(f"no answer to a ping in {timeout_s:g} s")
            except InfrastructureError as error:
                self.give_up(str(error))
            return

    async def watch(self, every_s: float, timeout_s: float) -> None:
        """Check it each ``every_s`` seconds, and then ask it for a snapshot while it has groups.

        Returns once it is dead, for whatever reason. A snapshot may take as long as a forward pass and is
        no sign of health: the checks go on meanwhile, and its deadline is the replica's end.
        """
        async with asyncio.TaskGroup() as tasks:
            look: asyncio.Task[None] | None = None
            while self.alive:
                try:
                    async with asyncio.timeout(every_s):
                        await self._died.wait()
                except TimeoutError:
                    await self.check(timeout_s)
                    if not self.groups:
                        self.snapshot = Snapshot()
                    elif look is None or look.done():
                        look = tasks.create_task(self._look(), name=f"snapshot of {self.name}")

    async def _look(self) -> None:
        """Take a snapshot; where the replica dies of it or meanwhile, the one before stays."""
        try:
            taken = await self.call(self.replica.snapshot())
        except GeneratorError:
            return  # given up by this, and whoever works with it hears of it there
        if taken is not None:
            self.snapshot = taken

    def describe(self) -> str:
        """A line of a stall report."""
        state = {
            "starting": "starting",
            "joining": "started, waits for weights",
            "live": f"live at version {self.version}",
            "dead": f"dead ({self.why.splitlines()[0] if self.why else 'no reason given'})",
        }[self.state]
        return (
            f"{self.name}: {state}, {len(self.groups)} groups, "
            f"at most {self.outstanding_tokens} tokens outstanding"
        )

    def _become(self, state: State) -> None:
        self.state = state
        self.on_change()
