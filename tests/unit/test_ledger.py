"""The ledger: every legal path, every illegal one, and memory that does not grow."""

import json
import random

import pytest

from asyncrl.errors import LedgerError
from asyncrl.ledger import FINAL_STATES, Frontier, Ledger, Retired


def at(state: str, ordinal: int = 0) -> Ledger:
    """A ledger whose only live ordinal is in ``state``."""
    ledger = Ledger()
    if ordinal:
        ledger = Ledger.restore(Frontier(ordinal, (), {"trained": ordinal}))
    ledger.submit(ordinal, "train-0")
    if state in ("ready", "training"):
        ledger.mark_ready(ordinal)
    if state == "training":
        ledger.start_training(ordinal)
    return ledger


def test_an_ordinal_goes_through_every_state_once():
    lines: list[Retired] = []
    ledger = Ledger(lines.append)
    ledger.submit(0, "train-7")
    for state, move in (("running", ledger.mark_ready), ("ready", ledger.start_training)):
        assert ledger.state(0) == state
        assert ledger.counts()[state] == 1
        move(0)
        ledger.check()
    retired = ledger.retire(0, "trained", "update", step=3, lag=1, reward_mean=0.5)
    ledger.check()
    assert lines == [retired]
    assert json.loads(json.dumps(retired.as_json())) == {
        "ordinal": 0,
        "uid": "train-7",
        "state": "trained",
        "reason": "update",
        "step": 3,
        "lag": 1,
        "reward_mean": 0.5,
    }
    assert ledger.state(0) == "retired"
    assert ledger.state(1) == "pending"
    assert ledger.counts() == {
        "submitted": 1,
        **dict.fromkeys(("running", "ready", "training", "filtered", "dropped", "failed"), 0),
        "trained": 1,
    }


LEGAL = {
    "running": {"filtered", "dropped", "failed"},
    "ready": {"filtered", "dropped", "failed"},
    "training": {"trained", "filtered", "dropped", "failed"},
}


@pytest.mark.parametrize("state", LEGAL)
@pytest.mark.parametrize("final", FINAL_STATES)
def test_ends(state, final):
    ledger = at(state)
    if final in LEGAL[state]:
        assert ledger.retire(0, final, "why").state == final
        assert ledger.counts()[final] == 1
    else:
        with pytest.raises(LedgerError, match=rf"ordinal 0 was moved to {final} from state {state}, but"):
            ledger.retire(0, final, "why")
        assert ledger.state(0) == state
    ledger.check()


@pytest.mark.parametrize(
    ("state", "move", "message"),
    [
        ("ready", "mark_ready", "ordinal 0 was moved to ready from state ready, but .* from running"),
        ("training", "mark_ready", "to ready from state training"),
        ("running", "start_training", "to training from state running, but .* from ready"),
        ("training", "start_training", "to training from state training"),
    ],
)
def test_moves_out_of_order(state, move, message):
    ledger = at(state)
    with pytest.raises(LedgerError, match=message):
        getattr(ledger, move)(0)
    assert ledger.state(0) == state


def test_what_is_retired_or_was_never_submitted_does_not_move():
    ledger = at("training")
    ledger.retire(0, "trained", "update")
    for ordinal, state in ((0, "retired"), (5, "pending")):
        with pytest.raises(LedgerError, match=f"ordinal {ordinal} was moved to dropped from state {state}"):
            ledger.retire(ordinal, "dropped", "late")
        with pytest.raises(LedgerError, match=f"from state {state}"):
            ledger.mark_ready(ordinal)


def test_ordinals_come_in_order_without_gap_or_repetition():
    ledger = at("running")
    with pytest.raises(LedgerError, match=r"ordinal 2 \(b\) was submitted in state pending, but .* is 1"):
        ledger.submit(2, "b")
    with pytest.raises(LedgerError, match=r"ordinal 0 \(a\) was submitted in state running"):
        ledger.submit(0, "a")
    ledger.retire(0, "failed", "why")
    with pytest.raises(LedgerError, match="in state retired"):
        ledger.submit(0, "a")
    assert ledger.counts()["submitted"] == 1


def test_every_end_has_a_reason():
    ledger = at("running")
    with pytest.raises(LedgerError, match=r"ordinal 0 \(train-0\) was retired as failed without a reason"):
        ledger.retire(0, "failed", "")
    ledger.check()
    assert ledger.state(0) == "running"


def test_a_sink_that_raises_is_heard_after_the_books_are_in_order():
    def sink(_: Retired) -> None:
        raise OSError("disk full")

    ledger = Ledger(sink)
    ledger.submit(0, "a")
    with pytest.raises(OSError, match="disk full"):
        ledger.retire(0, "failed", "why")
    ledger.check()
    assert ledger.counts()["failed"] == 1


def test_the_conservation_law_is_really_counted():
    for corrupt in ("_live", "_counts", "_submitted", "_retired_above"):
        ledger = at("running")
        ledger.check()
        if corrupt == "_live":
            ledger._live.clear()
        elif corrupt == "_counts":
            ledger._counts["trained"] += 1
        elif corrupt == "_submitted":
            ledger._submitted += 1
        else:
            ledger._retired_above.add(5)
        with pytest.raises(LedgerError):
            ledger.check()


def test_frontier_and_restore():
    ledger = Ledger()
    for ordinal in range(6):
        ledger.submit(ordinal, f"t{ordinal}")
    for ordinal in (0, 1, 4):
        ledger.retire(ordinal, "filtered", "zero_variance")
    ledger.retire(2, "failed", "RewardTimeoutError")
    frontier = ledger.frontier()
    assert frontier == Frontier(3, (4,), {"trained": 0, "filtered": 3, "dropped": 0, "failed": 1})
    assert (ledger.statistics().lowest, ledger.statistics().retired_above) == (3, 1)

    lines: list[Retired] = []
    resumed = Ledger.restore(frontier, lines.append)
    resumed.check()
    assert resumed.counts()["submitted"] == 4
    assert resumed.next_ordinal == 3
    with pytest.raises(LedgerError, match="in state retired"):
        resumed.submit(4, "t4")
    resumed.submit(3, "t3")
    assert resumed.next_ordinal == 5  # 4 is retired
    resumed.submit(5, "t5")
    resumed.check()
    resumed.retire(3, "dropped", "at_bound")
    assert resumed.frontier().lowest == 5
    assert [line.ordinal for line in lines] == [3]
    resumed.check()


@pytest.mark.parametrize(
    "frontier",
    [
        Frontier(3, (), {"trained": 2}),
        Frontier(3, (2,), {"trained": 4}),
        Frontier(3, (3,), {"trained": 4}),
        Frontier(3, (5, 5), {"trained": 5}),
        Frontier(3, (), {"trained": 3, "lost": 0}),
    ],
)
def test_a_frontier_that_contradicts_itself_is_refused(frontier):
    with pytest.raises(LedgerError, match="a frontier at ordinal 3"):
        Ledger.restore(frontier)


def test_a_resumed_ledger_knows_what_was_ready_and_passes_over_it():
    frontier = Frontier(2, (4,), {"trained": 3})
    lines: list[Retired] = []
    ledger = Ledger.restore(frontier, lines.append, {6: "t6", 3: "t3"})
    ledger.check()
    assert (ledger.counts()["submitted"], ledger.counts()["ready"]) == (5, 2)
    submitted = []
    for _ in range(4):
        submitted.append(ledger.next_ordinal)
        ledger.submit(ledger.next_ordinal, "t")
    assert submitted == [2, 5, 7, 8]
    ledger.start_training(6)
    ledger.retire(6, "trained", "trained")
    ledger.check()
    assert [line.uid for line in lines] == ["t6"]
    assert ledger.frontier().retired_above == (4, 6)
    for retired in (1, 4):
        with pytest.raises(LedgerError, match=f"ordinal {retired} .* is retired, and ready too"):
            Ledger.restore(frontier, ready={retired: "t"})


def test_memory_stays_flat_over_many_ordinals():
    ledger = Ledger()
    shuffle = random.Random(0)
    largest = 0
    window: list[int] = []
    for ordinal in range(50_000):
        ledger.submit(ordinal, "t")
        window.append(ordinal)
        if len(window) > 64:
            ledger.retire(window.pop(shuffle.randrange(8)), "failed", "why")
        largest = max(largest, ledger.statistics().retired_above + len(ledger._live))
    ledger.check()
    assert largest < 300
    assert ledger.counts()["submitted"] == 50_000
