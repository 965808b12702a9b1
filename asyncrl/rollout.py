"""One group: fan out its samples, score each as it lands, encode what came of it.

``RolloutHost`` lives beside an engine, in the generator's process: token ids and log-probs go from
the engine into the msgpack payload without passing through the controller's loop.

Invariants:
- A group's call returns every sample as either a trajectory or a ``SampleFailure``, never neither.
- A sample that fails does not touch its siblings. At the deadline what has landed is kept.
- Cancelling the call cancels its samples, and the engine gets their slots back.
- A group that comes with what another host had of it (``snapshot.py``) is continued: what was finished is
  neither sampled nor scored again, and a first turn goes on where it was. Of later turns nothing is kept,
  because an environment's state would be needed too: the rollout runs again from its first turn's answer.
- The greedy answer that serves as a baseline is one more sample, with the number after the last: scored
  and kept like the others, but no token of it is trained.
- An exception that is not a RolloutError (a bug, a dead engine) fails the whole call.
- While the engine sleeps no deadline passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from asyncrl.environments.base import Heard, Messages, Rollout, RolloutResult, single_turn
from asyncrl.errors import InvariantError, RewardError, RolloutError
from asyncrl.generators.base import Asleep, DeepSleeper, Generator, Sleeper
from asyncrl.listening import Listening
from asyncrl.queues.codec import encode_group, group_meta
from asyncrl.snapshot import (
    GroupKey,
    PartialGroup,
    Progress,
    decode_partial,
    encode_snapshot,
    key_of,
)
from asyncrl.timeline import Tracks
from asyncrl.types import (
    BoolArray,
    Completion,
    DrawKey,
    GenerationRequest,
    Group,
    GroupMeta,
    SampleFailure,
    SamplingParams,
    Span,
    Task,
    Trajectory,
)
from asyncrl.waiting import Deadlines, now

_SNAPSHOT_BYTES_PER_S = 4 << 20
"""A snapshot is followed by none for as long as its bytes take at this rate, so that many long answers (12
bytes a token) cost the engine's process some hundredths of its time, and the network next to nothing."""


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
    greedy_baseline: bool = False
    """Sample one more answer, greedily, to compare the others' rewards with."""

    @property
    def answers(self) -> int:
        """Samples and baseline."""
        return self.samples + self.greedy_baseline

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens that it can sample."""
        return self.answers * self.sampling.max_new_tokens

    def is_baseline(self, sample: int) -> bool:
        return sample == self.samples


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one trajectory, and each function's own value by name."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    span: tuple[str, float, float] | None = None
    """Who scored it, from when to when, by the loop's clock."""


class Scorer(Protocol):
    """Turns one finished answer into a reward; raises RewardError, never returns a made-up value."""

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score: ...


@runtime_checkable
class GroupScorer(Protocol):
    """What a scorer has to do beside the rest where a reward is a matter of the whole group."""

    @property
    def scores_groups(self) -> bool:
        """Whether it is: ``score_group`` then adds to what ``score`` gave each answer."""
        ...

    async def score_group(
        self, task: Task, answers: Sequence[tuple[str, Messages, Trajectory]]
    ) -> list[Score | RewardError]:
        """What is added to each answer, given as its text, its messages, and what there is of it so far."""
        ...


class EngineClient:
    """The ModelClient of one sample: names its requests and its random draws.

    ``first`` is what another client had of the first turn. It is kept and continued only where that turn
    asks for the task's prompt and the group's sampling: of another it is not known that it comes again.
    """

    def __init__(
        self,
        engine: Generator,
        request: GroupRequest,
        sample: int,
        first: Completion | None = None,
        tracks: Tracks | None = None,
        listening: Listening | None = None,
    ) -> None:
        self.spans: list[Span] = []
        """What the engine and the scorer spent on this sample."""
        self._tracks = tracks or Tracks()
        self._engine = engine
        self._listening = listening or Listening(engine)
        self._request = request
        self._sample = sample
        self._turn = 0
        self._first = first
        self._keeps_first = True

    @property
    def sampling(self) -> SamplingParams:
        return self._request.sampling

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        heard: Heard | None = None,
    ) -> Completion:
        """Sample one continuation of ``prompt_ids``; each call is a turn with draws of its own."""
        group, turn = self._request, self._turn
        self._turn += 1
        request = GenerationRequest(
            uid=self._uid(turn),
            prompt_ids=tuple(prompt_ids),
            sampling=self._own(sampling or group.sampling),
            key=DrawKey(group.seed, group.task.ordinal, self._sample, self._attempt(turn)),
        )
        if turn == 0:
            asked = (request.prompt_ids, request.sampling)
            self._keeps_first = asked == (group.task.prompt_ids, self._own(group.sampling))
        if turn > 0 or not self._keeps_first:
            return await self._generate(request, heard)
        first = self._first
        if first is None or first.finish_reason == "abort":
            again = request if first is None else replace(request, prefix=first)
            self._first = first = await self._generate(again, heard)
        return first

    async def _generate(self, request: GenerationRequest, heard: Heard | None) -> Completion:
        start = now()
        with self._listening.to(request.uid, heard):
            answer = await self._engine.generate(request)
        self.note("slot", *(answer.stay or (start, now())), numbered=True)
        return answer

    def note(self, who: str, begun: float, ended: float, *, numbered: bool = False) -> None:
        """Somebody spent this time on the sample."""
        track = self._tracks.assign(who, begun, ended, numbered=numbered)
        self.spans.append(Span(track, self._sample, begun, ended))

    def so_far(self, partials: Mapping[str, Completion]) -> Completion | None:
        """What there is of the first turn, given what the engine has of its running requests.

        Never less than before: an answer that has just ended is no longer running, but may not be here yet.
        """
        if not self._keeps_first:
            return None
        if self._first is None or self._first.finish_reason == "abort":
            self._first = partials.get(self._uid(0), self._first)
        return self._first

    def _own(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, temperature=0.0) if self._request.is_baseline(self._sample) else sampling

    def _attempt(self, turn: int) -> int:
        return self._request.attempt + (turn << 16)

    def _uid(self, turn: int) -> str:
        task = self._request.task
        return f"{task.uid}:{task.ordinal}:{self._sample}:{self._attempt(turn)}"


class _RunningGroup:
    """A group and what it has so far."""

    def __init__(
        self,
        engine: Generator,
        request: GroupRequest,
        before: PartialGroup | None,
        tracks: Tracks,
        listening: Listening,
    ) -> None:
        begun = before.begun if before is not None else {}
        self.request = request
        self.clients = [
            EngineClient(engine, request, i, begun.get(i), tracks, listening) for i in range(request.answers)
        ]
        earlier = before.group.answers if before is not None else ()
        self.finished = {t.sample: t for t in earlier if not t.row}
        self.rows: dict[int, list[Trajectory]] = {}
        """By sample, what it has beside the row that was rewarded."""
        for row in earlier:
            if row.row:
                self.rows.setdefault(row.sample, []).append(row)
        self.messages: dict[int, Messages] = {}
        """By sample; of those that another host had finished there are none."""

    def so_far(self, partials: Mapping[str, Completion]) -> PartialGroup:
        group = self.of(self.finished.values())
        begun = {
            sample: answer
            for sample, client in enumerate(self.clients)
            if sample not in self.finished and (answer := client.so_far(partials)) is not None
        }
        return PartialGroup(group, begun)

    def of(self, answers: Iterable[Trajectory]) -> Group:
        """The group with these answers, and the further rows of each."""
        request = self.request
        samples: list[Trajectory] = []
        baseline: Trajectory | None = None
        for answer in answers:
            if request.is_baseline(answer.sample):
                baseline = answer
            else:
                rows = self.rows.get(answer.sample, ())
                rewarded = (replace(row, reward=answer.reward, rewards=answer.rewards) for row in rows)
                samples += [answer, *rewarded]
        return Group(request.task.ordinal, request.task.uid, request.start_version, tuple(samples), baseline)


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
        deadlines: Deadlines | None = None,
    ) -> None:
        self.engine = engine
        self._scorer = scorer
        self._decode = decode
        self._rollout = rollout
        self._encode = encode
        self._mask_truncated = mask_truncated
        self._tracks = Tracks()
        self._groups: dict[GroupKey, _RunningGroup] = {}
        self._deadlines = deadlines or Deadlines()
        self._listening = Listening(engine)
        self._next_snapshot_at = -math.inf

    async def run_group(self, request: GroupRequest, salvage: bytes | None = None) -> tuple[GroupMeta, bytes]:
        """All samples of one task, within ``request.deadline_s``; the meta and the encoded group.

        ``salvage``: the payload of a snapshot that holds this group, to go on from.
        """
        key = key_of(request.task)
        before = decode_partial(salvage, key, request.start_version) if salvage is not None else None
        group = _RunningGroup(self.engine, request, before, self._tracks, self._listening)
        samples = [
            asyncio.create_task(self._sample(group, sample), name=f"{request.task.uid}:{sample}")
            for sample in range(request.answers)
        ]
        self._groups[key] = group
        try:
            with contextlib.suppress(TimeoutError):
                async with self._deadlines.timeout(request.deadline_s):
                    await asyncio.wait(samples, return_when=asyncio.FIRST_EXCEPTION)
            late = {task for task in samples if not task.done()}
            done = (task for task in samples if task not in late)
            broken = next((task for task in done if task.exception() is not None), None)
            if broken is not None:
                broken.result()  # not a RolloutError: the whole call fails with its traceback
        finally:
            del self._groups[key]
            for sample_task in samples:
                sample_task.cancel()
            await asyncio.gather(*samples, return_exceptions=True)
        outcomes = [
            SampleFailure(i, request.attempt, "DeadlineError", self._late_message(request, i))
            if task in late
            else task.result()
            for i, task in enumerate(samples)
        ]
        outcomes = await self._scored_together(group, outcomes)
        failures = tuple(o for o in outcomes if isinstance(o, SampleFailure))
        whole = group.of(o for o in outcomes if isinstance(o, Trajectory))
        payload = self._encode(whole)
        spans = tuple(span for client in group.clients for span in client.spans)
        return replace(group_meta(whole, payload, failures), spans=spans), payload

    async def sleep(self) -> Asleep:
        """Have the engine sleep; its groups wait, and their deadlines stand still."""
        asleep = await self._sleeper.sleep()
        self._deadlines.pause()
        return asleep

    async def make_room(self) -> None:
        """Have the engine, asleep, take memory for the weights that are to come."""
        if not isinstance(self.engine, DeepSleeper):
            name = type(self.engine).__name__
            raise InvariantError(f"asked {name} to make room for weights, which it never gives up")
        await self.engine.make_room()

    async def wake(self) -> None:
        """Have the engine go on with its groups."""
        await self._sleeper.wake()
        self._deadlines.resume()

    @property
    def _sleeper(self) -> Sleeper:
        if not isinstance(self.engine, Sleeper):
            name = type(self.engine).__name__
            raise InvariantError(f"asked {name} to sleep or wake, which cannot share its device")
        return self.engine

    async def snapshot(self) -> tuple[dict[GroupKey, Progress], bytes] | None:
        """What the running groups have so far; None where it is too soon for another snapshot."""
        if not self._groups:
            return {}, b""
        moment = now()
        if moment < self._next_snapshot_at:
            return None
        partials = await self.engine.partials()
        groups = {key: group.so_far(partials) for key, group in self._groups.items()}
        begun = {key: partial for key, partial in groups.items() if partial.progress.tokens}
        payload = encode_snapshot(begun)
        self._next_snapshot_at = moment + len(payload) / _SNAPSHOT_BYTES_PER_S
        return {key: partial.progress for key, partial in begun.items()}, payload

    async def _sample(self, group: _RunningGroup, sample: int) -> Trajectory | SampleFailure:
        if sample in group.finished:
            return group.finished[sample]
        outcome = await self._sample_anew(group, sample)
        if isinstance(outcome, Trajectory):
            group.finished[sample] = outcome
        return outcome

    async def _sample_anew(self, group: _RunningGroup, sample: int) -> Trajectory | SampleFailure:
        request, client = group.request, group.clients[sample]
        try:
            result = await self._rollout(request.task, client)
            text = self._decode(result.token_ids.tolist())
            score = await self._scorer.score(request.task, text, result)
            if score.span is not None:
                client.note(*score.span)
            group.messages[sample] = result.messages
        except RolloutError as error:
            return SampleFailure(sample, request.attempt, type(error).__name__, str(error))
        answer, *rows = (
            self._trajectory(request, sample, score, row, number)
            for number, row in enumerate((result, *result.earlier))
        )
        group.rows[sample] = rows
        return answer

    def _trajectory(
        self, request: GroupRequest, sample: int, score: Score, result: RolloutResult, row: int
    ) -> Trajectory:
        return Trajectory(
            sample=sample,
            attempt=request.attempt,
            prompt_ids=result.prompt_ids,
            token_ids=result.token_ids,
            loss_mask=self._loss_mask(result, trained=not request.is_baseline(sample)),
            logprobs=result.logprobs,
            versions=result.versions,
            reward=score.total,
            finish_reason=result.finish_reason,
            rewards=score.parts,
            environment_tokens=int(np.count_nonzero(~result.loss_mask)),
            row=row,
        )

    async def _scored_together(
        self, group: _RunningGroup, outcomes: Sequence[Trajectory | SampleFailure]
    ) -> list[Trajectory | SampleFailure]:
        """The samples with what the functions of whole groups add to them, where there are such."""
        scorer, request = self._scorer, group.request
        done = [o for o in outcomes if isinstance(o, Trajectory)]
        if not isinstance(scorer, GroupScorer) or not scorer.scores_groups or not done:
            return list(outcomes)
        answers = [(self._decode(t.token_ids.tolist()), group.messages.get(t.sample, ()), t) for t in done]
        try:
            scores: Sequence[Score | RewardError] = await scorer.score_group(request.task, answers)
        except RewardError as error:
            scores = [error] * len(done)
        if isinstance(scores[0], Score) and scores[0].span is not None:
            group.clients[done[0].sample].note(*scores[0].span)
        added = {t.sample: self._added(request, t, s) for t, s in zip(done, scores, strict=True)}
        return [added.get(o.sample, o) for o in outcomes]

    def _added(
        self, request: GroupRequest, answer: Trajectory, score: Score | RewardError
    ) -> Trajectory | SampleFailure:
        if isinstance(score, RewardError):
            return SampleFailure(answer.sample, request.attempt, type(score).__name__, str(score))
        rewards = {**answer.rewards, **score.parts}
        return replace(answer, reward=answer.reward + score.total, rewards=rewards)

    def _loss_mask(self, result: RolloutResult, *, trained: bool) -> BoolArray:
        if not trained or (self._mask_truncated and result.finish_reason == "length"):
            return np.zeros_like(result.loss_mask)
        return result.loss_mask

    def _late_message(self, request: GroupRequest, sample: int) -> str:
        return (
            f"sample {sample} of {request.task.uid} was not done after "
            f"rollout.deadline_s = {request.deadline_s:g} s"
        )
