"""From a batch's items to the samples that one learner rank trains, by way of payloads.

The controller's side takes payloads and scalars apart, because Ray resolves only arguments that are
references themselves; the rank's side puts them together again, in its own process.

Invariant: bytes that are not those that the controller knows of are never trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.errors import LearnerError
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.learners.packing import RankPlan
from asyncrl.queues.annotations import decode_annotation
from asyncrl.queues.codec import checksum, decode_group
from asyncrl.types import AnnotationMeta, BatchItem

ANNOTATED = frozenset({"kl", "reference", "values"})
"""Fields of a ``TrainSample`` that roles fill, under the names of their arrays."""


@dataclass(frozen=True, slots=True)
class SentGroup:
    """What goes with a group's payloads: its own, then one of each annotation."""

    advantages: tuple[float, ...]
    annotations: tuple[AnnotationMeta, ...] = ()


def sent_groups(items: Sequence[BatchItem]) -> tuple[list[SentGroup], list[Any]]:
    """What ``train_samples`` takes: the scalars of each item, and all payloads one after the other."""
    groups = [SentGroup(item.advantages, tuple(a.meta for a in item.annotations)) for item in items]
    payloads: list[Any] = []
    for item in items:
        payloads += [item.payload, *(annotation.payload for annotation in item.annotations)]
    return groups, payloads


def rank_step(
    version: int, kl_coef: float, plan: RankPlan, groups: Sequence[SentGroup], payloads: Sequence[bytes]
) -> RankStep:
    """What one rank is to do of the update of ``version``; raises as ``train_samples`` does."""
    return RankStep(
        version,
        train_samples(plan.checksums, groups, payloads),
        plan.micro_batches,
        plan.loss_tokens,
        plan.sequences,
        plan.mini_batches,
        kl_coef,
    )


def train_samples(
    checksums: Sequence[int], groups: Sequence[SentGroup], payloads: Sequence[bytes]
) -> tuple[TrainSample, ...]:
    """The samples of the groups, in their order, with what the roles found about them.

    ``checksums``: the expected CRC-32 of each group's own payload.
    Raises LearnerError for a payload with another checksum, or an array that no sample has a field for.
    """
    samples: list[TrainSample] = []
    arriving = iter(payloads)
    for expected, sent in zip(checksums, groups, strict=True):
        group = decode_group(_checked(next(arriving), expected, "a group"))
        found = [
            TrainSample(group.ordinal, trajectory, advantage)
            for trajectory, advantage in zip(group.trajectories, sent.advantages, strict=True)
        ]
        for meta in sent.annotations:
            what = f"the {meta.role}'s annotation of group {group.ordinal}"
            payload = _checked(next(arriving), meta.checksum, what)
            found = list(_with_annotation(found, payload, what))
        samples += found
    return tuple(samples)


def _with_annotation(samples: list[TrainSample], payload: bytes, what: str) -> Iterator[TrainSample]:
    lengths = [len(sample.trajectory.token_ids) for sample in samples]
    arrays = decode_annotation(payload, samples[0].ordinal, lengths)
    unknown = arrays.keys() - ANNOTATED
    if unknown:
        raise LearnerError(f"{what} holds {sorted(unknown)}, expected {sorted(ANNOTATED)} alone")
    for i, sample in enumerate(samples):
        found: dict[str, Any] = {name: column[i] for name, column in arrays.items()}
        yield replace(sample, **found)


def _checked(payload: bytes, expected: int, what: str) -> bytes:
    found = checksum(payload)
    if found != expected:
        raise LearnerError(f"{what} arrived with checksum {found:#x}, expected {expected:#x}")
    return payload
