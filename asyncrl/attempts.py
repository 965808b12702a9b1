"""One group from its request until it is there, over the deaths of those that worked on it.

Invariants:
- A group whose replica died goes on elsewhere from what that had, under the admission that it has: none of
  its tokens is older than its first start, so that its expiry bounds the lag of old and new ones alike.
- Where nothing is left of it, it starts from nothing, and from the version of now.
- The last of ``rollout.max_attempts`` runs with no other group beside it: what dies of it then is its doing.
- A prompt of which one died with no other beside it is not handed to a generator again, in no later epoch
  either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.errors import GeneratorError, LostGroupError, NoGeneratorError
from asyncrl.outstanding import Running
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import Salvage
from asyncrl.types import GroupMeta, SamplingParams

log = logging.getLogger(__name__)

_GRACE_S = 30.0
"""What a replica gets beyond rollout.deadline_s to answer before it is taken for hung."""


class GroupSource(Protocol):
    """Where groups come from: a pool of generators, or a recording."""

    async def run_group(
        self,
        request: GroupRequest,
        *,
        limit_s: float | None = None,
        alone: bool = False,
        salvage: Salvage | None = None,
    ) -> tuple[GroupMeta, Any]:
        """A whole group, and a handle to its payload. Raises LostGroupError, NoGeneratorError."""
        ...


class PoisonedGroupError(GeneratorError):
    """A group that is given up because each replica that had it died."""


class Attempts:
    """Has groups made by ``source``.

    ``reissue``: admits an ordinal anew, and says from which version. ``poisoned``: the prompts that are not
    tried again, by uid, each with the reason; those that show themselves to be so are added.
    """

    def __init__(
        self,
        config: Config,
        source: GroupSource,
        *,
        reissue: Callable[[int], int],
        greedy_baseline: bool,
        poisoned: MutableMapping[str, str],
    ) -> None:
        rollout = config.rollout
        self._settings = rollout
        self._seed = config.run.seed
        self._source = source
        self._reissue = reissue
        self._greedy_baseline = greedy_baseline
        self._poisoned = poisoned
        self._limit_s = rollout.deadline_s + config.reward.timeout_s + _GRACE_S
        self._sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
        )

    async def run(self, running: Running, start_version: int) -> tuple[GroupMeta, Any] | None:
        """The group, and a handle to its payload; None where no generator is left: the run ends.

        Raises PoisonedGroupError once as many replicas died of it as may; of one that is known, at once.
        """
        settings, task = self._settings, running.task
        if task.uid in self._poisoned:
            raise PoisonedGroupError(f"not tried again: {self._poisoned[task.uid]}")
        deaths: list[str] = []
        salvage: Salvage | None = None
        while True:
            request = GroupRequest(
                task=task,
                start_version=start_version,
                samples=settings.group_size,
                sampling=self._sampling,
                seed=self._seed,
                deadline_s=settings.deadline_s,
                greedy_baseline=self._greedy_baseline,
            )
            alone = 0 < len(deaths) == settings.max_attempts - 1
            try:
                return await self._source.run_group(
                    request, limit_s=self._limit_s, alone=alone, salvage=salvage
                )
            except LostGroupError as error:
                deaths.append(str(error))
                log.warning("try %d of %s failed: %s", running.attempt, task.uid, error)
                if len(deaths) >= settings.max_attempts:
                    why = _given_up(task.uid, deaths, alone=alone)
                    if alone:  # else it may be at no fault at all
                        self._poisoned[task.uid] = why
                    raise PoisonedGroupError(why) from error
                salvage = error.salvage
            except NoGeneratorError:
                return None
            running.attempt += 1
            if salvage is None:
                start_version = self._reissue(task.ordinal)


def _given_up(uid: str, deaths: Sequence[str], *, alone: bool) -> str:
    beside = "the last time with no other group beside it" if alone else "with others beside it"
    return (
        f"{uid} was on {len(deaths)} replicas when they died (rollout.max_attempts = "
        f"{len(deaths)}), {beside}: {deaths[-1]}"
    )
