"""The values that travel between the parts: Task, Completion, Trajectory, Group and their metas.

Invariants:
- ``token_ids``, ``loss_mask``, ``logprobs`` and ``versions`` of a trajectory have one length, (T,).
- Every token carries the policy version that sampled it, stamped by the engine at that moment.
- A ``GroupMeta`` holds only scalars: it is what passes through the controller's loop, while the
  group itself travels as msgpack bytes behind an object reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set, ready to be sampled from."""

    ordinal: int
    """Place in the stream of the run, epochs included; never reused."""
    uid: str
    """The row's name, stable over epochs and runs, e.g. ``train-17``."""
    prompt: str
    """The rendered prompt: what ``prompt_ids`` decodes to."""
    prompt_ids: tuple[int, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row, for the reward functions (plain msgpack-able values)."""
    issued_at: int | None = None
    """Of one whose answers are on record already: the version that it was issued at."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1.0 are off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Names the random draws of one trajectory: draw t is a pure function of this key and t."""

    seed: int
    ordinal: int
    sample: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled: arrays of one length (T,); EOS, where sampled, is included."""

    token_ids: Int32Array
    logprobs: Float32Array
    """Log-probs under the distribution that was really sampled from (after temperature)."""
    versions: Int32Array
    """Policy version that sampled each token."""
    finish_reason: FinishReason
    stay: tuple[float, float] | None = None
    """(begun, ended): when it held a slot, by the clock of the engine's loop; None where that is not known,
    and of what was not sampled at one go."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One continuation to sample. ``uid`` is unique among the engine's running requests."""

    uid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    key: DrawKey
    prefix: Completion | None = None
    """The beginning of the answer, sampled by another engine that did not get to its end. It becomes
    part of the completion as it is, and ``sampling.max_new_tokens`` counts it."""

    @property
    def given(self) -> int:
        """Length of the prefix."""
        return 0 if self.prefix is None else len(self.prefix.token_ids)

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens that are still to be sampled."""
        return self.sampling.max_new_tokens - self.given

    @property
    def context_ids(self) -> tuple[int, ...]:
        """What the next token is conditioned on: prompt and prefix."""
        if self.prefix is None:
            return self.prompt_ids
        return (*self.prompt_ids, *self.prefix.token_ids.tolist())


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled answer, of one or many turns. All arrays but ``prompt_ids`` are (T,)."""

    sample: int
    attempt: int
    prompt_ids: Int32Array  # (P,)
    token_ids: Int32Array  # (T,)
    loss_mask: BoolArray  # (T,) False for tool and environment tokens
    logprobs: Float32Array  # (T,) behaviour log-probs
    versions: Int32Array  # (T,)
    reward: float
    finish_reason: FinishReason
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Each reward function's own value, by name."""
    environment_tokens: int = 0
    """How many of ``token_ids`` a tool or an environment wrote. Their ``loss_mask`` is False, and not theirs
    alone."""
    row: int = 0
    """0: the sequence that was rewarded. Others hold what the same sample said in contexts that this one does
    not go on from (docs/agents.md): they are trained with its reward, and count in no mean over samples."""

    def meta(self) -> TrajectoryMeta:
        """The scalars of this trajectory."""
        trained = self.versions[self.loss_mask]
        if len(trained) and trained.min() == trained.max():  # most are of one version, and this is quick
            spans: tuple[tuple[int, int], ...] = ((int(trained[0]), len(trained)),)
        else:
            versions, counts = np.unique(trained, return_counts=True)
            spans = tuple(zip(versions.tolist(), counts.tolist(), strict=True))
        return TrajectoryMeta(
            sample=self.sample,
            prompt_tokens=len(self.prompt_ids),
            response_tokens=len(self.token_ids),
            reward=self.reward,
            finish_reason=self.finish_reason,
            trained=spans,
            rewards=dict(self.rewards),
            environment_tokens=self.environment_tokens,
            row=self.row,
            prompt=crc32(self.prompt_ids.tobytes()),
        )


@dataclass(frozen=True, slots=True)
class TrajectoryMeta:
    """Scalars of one trajectory."""

    sample: int
    prompt_tokens: int
    response_tokens: int
    reward: float
    finish_reason: FinishReason
    trained: tuple[tuple[int, int], ...]
    """(version, number of tokens with loss_mask 1 that it sampled), oldest version first."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    environment_tokens: int = 0
    row: int = 0
    prompt: int = 0
    """Equal for equal prompts: a hash of the tokens."""

    @property
    def sampled_tokens(self) -> int:
        """Of the response, what the model wrote itself."""
        return self.response_tokens - self.environment_tokens

    @property
    def loss_tokens(self) -> int:
        return sum(count for _, count in self.trained)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest trained token; None where no token is trained."""
        return self.trained[0][0] if self.trained else None

    @property
    def newest_version(self) -> int | None:
        """Version of the newest trained token; None where no token is trained."""
        return self.trained[-1][0] if self.trained else None


def _whole_samples(rows: Sequence[TrajectoryMeta]) -> tuple[TrajectoryMeta, ...]:
    """One meta a sample, of all its rows together, in the order of their first rows."""
    by_sample: dict[int, list[TrajectoryMeta]] = {}
    for meta in rows:
        by_sample.setdefault(meta.sample, []).append(meta)
    return tuple(_together(of_one) for of_one in by_sample.values())


def _together(rows: Sequence[TrajectoryMeta]) -> TrajectoryMeta:
    trained: dict[int, int] = {}
    for version, count in sorted(pair for row in rows for pair in row.trained):
        trained[version] = trained.get(version, 0) + count
    return replace(
        min(rows, key=lambda meta: meta.row),
        prompt_tokens=sum(meta.prompt_tokens for meta in rows),
        response_tokens=sum(meta.response_tokens for meta in rows),
        environment_tokens=sum(meta.environment_tokens for meta in rows),
        trained=tuple(trained.items()),
    )


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """One sample of a group that produced no trajectory, and why."""

    sample: int
    attempt: int
    kind: str
    """The exception's class name, e.g. ``RewardTimeoutError``."""
    message: str


@dataclass(frozen=True, slots=True)
class Span:
    """Time that a slot, or a reward worker, spent on one sample. Seconds by the loop's clock."""

    track: str
    """Which slot or worker of the replica, e.g. ``slot 3``."""
    sample: int
    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task; ``group_size`` of them less those that failed, and further rows of these.

    Rows of one sample lie together, row 0 first.
    """

    ordinal: int
    uid: str
    start_version: int
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """A greedy answer beside them, whose reward they are compared with; it is never trained."""

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """T of each trajectory."""
        return tuple(len(trajectory.token_ids) for trajectory in self.trajectories)

    @property
    def answers(self) -> tuple[Trajectory, ...]:
        """All of them, the baseline last."""
        return self.trajectories if self.baseline is None else (*self.trajectories, self.baseline)


@dataclass(frozen=True, slots=True)
class GroupMeta:
    """Scalars of a group: what the controller sees."""

    ordinal: int
    uid: str
    start_version: int
    trajectories: tuple[TrajectoryMeta, ...]
    checksum: int
    """CRC-32 of the encoded payload."""
    nbytes: int
    """Size of the encoded payload."""
    failures: tuple[SampleFailure, ...] = ()
    baseline: TrajectoryMeta | None = None
    """Of the greedy answer beside them; its tokens and its reward are in no other figure here."""
    spans: tuple[Span, ...] = field(default=(), compare=False)
    """What the replica's slots and reward workers spent on it, for the timeline. Equal groups may differ
    in it."""

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest trained token; None where no token is trained."""
        versions = [t.oldest_version for t in self.trajectories if t.oldest_version is not None]
        return min(versions, default=None)

    @property
    def newest_version(self) -> int | None:
        """Version of the newest trained token; None where no token is trained."""
        versions = [t.newest_version for t in self.trajectories if t.newest_version is not None]
        return max(versions, default=None)

    @property
    def loss_tokens(self) -> int:
        return sum(t.loss_tokens for t in self.trajectories)

    @property
    def samples(self) -> tuple[TrajectoryMeta, ...]:
        """One a sample, whatever number of rows it has."""
        return _whole_samples(self.trajectories) if self.has_rows else self.trajectories

    @property
    def has_rows(self) -> bool:
        """Whether a sample has more than one row."""
        return any(t.row for t in self.trajectories)

    @property
    def rewards(self) -> tuple[float, ...]:
        """One a sample."""
        return tuple(t.reward for t in self.samples)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the samples; None where there is none."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class AnnotationMeta:
    """Scalars of what one role computed about a group: what the controller sees."""

    role: str
    checksum: int
    """CRC-32 of the encoded payload."""
    nbytes: int
    """Size of the encoded payload."""
    seconds: float
    """What the role's process worked on it."""
    scalars: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name, one number a trajectory."""
    reference_version: int | None = None
    """Of a reference: the policy version that it last took weights of; 0: what it started from."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """What one role computed about a group. ``payload`` is a Ray object reference, or bytes in tests."""

    meta: AnnotationMeta
    payload: Any


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A finished group in the queue. ``payload`` is a Ray object reference, or bytes in tests."""

    meta: GroupMeta
    payload: Any
    expiry: int
    """The last step that it may be left to: start version + max_staleness, unless it was postponed."""
    annotations: tuple[Annotation, ...] = ()
    """One of each role that the run has."""
    landed_at: float = 0.0
    """When it was back from its generator, by the loop's clock: annotations came after that."""

    @property
    def nbytes(self) -> int:
        """Size of all that it refers to."""
        return self.meta.nbytes + sum(annotation.meta.nbytes for annotation in self.annotations)


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A group on its way into one update, with one advantage a trajectory."""

    meta: GroupMeta
    payload: Any
    advantages: tuple[float, ...]
    annotations: tuple[Annotation, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one update trains on, sorted by ordinal."""

    version: int
    """v: the policy version before the update; every lag is measured from it."""
    items: tuple[BatchItem, ...]
    kl_coef: float = 0.0
    """Factor of the KL to the reference in this update."""


def token_lag(version: int, token_version: int) -> int:
    """Lag of a token trained in the step ``version`` -> ``version + 1``.

    The one definition that admission, consumption, the learner's check and the metrics share.
    """
    return version - token_version


def token_lags(version: int, token_versions: Int32Array) -> npt.NDArray[np.int64]:
    """``token_lag`` of each of many tokens, (N,) -> (N,)."""
    return version - token_versions.astype(np.int64)


def group_lag(version: int, meta: GroupMeta) -> int | None:
    """Lag of a group: that of its oldest trained token; None where no token is trained."""
    oldest = meta.oldest_version
    return None if oldest is None else token_lag(version, oldest)


def unmasked(version: int, max_staleness: int, meta: GroupMeta) -> GroupMeta:
    """What the step from ``version`` trains of a group once tokens beyond the bound are masked out.

    Rewards and lengths stay those of the whole group. ``learners/masking.py`` does to the tokens what
    this does to their counts.
    """

    def young(trajectory: TrajectoryMeta) -> TrajectoryMeta:
        kept = tuple(t for t in trajectory.trained if token_lag(version, t[0]) <= max_staleness)
        return replace(trajectory, trained=kept)

    oldest = meta.oldest_version
    if oldest is None or token_lag(version, oldest) <= max_staleness:
        return meta
    return replace(meta, trajectories=tuple(young(t) for t in meta.trajectories))


def sort_key(meta: GroupMeta) -> int:
    """Batches are computed on in this order, whatever order the groups arrived in."""
    return meta.ordinal


Metrics = dict[str, float]
