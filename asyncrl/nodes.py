"""Which node of a cluster each actor goes to: decided here, before any actor exists.

Plain arithmetic over what the nodes have, so that it is tested without a cluster; ``seats.py`` has Ray set
aside what was decided.

Invariants:
- No node gets more than it has. An actor is on one node with all its GPUs.
- Who needs most on one node chooses first: many GPUs an actor before few, strict strategies before others.
  Where that leaves no room for the rest, another order is tried.
- Equal nodes and equal demands give equal seats.
- What does not fit is a PlacementError that says what was needed and what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal

from asyncrl.config import Strategy
from asyncrl.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Node:
    """A node, and what of it may be taken."""

    id: str
    address: str
    host: str
    cpus: float
    gpus: int

    def is_called(self, name: str) -> bool:
        return name in (self.id, self.address, self.host)

    def __str__(self) -> str:
        return self.address if self.host in ("", self.address) else f"{self.address} ({self.host})"


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal actors, and where they may be."""

    what: str
    """One of them, for messages: "generator", "learner rank"."""
    key: str
    """The key that says how many there are."""
    count: int
    cpus: float
    """Of each."""
    gpus: int
    """Of each."""
    side: str = ""
    """The key of the section that says where."""
    strategy: Strategy = "PACK"
    names: tuple[str, ...] | None = None
    """Nodes that it may be on; None: any."""
    device_key: str = ""
    """The key that would take it off the GPUs."""

    @property
    def urgency(self) -> tuple[int, bool, float]:
        return self.gpus, self.strategy.startswith("STRICT"), self.cpus

    def size(self, count: int) -> str:
        """What so many of them need, in words."""
        if self.gpus:
            return f"{count * self.gpus} GPUs" + (f" and {count * self.cpus:g} CPUs" if self.cpus else "")
        return f"{count * self.cpus:g} CPUs"


def assign(nodes: Sequence[Node], demands: Sequence[Demand]) -> list[list[Node]]:
    """The node of each actor, for each demand. Raises PlacementError where they do not all fit."""
    first = sorted(range(len(demands)), key=lambda i: demands[i].urgency, reverse=True)
    refused: PlacementError | None = None
    # A handful of demands: every order may be tried.
    for order in permutations(first):
        left = {node.id: _Left(node) for node in nodes}
        found: dict[int, list[Node]] = {}
        try:
            for i in order:
                demand = demands[i]
                allowed = [left[node.id] for node in named(nodes, demand.names, f"{demand.side}.nodes")]
                found[i] = _place(demand, allowed)
        except PlacementError as error:
            refused = refused or error
        else:
            return [found[i] for i in range(len(demands))]
    assert refused is not None, "there is at least one order"
    raise refused


def named(nodes: Sequence[Node], names: Sequence[str] | None, key: str) -> list[Node]:
    """The nodes that go by one of ``names``; all for None. Raises PlacementError for a name of none."""
    if names is None:
        return list(nodes)
    unknown = [name for name in names if not any(node.is_called(name) for node in nodes)]
    if unknown:
        raise PlacementError(
            f"{key}: found {', '.join(unknown)}; expected addresses, host names or ids out of the "
            f"{len(nodes)} nodes that the run can have: {', '.join(map(str, nodes))}"
        )
    return [node for node in nodes if any(node.is_called(name) for name in names)]


def chosen(nodes: Sequence[Node], count: int | None, preferred: Iterable[str]) -> list[Node]:
    """The nodes that a run takes: all, or ``count`` of them, those called ``preferred`` first.

    After these, those that have most. Raises PlacementError where there are fewer.
    """
    if count is None:
        return list(nodes)
    if count > len(nodes):
        raise PlacementError(
            f"placement.nodes: found {count}, the cluster has {len(nodes)}: {', '.join(map(str, nodes))}; "
            f"lower it to {len(nodes)}, or start Ray on {count - len(nodes)} more"
        )
    wanted = list(preferred)
    order = sorted(
        nodes, key=lambda n: (not any(map(n.is_called, wanted)), -n.gpus, -n.cpus)
    )  # stable: the cluster's own order decides between equals
    return order[:count]


def where_another(
    demand: Demand, nodes: Sequence[Node], used: Set[str], taken: Set[str], limit: int | None
) -> tuple[Literal["in", "!in"], frozenset[str]]:
    """Ids of the nodes that one more of the demand's actors may be on, or may not: ("!in", {}) is any node.

    ``used``: nodes that others of the demand are on; ``taken``: that any actor of the run is on, of which
    there may be ``limit``. Nodes that are still to come count wherever they may.
    """
    living = {node.id for node in nodes}
    used, taken = used & living, taken & living
    ids: set[str] | None = None
    if demand.names is not None:
        ids = {node.id for node in nodes if any(map(node.is_called, demand.names))}
    if limit is not None and len(taken) >= limit:
        ids = set(taken) if ids is None else ids & taken
    if demand.strategy == "STRICT_PACK" and used:
        ids = set(used) if ids is None else ids & used
    if demand.strategy == "STRICT_SPREAD":
        if ids is None:
            return "!in", frozenset(used)
        ids -= used
    return ("!in", frozenset()) if ids is None else ("in", frozenset(ids))


def require_total(nodes: Sequence[Node], demands: Sequence[Demand]) -> None:
    """Raise PlacementError if the nodes together have less than all demands together need."""
    actors = " and ".join(f"{d.count} {d.what}{'s' if d.count != 1 else ''}" for d in demands)
    keys = " or ".join(demand.key for demand in demands)
    gpus, has_gpus = sum(d.count * d.gpus for d in demands), sum(node.gpus for node in nodes)
    if gpus > has_gpus:
        devices = " or ".join(d.device_key for d in demands if d.device_key)
        raise PlacementError(
            f"{actors} need {gpus} GPUs, the cluster has {has_gpus}; lower {keys}, or set {devices} to cpu"
        )
    cpus, has_cpus = sum(d.count * d.cpus for d in demands), sum(node.cpus for node in nodes)
    if cpus > has_cpus:
        sides = " or ".join(dict.fromkeys(f"{d.side}.cpus" for d in demands if d.cpus and d.side))
        raise PlacementError(
            f"{actors} need {cpus:g} CPUs, the cluster has {has_cpus:g}; lower {keys}, or set {sides} to 0: "
            "then they share cores"
        )


@dataclass(slots=True)
class _Left:
    """What is left of a node."""

    node: Node
    actors: int = 0
    """Of the demand that is being placed."""

    def holds(self, demand: Demand) -> int:
        """How many more of the demand's actors fit; more than there are for those that need nothing."""
        by_gpus = self.node.gpus // demand.gpus if demand.gpus else demand.count
        by_cpus = int(self.node.cpus / demand.cpus + 1e-6) if demand.cpus else demand.count
        return min(by_gpus, by_cpus)

    def take(self, demand: Demand) -> Node:
        self.actors += 1
        node = self.node
        self.node = replace(node, gpus=node.gpus - demand.gpus, cpus=node.cpus - demand.cpus)
        return node


def _place(demand: Demand, allowed: Sequence[_Left]) -> list[Node]:
    for left in allowed:
        left.actors = 0
    _require_one(demand, allowed)
    if demand.strategy in ("PACK", "STRICT_PACK"):
        whole = [left for left in allowed if left.holds(demand) >= demand.count]
        if whole:
            # The tightest: what is large stays free for those that need it.
            tightest = min(whole, key=lambda left: (left.holds(demand), left.node.gpus, left.node.cpus))
            return [tightest.take(demand) for _ in range(demand.count)]
        if demand.strategy == "STRICT_PACK":
            most = max(left.holds(demand) for left in allowed)
            raise PlacementError(
                f"{demand.side}.strategy: found STRICT_PACK for {demand.count} {demand.what}s, "
                f"{demand.size(demand.count)} on one node; the roomiest has room for {most}: "
                f"{_rooms(allowed)}; set it to PACK, or lower {demand.key} to {most}"
            )
    if demand.strategy == "STRICT_SPREAD":
        able = [left for left in allowed if left.holds(demand)]
        if len(able) < demand.count:
            raise PlacementError(
                f"{demand.side}.strategy: found STRICT_SPREAD, a node for each of {demand.count} "
                f"{demand.what}s; {len(able)} nodes have room for one: {_rooms(allowed)}; set it to SPREAD, "
                f"or lower {demand.key} to {len(able)}"
            )
    taken = []
    for i in range(demand.count):
        able = [left for left in allowed if left.holds(demand)]
        if not able:
            raise PlacementError(
                f"{demand.count} {demand.what}s of {demand.size(1)} each: there is room for {i}, because an "
                f"actor is on one node; after the others the nodes have {_rooms(allowed)}; lower {demand.key}"
            )
        taken.append(_next(demand, able).take(demand))
    return taken


def _next(demand: Demand, able: Sequence[_Left]) -> _Left:
    if demand.strategy == "PACK":
        # Those that have some already, then the roomiest: few nodes in all.
        return max(able, key=lambda left: (left.actors > 0, left.holds(demand)))
    return min(able, key=lambda left: (left.actors, -left.holds(demand)))


def _require_one(demand: Demand, allowed: Sequence[_Left]) -> None:
    """Raise PlacementError if a single actor is larger than any node."""
    if any(left.holds(demand) for left in allowed):
        return
    gpus = max(left.node.gpus for left in allowed)
    if demand.gpus > gpus:
        raise PlacementError(
            f"{demand.key}: a {demand.what} needs {demand.gpus} GPUs on one node, the most that one has for "
            f"it is {gpus}: {_rooms(allowed)}; lower "
            + ("generators.vllm.tensor_parallel_size" if demand.gpus > 1 else demand.key)
            + f", or set {demand.device_key} to cpu"
        )
    cpus = max(left.node.cpus for left in allowed)
    raise PlacementError(
        f"{demand.key}: a {demand.what} needs {demand.cpus:g} CPUs on one node, the most that one has for it "
        f"is {cpus:g}: {_rooms(allowed)}; lower {demand.side}.cpus"
    )


def _rooms(allowed: Sequence[_Left]) -> str:
    return ", ".join(f"{left.node}: {left.node.gpus} GPUs and {left.node.cpus:g} CPUs" for left in allowed)


def counts(seats: Iterable[Node]) -> Mapping[str, int]:
    """Actors by node, as the log shows them."""
    by_node: dict[str, int] = {}
    for node in seats:
        by_node[str(node)] = by_node.get(str(node), 0) + 1
    return by_node
