"""Which node each actor goes to, and what is refused because it fits nowhere, with both numbers."""

from __future__ import annotations

import random

import pytest

from asyncrl.config import Config, Strategy
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError, PlacementError
from asyncrl.nodes import Demand, Node, assign, chosen, require_total, where_another
from asyncrl.placement import Placement, demands_of
from asyncrl.plan import cluster_text

from .controller_harness import BASE


def nodes(*gpus: int, cpus: float = 8.0) -> list[Node]:
    return [Node(f"id{i}", f"10.0.0.{i}", f"host{i}", cpus, n) for i, n in enumerate(gpus)]


def ranks(
    count: int, gpus: int = 1, strategy: Strategy = "PACK", names: tuple[str, ...] | None = None
) -> Demand:
    return Demand(
        "learner rank",
        "learner.ranks",
        count,
        0.0,
        gpus,
        "placement.learner",
        strategy,
        names,
        "learner.device",
    )


def generators(
    count: int, gpus: int = 1, strategy: Strategy = "PACK", names: tuple[str, ...] | None = None
) -> Demand:
    return Demand(
        "generator",
        "generators.replicas",
        count,
        0.0,
        gpus,
        "placement.generators",
        strategy,
        names,
        "generators.device",
    )


def places(found: list[Node]) -> list[int]:
    return [int(node.id[2:]) for node in found]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("PACK", [0, 0, 0]),
        ("STRICT_PACK", [0, 0, 0]),
        ("SPREAD", [1, 0, 2]),
        ("STRICT_SPREAD", [1, 0, 2]),
    ],
)
def test_a_strategy_places_as_it_says(strategy: Strategy, expected: list[int]) -> None:
    (found,) = assign(nodes(3, 4, 2), [ranks(3, strategy=strategy)])
    assert sorted(places(found)) == sorted(expected)


def test_packing_takes_the_tightest_node_and_else_as_few_as_hold_it() -> None:
    assert places(assign(nodes(8, 4, 2), [ranks(4)])[0]) == [1] * 4
    assert sorted(places(assign(nodes(2, 4, 4), [ranks(6)])[0])) == [1] * 4 + [2] * 2


def test_who_needs_much_on_one_node_chooses_first() -> None:
    spread, large = assign(nodes(4, 4), [ranks(4, strategy="SPREAD"), generators(1, gpus=4)])
    assert set(places(spread)).isdisjoint(places(large))


def test_another_order_is_tried_where_the_first_leaves_no_room() -> None:
    # Generators choose first, and would take the node that the learner is bound to.
    learner, others = assign(
        nodes(1, 1, 1), [ranks(1, names=("host0",)), generators(2, strategy="STRICT_SPREAD")]
    )
    assert places(learner) == [0]
    assert sorted(places(others)) == [1, 2]


def test_names_are_addresses_host_names_or_ids() -> None:
    for name in ("10.0.0.2", "host2", "id2"):
        learner, others = assign(nodes(2, 2, 2), [ranks(2, names=(name,)), generators(2, names=("host0",))])
        assert (places(learner), places(others)) == ([2, 2], [0, 0])


@pytest.mark.parametrize(
    ("demand", "says"),
    [
        (generators(1, gpus=4), r"needs 4 GPUs on one node, the most .* is 2: .*tensor_parallel_size"),
        (
            ranks(3, strategy="STRICT_PACK"),
            r"placement\.learner\.strategy: found STRICT_PACK .* 3 GPUs on one node; .* room for 2",
        ),
        (
            generators(4, strategy="STRICT_SPREAD"),
            r"STRICT_SPREAD, a node for each of 4 generators; 3 nodes have room for one",
        ),
        (
            ranks(1, names=("host1", "elsewhere")),
            r"placement\.learner\.nodes: found elsewhere; expected .* 3 nodes .*10\.0\.0\.0 \(host0\)",
        ),
        (ranks(7), r"7 learner ranks of 1 GPUs each: there is room for 6"),
    ],
)
def test_what_fits_nowhere_is_refused_with_both_numbers(demand: Demand, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        assign(nodes(2, 2, 2), [demand])


def test_more_gpus_than_there_are() -> None:
    says = r"4 learner ranks and 3 generators need 10 GPUs, the cluster has 8; lower learner\.ranks or gen"
    with pytest.raises(PlacementError, match=says):
        require_total(nodes(4, 4), [ranks(4), generators(3, gpus=2)])
    require_total(nodes(4, 4), [ranks(4), generators(2, gpus=2)])


def test_more_cpus_than_there_are_may_be_shared() -> None:
    demand = Demand("learner rank", "learner.ranks", 3, 2.0, 0, "placement.learner")
    with pytest.raises(
        PlacementError, match=r"need 6 CPUs, the cluster has 4; .*placement\.learner\.cpus to 0"
    ):
        require_total(nodes(0, 0, cpus=2.0), [demand])


def test_more_nodes_than_there_are() -> None:
    with pytest.raises(PlacementError, match=r"placement\.nodes: found 4, the cluster has 2"):
        chosen(nodes(1, 1), 4, ())


def test_a_limit_takes_named_nodes_first_and_then_the_largest() -> None:
    assert sorted(places(chosen(nodes(1, 8, 2, 4), 2, ["host0"]))) == [0, 1]
    assert places(chosen(nodes(1, 1), None, ())) == [0, 1]


@pytest.mark.parametrize(
    ("demand", "limit", "expected"),
    [
        (generators(2), None, ("!in", set())),
        (generators(2), 3, ("!in", set())),
        (generators(2), 2, ("in", {"id0", "id1"})),
        (generators(2, strategy="STRICT_PACK"), None, ("in", {"id1"})),
        (generators(2, strategy="STRICT_SPREAD"), None, ("!in", {"id1"})),
        (generators(2, strategy="STRICT_SPREAD"), 2, ("in", {"id0"})),
        (generators(2, names=("host1", "host2", "later")), None, ("in", {"id1", "id2"})),
        (generators(2, strategy="STRICT_SPREAD", names=("host1",)), None, ("in", set())),
    ],
)
def test_where_one_more_may_be(demand: Demand, limit: int | None, expected: tuple[str, set[str]]) -> None:
    # The learner is on node 0, a generator on node 1, and another was on one that is gone.
    found = where_another(demand, nodes(8, 8, 8), {"id1", "gone"}, {"id0", "id1", "gone"}, limit)
    assert found == expected


def test_no_node_is_given_more_than_it_has() -> None:
    strategies: list[Strategy] = ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
    placed = 0
    for seed in range(300):
        rng = random.Random(seed)
        cluster = nodes(*(rng.choice([0, 1, 2, 4, 8]) for _ in range(rng.randint(1, 4))))
        demands = [
            make(rng.randint(1, 6), rng.choice([0, 1, 2, 4]), rng.choice(strategies))
            for make in (ranks, generators)
        ]
        try:
            seats = assign(cluster, demands)
        except PlacementError:
            continue
        placed += 1
        for node in cluster:
            used = sum(d.gpus * ids(of).count(node.id) for d, of in zip(demands, seats, strict=True))
            assert used <= node.gpus
        for demand, found in zip(demands, seats, strict=True):
            assert len(found) == demand.count
            distinct = len({node.id for node in found})
            assert distinct == 1 or demand.strategy != "STRICT_PACK"
            assert distinct == demand.count or demand.strategy != "STRICT_SPREAD"
    assert placed > 60


def ids(found: list[Node]) -> list[str]:
    return [node.id for node in found]


# ------------------------------------------------------------------ from the config


def clustered(*overrides: str) -> Config:
    return parse_config(BASE, ("placement.address=auto", *overrides))


def test_cpus_are_set_aside_for_actors_that_compute_on_them() -> None:
    on_cpu = demands_of(clustered("learner.threads=2"), Placement(0, 0))
    assert (on_cpu["learner"].cpus, on_cpu["generators"].cpus) == (2.0, 1.0)
    beside_gpus = demands_of(clustered("placement.generators.cpus=3"), Placement(1, 1))
    assert (beside_gpus["learner"].cpus, beside_gpus["generators"].cpus) == (0.0, 3.0)
    colocated = clustered("placement.mode=colocated", "schedule.kv_after_swap=recompute")
    assert list(demands_of(colocated, Placement(0, 0))) == ["learner"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("placement.nodes=2", "placement.address=null"), ("placement.nodes: found 2", "1 node")),
        (("placement.generators.strategy=SPREAD", "placement.address=null"), ("placement.generators",)),
        (("generators.max=3", "placement.address=null"), ("generators.max: found 3", "replicas 1")),
        (("generators.min=2",), ("generators.min: found 2", "at most 1")),
        (("generators={replicas: 3, max: 2}",), ("generators.max: found 2", "at least 3")),
        (
            ("generators.max=2", "placement.mode=colocated", "schedule.kv_after_swap=recompute"),
            ("generators.max: found 2", "placement.mode split"),
        ),
        (
            (
                "placement.generators.cpus=2",
                "placement.mode=colocated",
                "schedule.kv_after_swap=recompute",
            ),
            ("placement.generators", "placement.learner"),
        ),
        (
            ("placement={address: a, nodes: 2, learner: {strategy: STRICT_SPREAD}}", "learner.ranks=3"),
            ("placement.learner.strategy", "learner.ranks 3", "2 in placement.nodes"),
        ),
        (
            ("placement={address: a, nodes: 1, learner: {nodes: x}, generators: {nodes: [y, z]}}",),
            ("placement.nodes: found 1, and 3 different nodes", "x, y, z"),
        ),
    ],
)
def test_places_that_contradict_each_other_are_refused(
    overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        clustered(*overrides)
    assert all(text in str(raised.value) for text in says), str(raised.value)


def test_the_plan_says_where_in_the_cluster_and_how_many() -> None:
    settings = clustered(
        "placement={address: auto, nodes: 3, learner: {strategy: STRICT_PACK, nodes: head}}",
        "generators={replicas: 2, max: 6}",
    )
    assert cluster_text(settings) == (
        "3 nodes of the cluster at auto; learner STRICT_PACK on head; generators PACK on any node; "
        "2 generators to begin with, at least 1 and at most 6 later"
    )
