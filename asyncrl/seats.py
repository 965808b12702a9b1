"""Setting aside what the actors of a run get in a Ray cluster, and finding room for those that join.

``nodes.py`` decides who goes where; here Ray is told, with placement groups: one for the ranks of each
engine, one for each generator, so that generators come and go by themselves. Bundles name their nodes by
label.

Invariants:
- A generator's room is set aside as long as its node lives and it is not given up.
- Room for another one is found by a placement group that waits: Ray fills it as soon as there is room, on
  a node that has just come or on one where something ended. Nothing looks around for it.
- Everything set aside is given back when the driver ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.errors import PlacementError
from asyncrl.nodes import Demand, Node, where_another

log = logging.getLogger(__name__)

_RESERVE_S = 60.0
"""Longest that what others use is waited for: a run that has just ended, above all."""
_LOOK_AGAIN_S = 60.0
"""How long a placement group waits for room before it is made anew, with the nodes that there are by then."""
_AFTER_ERROR_S = 5.0
_HEAD = "node:__internal_head__"
"""A resource that the head node alone has."""
_NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one actor goes."""

    node: Node
    group: PlacementGroup
    bundle: int = 0

    def options(self) -> dict[str, Any]:
        """Ray options that put an actor there."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"scheduling_strategy": strategy}


def cluster_nodes(*, free: bool = False) -> list[Node]:
    """The nodes that live, the head first, with what they have, or with what of it is ``free``. Blocks."""
    has = ray._private.state.available_resources_per_node() if free else {}
    nodes = []
    living = [found for found in ray.nodes() if found["Alive"]]
    for found in sorted(living, key=_order):
        resources = has.get(found["NodeID"], {}) if free else found["Resources"]
        nodes.append(
            Node(
                found["NodeID"],
                found["NodeManagerAddress"],
                found["NodeManagerHostname"],
                float(resources.get("CPU", 0.0)),
                int(resources.get("GPU", 0)),
            )
        )
    return nodes


def _order(found: dict[str, Any]) -> tuple[bool, str, str]:
    return _HEAD not in found["Resources"], found["NodeManagerAddress"], found["NodeID"]


def reserve_ranks(demand: Demand, nodes: Sequence[Node]) -> list[Seat]:
    """Set aside a seat on each of ``nodes``, in one placement group. Raises PlacementError."""
    group = placement_group(
        [_bundle(demand)] * len(nodes),
        strategy=demand.strategy,
        bundle_label_selector=[_on(node) for node in nodes],
    )
    _await_room(demand, group)
    return [Seat(node, group, bundle) for bundle, node in enumerate(nodes)]


class GeneratorSeats:
    """The seats of generators, by the generator's name.

    ``limit``: nodes that the run may take, ``others`` being the ids of those that its other parts are on.
    """

    def __init__(self, demand: Demand, *, limit: int | None, others: Iterable[str]) -> None:
        self._demand = demand
        self._limit = limit
        self._others = frozenset(others)
        self._seats: dict[str, Seat] = {}

    def reserve(self, names: Sequence[str], nodes: Sequence[Node]) -> None:
        """Set aside a seat on each of ``nodes``, for those called ``names``. Raises PlacementError."""
        for name, node in zip(names, nodes, strict=True):
            self._seats[name] = Seat(node, self._group(_on(node)))
        for seat in self._seats.values():
            _await_room(self._demand, seat.group)

    def __getitem__(self, name: str) -> Seat:
        return self._seats[name]

    async def is_there(self, name: str) -> bool:
        """Whether the node of a generator's seat still lives; if not, the seat is given up."""
        nodes = await asyncio.to_thread(cluster_nodes)
        seat = self._seats.get(name)
        if seat is None:
            return False
        if any(node.id == seat.node.id for node in nodes):
            return True
        del self._seats[name]
        remove_placement_group(seat.group)
        return False

    async def find(self, name: str) -> Seat:
        """Wait until there is room for one more, and set it aside for the generator called ``name``."""
        while True:
            where = self._where(await asyncio.to_thread(cluster_nodes))
            if where is None:
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            group = self._group(where)
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await group.ready()
                node = await asyncio.to_thread(_node_of, group)
            except TimeoutError:
                remove_placement_group(group)
                continue
            except RayError as error:
                log.warning("room for %s was found and lost again: %s", name, error)
                remove_placement_group(group)
                await asyncio.sleep(_AFTER_ERROR_S)
                continue
            except BaseException:
                remove_placement_group(group)
                raise
            seat = self._seats[name] = Seat(node, group)
            return seat

    def _group(self, where: dict[str, str]) -> PlacementGroup:
        return placement_group([_bundle(self._demand)], bundle_label_selector=[where])

    def _where(self, nodes: Sequence[Node]) -> dict[str, str] | None:
        """The labels of nodes that one more may be on; None while there is no such node."""
        used = {seat.node.id for seat in self._seats.values()}
        wanted, ids = where_another(self._demand, nodes, used, used | self._others, self._limit)
        if not ids:
            return {} if wanted == "!in" else None
        return {_NODE_ID: f"{wanted}({','.join(sorted(ids))})"}


def _bundle(demand: Demand) -> dict[str, float]:
    # Never empty, which Ray refuses: each node has memory, and a byte of it is always there.
    wanted = {"memory": 1.0, "CPU": demand.cpus, "GPU": float(demand.gpus)}
    return {name: amount for name, amount in wanted.items() if amount}


def _on(node: Node) -> dict[str, str]:
    """The label selector of one node."""
    return {_NODE_ID: node.id}


def _node_of(group: PlacementGroup) -> Node:
    """The node of a group of one bundle that was placed. RayError where that went away meanwhile; blocks."""
    places = placement_group_table(group)["bundles_to_node_id"].values()
    found = [node for node in cluster_nodes() if node.id in places]
    if not found:
        raise RayError("its node went away as soon as it was found")
    return found[0]


def _await_room(demand: Demand, group: PlacementGroup) -> None:
    """Return once the group was placed; blocks. PlacementError where others keep what it needs."""
    if group.wait(_RESERVE_S):
        return
    free = ", ".join(f"{n}: {n.gpus} GPUs and {n.cpus:g} CPUs" for n in cluster_nodes(free=True))
    raise PlacementError(
        f"{demand.size(len(group.bundle_specs))} for {demand.what}s did not become free in {_RESERVE_S:g} s: "
        f"the cluster has them, and now free are {free}; wait for what else runs there, or lower {demand.key}"
    )
