"""One group: fan out its samples, score each as it lands, encode what came of it.

``RolloutHost`` lives beside an engine, in the generator's process: token ids and log-probs go from
the engine into the msgpack payload without passing through the controller's loop.

Invariants:
- A group's call returns every sample as either a trajectory or a ``SampleFailure``, never neither.
- A sample that fails does not touch its siblings. At the deadline what has landed is kept.
- Cancelling the call cancels its samples, and the engine gets their slots back.
- An exception that is not a RolloutError (a bug, a dead engine) fails the whole call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from asyncrl.environments.base import Rollout, RolloutResult, single_turn
from asyncrl.errors import RolloutError
from asyncrl.generators.base import Generator
from asyncrl.queues.codec import encode_group, group_meta
from asyncrl.types import (
    BoolArray,
    Completion,
    DrawKey,
    GenerationRequest,
    Group,
    GroupMeta,
    SampleFailure,
    SamplingParams,
    Task,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What the controller asks of a replica: ``samples`` trajectories of one task."""

    task: Task
    start_version: int
    samples: int
    sampling: SamplingParams
    seed: int
    deadline_s: float
    attempt: int = 0

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens that it can sample."""
        return self.samples * self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one trajectory, and each function's own value by name."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """Turns one finished answer into a reward; raises RewardError, never returns a made-up value."""

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score: ...


class EngineClient:
    """The ModelClient of one sample: names its requests and its random draws."""

    def __init__(self, engine: Generator, request: GroupRequest, sample: int) -> None:
        self._engine = engine
        self._request = request
        self._sample = sample
        self._turn = 0

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Sample one continuation of ``prompt_ids``; each call is a turn with draws of its own."""
        request, turn = self._request, self._turn
        self._turn += 1
        attempt = request.attempt + (turn << 16)
        return await self._engine.generate(
            GenerationRequest(
                uid=f"{request.task.uid}:{request.task.ordinal}:{self._sample}:{attempt}",
                prompt_ids=tuple(prompt_ids),
                sampling=sampling or request.sampling,
                key=DrawKey(request.seed, request.task.ordinal, self._sample, attempt),
            )
        )


class RolloutHost:
    """Runs groups against one engine.

    ``mask_truncated``: of an answer that was cut off at its longest, no token is trained.
    """

    def __init__(
        self,
        engine: Generator,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        *,
        rollout: Rollout = single_turn,
        encode: Callable[[Group], bytes] = encode_group,
        mask_truncated: bool = False,
    ) -> None:
        self.engine = engine
        self._scorer = scorer
        self._decode = decode
        self._rollout = rollout
        self._encode = encode
        self._mask_truncated = mask_truncated

    async def run_group(self, request: GroupRequest) -> tuple[GroupMeta, bytes]:
        """All samples of one task, within ``request.deadline_s``; the meta and the encoded group."""
        samples = [
            asyncio.create_task(self._sample(request, sample), name=f"{request.task.uid}:{sample}")
            for sample in range(request.samples)
        ]
        try:
            done, late = await asyncio.wait(
                samples, timeout=request.deadline_s, return_when=asyncio.FIRST_EXCEPTION
            )
            broken = next((t for t in done if t.exception() is not None), None)
            if broken is not None:
                broken.result()  # not a RolloutError: the whole call fails with its traceback
        finally:
            for sample_task in samples:
                sample_task.cancel()
            await asyncio.gather(*samples, return_exceptions=True)
        outcomes = [
            SampleFailure(i, request.attempt, "DeadlineError", self._late_message(request, i))
            if task in late
            else task.result()
            for i, task in enumerate(samples)
        ]
        trajectories = tuple(o for o in outcomes if isinstance(o, Trajectory))
        failures = tuple(o for o in outcomes if isinstance(o, SampleFailure))
        group = Group(request.task.ordinal, request.task.uid, request.start_version, trajectories)
        payload = self._encode(group)
        return group_meta(group, payload, failures), payload

    async def _sample(self, request: GroupRequest, sample: int) -> Trajectory | SampleFailure:
        try:
            result = await self._rollout(request.task, EngineClient(self.engine, request, sample))
            text = self._decode(result.token_ids.tolist())
            score = await self._scorer.score(request.task, text, result)
        except RolloutError as error:
            return SampleFailure(sample, request.attempt, type(error).__name__, str(error))
        return Trajectory(
            sample=sample,
            attempt=request.attempt,
            prompt_ids=result.prompt_ids,
            token_ids=result.token_ids,
            loss_mask=self._loss_mask(result),
            logprobs=result.logprobs,
            versions=result.versions,
            reward=score.total,
            finish_reason=result.finish_reason,
            rewards=score.parts,
        )

    def _loss_mask(self, result: RolloutResult) -> BoolArray:
        if self._mask_truncated and result.finish_reason == "length":
            return np.zeros_like(result.loss_mask)
        return result.loss_mask

    def _late_message(self, request: GroupRequest, sample: int) -> str:
        return (
            f"sample {sample} of {request.task.uid} was not done after "
            f"rollout.deadline_s = {request.deadline_s:g} s"
        )
