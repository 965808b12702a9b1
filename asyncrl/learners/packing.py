"""Which rank trains which groups, and in which micro-batches: a pure function of the batch.

Invariants:
- Whole groups go to ranks, so that a rank fetches only its own groups' payloads.
- Every trajectory with a trained token is in exactly one micro-batch of exactly one rank.
- rows * longest row <= ``micro_batch_tokens`` in every micro-batch, padding included. A row is one
  trajectory, with packing as many as fit into it, or with shared prompts one prompt and its answers.
- A trajectory without a trained token is in no micro-batch: it has no share in the gradient.
- All ranks have the same number of micro-batches, the last ones empty where a rank has fewer:
  forward and backward passes are collective.
- Equal metas give an equal plan, whatever order Python iterates in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learners.base import MiniBatch
from asyncrl.learners.layout import Layout, Row, lay_out, lay_out_shared, shared_row
from asyncrl.types import Batch, GroupMeta, TrajectoryMeta

MicroBatches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share of an update: what to fetch, and how to run it."""

    items: tuple[int, ...]
    """Indices into the batch's items, ascending."""
    checksums: tuple[int, ...]
    """The payload's expected CRC-32, one an item."""
    micro_batches: MicroBatches
    """Indices into the rank's trajectories: those of its items, one after the other."""
    loss_tokens: int
    """Trained tokens of the whole step, over all ranks."""
    sequences: int
    """Trajectories of the whole step with at least one trained token, over all ranks."""
    mini_batches: tuple[MiniBatch, ...] = ()
    """The micro-batches of each optimizer update, where the step has several."""
    computed_tokens: int = 0
    """Tokens of the rank's forward passes over its micro-batches, padding included."""


def plan_step(
    batch: Batch,
    ranks: int,
    micro_batch_tokens: int,
    mini_batches: int = 1,
    layout: Layout = "padded",
    section: str = "learner",
) -> tuple[RankPlan, ...]:
    """One plan a rank.

    ``mini_batches`` optimizer updates, each of an equal part of the groups in their order; fewer where
    there are fewer groups. In none of them has a rank more than the mean load plus one group's tokens.
    ``layout`` is how ``collate`` lays the micro-batches out, ``section`` that of the config, for messages.
    Raises ConfigError for a sequence that is longer than ``micro_batch_tokens``, and InvariantError for an
    empty batch.
    """
    metas = [item.meta for item in batch.items]
    if not metas:
        raise InvariantError(f"the update of version {batch.version} has 0 groups, expected at least 1")
    parts = [
        _plan_part(metas, range(*cuts), ranks, micro_batch_tokens, layout, section)
        for cuts in pairwise(_cuts(len(metas), min(mini_batches, len(metas))))
    ]
    trajectories = [t for meta in metas for t in meta.trajectories]
    plans = []
    for rank in range(ranks):
        # Parts are cut in the order of the items, and so come one after the other in a rank too.
        items = tuple(i for owned, _ in parts for i in owned[rank])
        updates: list[MiniBatch] = []
        start = 0
        for owned, packed in parts:
            members = [t for i in chain.from_iterable(owned) for t in metas[i].trajectories]
            updates.append(
                MiniBatch(
                    tuple(tuple(start + row for row in rows) for rows in packed[rank]),
                    loss_tokens=sum(t.loss_tokens for t in members),
                    sequences=sum(t.loss_tokens > 0 for t in members),
                )
            )
            start += sum(len(metas[i].trajectories) for i in owned[rank])
        micro_batches = tuple(rows for update in updates for rows in update.micro_batches)
        own = [(i, t) for i in items for t in metas[i].trajectories]
        plans.append(
            RankPlan(
                items=items,
                checksums=tuple(metas[i].checksum for i in items),
                micro_batches=micro_batches,
                loss_tokens=sum(t.loss_tokens for t in trajectories),
                sequences=sum(t.loss_tokens > 0 for t in trajectories),
                mini_batches=tuple(updates) if len(updates) > 1 else (),
                computed_tokens=sum(_area([own[k] for k in rows], layout) for rows in micro_batches),
            )
        )
    return tuple(plans)


def _area(members: Sequence[tuple[int, TrajectoryMeta]], layout: Layout) -> int:
    """Tokens of one micro-batch as ``collate`` lays it out; of each member its item and itself."""
    if not members:
        return 0
    if layout == "shared":
        prompts = [t.prompt_tokens for _, t in members]
        keys = [(item, t.prompt_tokens) for item, t in members]
        places = lay_out_shared(keys, prompts, [t.response_tokens for _, t in members])
    else:
        places = lay_out([_length(t) for _, t in members], layout)
    return places.rows * places.width


def _plan_part(
    metas: Sequence[GroupMeta],
    part: range,
    ranks: int,
    micro_batch_tokens: int,
    layout: Layout,
    section: str,
) -> tuple[list[tuple[int, ...]], list[MicroBatches]]:
    """For each rank the items of one optimizer update, and their trajectories in micro-batches."""
    loads = [_load(metas[i], layout) for i in part]
    owned = [tuple(part[i] for i in items) for items in _assign(loads, ranks)]
    if layout == "shared":
        packed = [
            pack_prompts([metas[i].trajectories for i in items], micro_batch_tokens, section)
            for items in owned
        ]
    else:
        packed = [
            pack_rows([n for i in items for n in _lengths(metas[i])], micro_batch_tokens, layout, section)
            for items in owned
        ]
    # At least one, because an update is a collective call even where nobody has anything to train.
    count = max(1, *(len(micro_batches) for micro_batches in packed))
    return owned, [micro_batches + ((),) * (count - len(micro_batches)) for micro_batches in packed]


def _cuts(count: int, parts: int) -> list[int]:
    """Where ``count`` things are cut into parts whose sizes differ by at most 1."""
    return [count * i // parts for i in range(parts + 1)]


def _load(meta: GroupMeta, layout: Layout) -> int:
    """Tokens that a group costs its rank."""
    if layout != "shared":
        return sum(_lengths(meta))
    trained = [t for t in meta.trajectories if t.loss_tokens]
    return sum(t.response_tokens for t in trained) + sum({t.prompt_tokens for t in trained})


def _lengths(meta: GroupMeta) -> list[int]:
    return [_length(t) for t in meta.trajectories]


def _length(trajectory: TrajectoryMeta) -> int:
    """Tokens of its row; 0 where none of them is trained."""
    return trajectory.prompt_tokens + trajectory.response_tokens if trajectory.loss_tokens else 0


def _assign(loads: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Longest processing time first: each group to the rank with the least so far (Graham, 1969)."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        rank = min(range(ranks), key=lambda r: (total[r], r))
        owned[rank].append(i)
        total[rank] += loads[i]
    return [tuple(sorted(items)) for items in owned]


def pack_rows(
    lengths: Sequence[int], micro_batch_tokens: int, layout: Layout = "padded", section: str = "learner"
) -> MicroBatches:
    """Longest first, so that rows of like length come together, and what does not fit fails at once.

    Sequences of length 0 are left out. Raises ConfigError for one that is longer than
    ``micro_batch_tokens``, a key of ``section``.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
    _require_room(max(lengths, default=0), micro_batch_tokens, section)
    if layout == "padded":
        return _one_a_row(lengths, order, micro_batch_tokens)
    return _many_a_row(lengths, order, micro_batch_tokens, one_row=layout == "one_row")


def pack_prompts(
    groups: Sequence[Sequence[TrajectoryMeta]], micro_batch_tokens: int, section: str = "learner"
) -> MicroBatches:
    """A row for each prompt and its answers, the longest rows first; indices into all trajectories.

    Where the answers to one do not fit into ``micro_batch_tokens`` together, it is computed once more.
    Trajectories without a trained token are left out. Raises ConfigError as ``pack_rows``.
    """
    rows: list[tuple[int, tuple[int, ...]]] = []  # (tokens, members)
    first = 0
    for group in groups:
        by_prompt: dict[tuple[int, int], list[int]] = {}
        for i, t in enumerate(group):
            if t.loss_tokens:
                by_prompt.setdefault((t.prompt_tokens, t.prompt), []).append(i)
        for (prompt, _), members in by_prompt.items():
            row: list[int] = []
            tokens = 0
            for i in members:
                alone = shared_row(prompt, [group[i].response_tokens])
                _require_room(alone, micro_batch_tokens, section)
                longer = tokens + alone - prompt - 1 if row else alone
                if longer > micro_batch_tokens:
                    rows.append((tokens, tuple(first + k for k in row)))
                    row, longer = [], alone
                row.append(i)
                tokens = longer
            rows.append((tokens, tuple(first + k for k in row)))
        first += len(group)
    lengths = [tokens for tokens, _ in rows]
    order = sorted(range(len(rows)), key=lambda r: (-lengths[r], r))
    return tuple(
        tuple(i for r in together for i in rows[r][1])
        for together in _one_a_row(lengths, order, micro_batch_tokens)
    )


def _require_room(tokens: int, micro_batch_tokens: int, section: str) -> None:
    if tokens > micro_batch_tokens:
        raise ConfigError(
            f"a sequence has {tokens} tokens, {section}.micro_batch_tokens is {micro_batch_tokens}: raise it "
            f"to at least {tokens}, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )


def _one_a_row(lengths: Sequence[int], order: Sequence[int], micro_batch_tokens: int) -> MicroBatches:
    micro_batches: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        rows = micro_batch_tokens // lengths[order[start]]
        micro_batches.append(tuple(order[start : start + rows]))
        start += rows
    return tuple(micro_batches)


def _many_a_row(
    lengths: Sequence[int], order: Sequence[int], micro_batch_tokens: int, *, one_row: bool
) -> MicroBatches:
    """Each to the first row with room for it; the rows of a micro-batch are as long as its first."""
    micro_batches: list[list[int]] = []
    rows: list[tuple[int, Row]] = []  # with the micro-batch that each is in
    width = spare = 0  # of the last micro-batch's rows, and how many it may still get
    for i in order:
        found = next(((number, row) for number, row in rows if row.fits(lengths[i])), None)
        if found is None:
            if spare == 0:
                width = micro_batch_tokens if one_row else lengths[i]
                micro_batches.append([])
                spare = micro_batch_tokens // width
            spare -= 1
            found = len(micro_batches) - 1, Row(width)
            rows.append(found)
        number, row = found
        row.put(lengths[i])
        micro_batches[number].append(i)
    return tuple(map(tuple, micro_batches))
