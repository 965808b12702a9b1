"""The reward model as rollouts and evaluations see it: one await between a group's landing and all else.

Invariants:
- Groups that wait are scored together, in the order in which they landed, as far as one forward pass holds
  them; nobody waits for others to come.
- Each group comes back once, with its scores, or its waiter gets the error that kept it from that.
- A group whose waiter was cancelled before its call began is not scored.
- ``timing_s/reward_model`` is the time that the actors worked, those of evaluations included.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.roles.base import LandedGroup, ScoringMember
from asyncrl.roles.group import MemberGroup
from asyncrl.types import GroupMeta, Metrics, Task

log = logging.getLogger(__name__)

_Scored = tuple[GroupMeta, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A group, and whoever waits for it."""

    group: LandedGroup
    done: asyncio.Future[_Scored]


class RewardModelGroup:
    """Scores groups on the members of ``group``; ``weight`` is that of a score in the reward.

    ``call_tokens``: tokens of the groups in one call, padding included. A larger group is a call of its own:
    with 0 each is.
    """

    def __init__(self, group: MemberGroup[ScoringMember], *, weight: float, call_tokens: int) -> None:
        self.name = group.name
        self._group = group
        self._weight = weight
        self._call_tokens = call_tokens
        self._waiting: deque[_Waiting] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._seconds = 0.0
        self._cut = 0

    async def start(self) -> None:
        await self._group.start()

    async def score(self, task: Task, meta: GroupMeta, payload: Any) -> _Scored:
        """The group with its scores: what is not finite is a failure of its sample.

        Raises RoleError when it could not be had, which ends the run.
        """
        if not meta.trajectories and meta.baseline is None:
            return meta, payload
        waiting = _Waiting(LandedGroup(task, meta, payload), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._dispatch()
        return await waiting.done

    def take_metrics(self) -> Metrics:
        """Seconds of work and answers that were cut since the last call; restarts so far."""
        metrics = {
            f"timing_s/{self.name}": self._seconds,
            f"{self.name}/cut": float(self._cut),
            f"{self.name}/restarts": float(self._group.restarts),
        }
        self._seconds, self._cut = 0.0, 0
        return metrics

    async def close(self) -> None:
        """Give up what is left, and end all members."""
        for waiting in self._waiting:
            waiting.done.cancel()
        self._waiting.clear()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._group.close()

    def _dispatch(self) -> None:
        """Begin calls while members are free and groups wait."""
        while len(self._calls) < self._group.calls and (batch := self._next_batch()):
            call = asyncio.create_task(self._score(batch), name=f"score {batch[0].group.meta.uid}")
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._dispatch()

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows = longest = 0
        while self._waiting:
            waiting = self._waiting[0]
            if not waiting.done.done():
                lengths = answer_lengths(waiting.group.meta)
                rows, longest = rows + len(lengths), max(longest, *lengths)
                if batch and rows * longest > self._call_tokens:
                    break
                batch.append(waiting)
            self._waiting.popleft()
        return batch

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        groups = [waiting.group for waiting in batch]
        doing = f"score {', '.join(group.meta.uid for group in groups)}"
        try:
            found = await self._group.ask(doing, lambda member: member.score(groups, self._weight))
        except asyncio.CancelledError:
            for waiting in batch:
                waiting.done.cancel()
            raise
        except Exception as error:  # noqa: BLE001  it is raised where the groups are waited for
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            if all(waiting.done.cancelled() for waiting in batch):
                log.error("could not %s, which nobody waits for any more: %s", doing, error)
            return
        self._seconds += found.meta.seconds
        self._cut += found.meta.cut
        for waiting, meta, payload in zip(batch, found.meta.metas, found.payloads, strict=True):
            if not waiting.done.done():
                waiting.done.set_result((meta, payload))


def answer_lengths(meta: GroupMeta) -> list[int]:
    """Tokens of each answer with its prompt, the baseline's last."""
    answers = meta.trajectories if meta.baseline is None else (*meta.trajectories, meta.baseline)
    return [answer.prompt_tokens + answer.response_tokens for answer in answers]
