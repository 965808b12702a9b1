"""The ledger: what became of every prompt, each exactly once.

Every ordinal moves through ``running -> ready -> training`` to exactly one of ``trained``, ``filtered``,
``dropped`` or ``failed``, with a reason::

    running  -> ready | filtered | dropped | failed
    ready    -> training | filtered | dropped | failed
    training -> trained | filtered | dropped | failed

Invariants:
- submitted = running + ready + training + trained + filtered + dropped + failed.
- Ordinals are submitted in the order of the stream, with no gap and no repetition: none is lost
  between the data and the ledger.
- What is retired is not kept one by one: the frontier and the few retired ordinals above it say all,
  so memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from asyncrl.errors import LedgerError

LiveState = Literal["running", "ready", "training"]
FinalState = Literal["trained", "filtered", "dropped", "failed"]

LIVE_STATES: tuple[LiveState, ...] = get_args(LiveState)
FINAL_STATES: tuple[FinalState, ...] = get_args(FinalState)

_RETIRES_FROM: dict[FinalState, tuple[LiveState, ...]] = {
    "trained": ("training",),
    "filtered": LIVE_STATES,
    "dropped": LIVE_STATES,
    "failed": LIVE_STATES,
}


@dataclass(frozen=True, slots=True)
class Retired:
    """The end of one ordinal: a line of ``ledger.jsonl``."""

    ordinal: int
    uid: str
    state: FinalState
    reason: str
    step: int | None
    """Policy version before the update that trained it, or at which it was retired otherwise."""
    lag: int | None
    """Lag of its oldest trained token, in versions; None where nothing was trained."""
    reward_mean: float | None
    """Mean reward of its trajectories; None where there is none."""

    def as_json(self) -> dict[str, int | float | str | None]:
        """The line's keys and values, ready for ``json.dumps``."""
        return {
            "ordinal": self.ordinal,
            "uid": self.uid,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "lag": self.lag,
            "reward_mean": self.reward_mean,
        }


@dataclass(frozen=True, slots=True)
class Frontier:
    """All that a checkpoint needs to know of a ledger; what it does not list is issued again."""

    lowest: int
    """Lowest ordinal that is not retired: all below are."""
    retired_above: tuple[int, ...]
    """Retired ordinals above ``lowest``, ascending."""
    final_counts: dict[str, int]
    """How many were retired to each state, the history before a resume included."""


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """A snapshot: the terms of the conservation law, and the frontier."""

    submitted: int
    running: int
    ready: int
    training: int
    trained: int
    filtered: int
    dropped: int
    failed: int
    lowest: int
    """Lowest ordinal that is not retired."""
    retired_above: int
    """Number of retired ordinals above it: what the ledger keeps in memory beside the live ones."""


@dataclass(slots=True)
class _Entry:
    uid: str
    state: LiveState


class Ledger:
    """Follows every ordinal to its end, and tells ``sink`` of each end as it happens.

    A plain synchronous object. ``sink`` is called after the books are in order; what it raises is the
    caller's to see. All operations are O(1), but ``check`` and ``frontier``: O(live).
    """

    def __init__(self, sink: Callable[[Retired], None] | None = None) -> None:
        self._sink = sink
        self._live: dict[int, _Entry] = {}
        self._counts: dict[str, int] = dict.fromkeys((*LIVE_STATES, *FINAL_STATES), 0)  # by state
        self._submitted = 0
        self._next = 0  # the ordinal that has to be submitted next
        self._lowest = 0
        self._retired_above: set[int] = set()

    @classmethod
    def restore(
        cls,
        frontier: Frontier,
        sink: Callable[[Retired], None] | None = None,
        ready: Mapping[int, str] | None = None,
    ) -> Ledger:
        """A ledger that goes on from a frontier: live ordinals of then count as never submitted.

        But for those in ``ready``, with their uids, which are ready now as they were then. LedgerError if
        the frontier contradicts itself, or a ready ordinal is retired.
        """
        above = set(frontier.retired_above)
        retired = frontier.lowest + len(above)
        counted = sum(frontier.final_counts.values())
        if (
            retired != counted
            or len(above) != len(frontier.retired_above)
            or min(above, default=frontier.lowest + 1) <= frontier.lowest
            or not set(frontier.final_counts) <= set(FINAL_STATES)
        ):
            raise LedgerError(
                f"a frontier at ordinal {frontier.lowest} with {frontier.retired_above} retired above it"
                f" should count {retired} retired ordinals, but counts {counted} in {frontier.final_counts}"
            )
        ledger = cls(sink)
        ledger._counts.update(frontier.final_counts)
        ledger._submitted = counted
        ledger._next = ledger._lowest = frontier.lowest
        ledger._retired_above = above
        for ordinal, uid in (ready or {}).items():
            if ledger.state(ordinal) != "pending":
                raise LedgerError(f"ordinal {ordinal} ({uid}) is {ledger.state(ordinal)}, and ready too")
            ledger._live[ordinal] = _Entry(uid, "ready")
        ledger._counts["ready"] = len(ledger._live)
        ledger._submitted += len(ledger._live)
        ledger._pass_over()
        return ledger

    @property
    def next_ordinal(self) -> int:
        """The ordinal that has to be submitted next; those known from before a resume are passed over."""
        return self._next

    def state(self, ordinal: int) -> LiveState | Literal["pending", "retired"]:
        """Where an ordinal is; ``pending`` is one that was never submitted."""
        entry = self._live.get(ordinal)
        if entry is not None:
            return entry.state
        return "retired" if ordinal < self._lowest or ordinal in self._retired_above else "pending"

    def submit(self, ordinal: int, uid: str) -> None:
        """The ordinal goes to generation: pending -> running.

        LedgerError if it is not the next one of the stream, so that none is lost or comes twice.
        """
        if ordinal != self._next:
            raise LedgerError(
                f"ordinal {ordinal} ({uid}) was submitted in state {self.state(ordinal)}, but the next one of"
                f" the stream is {self._next}: submit every ordinal once, in order"
            )
        self._live[ordinal] = _Entry(uid, "running")
        self._counts["running"] += 1
        self._submitted += 1
        self._next += 1
        self._pass_over()

    def mark_ready(self, ordinal: int) -> None:
        """The group is whole and scored, and waits for a step: running -> ready."""
        self._move(ordinal, "running", "ready")

    def start_training(self, ordinal: int) -> None:
        """The group is part of the running update: ready -> training."""
        self._move(ordinal, "ready", "training")

    def retire(
        self,
        ordinal: int,
        state: FinalState,
        reason: str,
        *,
        step: int | None = None,
        lag: int | None = None,
        reward_mean: float | None = None,
    ) -> Retired:
        """The ordinal's end, with its reason, e.g. ``dropped`` for ``bad_step``.

        LedgerError if it is not live, or not in a state that may end so.
        """
        expected = _RETIRES_FROM[state]
        entry = self._live.get(ordinal)
        if entry is None or entry.state not in expected:
            raise self._illegal(ordinal, state, expected)
        if not reason:
            raise LedgerError(f"ordinal {ordinal} ({entry.uid}) was retired as {state} without a reason")
        del self._live[ordinal]
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        self._retired_above.add(ordinal)
        while self._lowest in self._retired_above:
            self._retired_above.remove(self._lowest)
            self._lowest += 1
        retired = Retired(ordinal, entry.uid, state, reason, step, lag, reward_mean)
        if self._sink is not None:
            self._sink(retired)
        return retired

    def check(self) -> None:
        """Recount the live ordinals and verify the conservation law; LedgerError if it does not hold."""
        states = [entry.state for entry in self._live.values()]
        for state in LIVE_STATES:
            if states.count(state) != self._counts[state]:
                raise LedgerError(
                    f"{states.count(state)} ordinals are {state}, but {self._counts[state]} were counted"
                )
        accounted = sum(self._counts.values())
        retired = accounted - len(states)
        known = self._lowest + len(self._retired_above)
        if self._submitted != accounted or retired != known:
            raise LedgerError(
                f"{self._submitted} ordinals were submitted, but {accounted} are accounted for; {retired}"
                f" were retired, and the frontier knows {known}: {self.counts()}"
            )

    def counts(self) -> dict[str, int]:
        """``submitted`` and the number in each state, live and final."""
        return {"submitted": self._submitted, **self._counts}

    def frontier(self) -> Frontier:
        """What a checkpoint stores; ``restore`` goes on from it."""
        return Frontier(
            lowest=self._lowest,
            retired_above=tuple(sorted(self._retired_above)),
            final_counts={state: self._counts[state] for state in FINAL_STATES},
        )

    def statistics(self) -> LedgerStatistics:
        """A snapshot of the ledger."""
        return LedgerStatistics(**self.counts(), lowest=self._lowest, retired_above=len(self._retired_above))

    def _pass_over(self) -> None:
        while self._next in self._retired_above or self._next in self._live:
            self._next += 1

    def _move(self, ordinal: int, source: LiveState, target: LiveState) -> None:
        entry = self._live.get(ordinal)
        if entry is None or entry.state != source:
            raise self._illegal(ordinal, target, (source,))
        entry.state = target
        self._counts[source] -= 1
        self._counts[target] += 1

    def _illegal(
        self, ordinal: int, target: LiveState | FinalState, expected: tuple[LiveState, ...]
    ) -> LedgerError:
        return LedgerError(
            f"ordinal {ordinal} was moved to {target} from state {self.state(ordinal)}, but that is possible"
            f" only from {' or '.join(expected)}"
        )
