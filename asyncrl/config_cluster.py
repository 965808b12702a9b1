"""Numbers and places of actors that contradict each other, as far as a config shows it without a cluster.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def cluster_contradictions(config: Config) -> list[str]:
    """What the keys of places and of elastic generators say against each other."""
    return [*_elastic(config), *_one_node(config), *_together(config), *_room(config)]


def _elastic(config: Config) -> list[str]:
    generators = config.generators
    problems = []
    if generators.fewest > generators.replicas:
        problems.append(
            f"generators.min: found {generators.min} with generators.replicas {generators.replicas}, which a "
            f"run starts with; expected at most {generators.replicas}"
        )
    if generators.most < generators.replicas:
        problems.append(
            f"generators.max: found {generators.max} with generators.replicas {generators.replicas}, which a "
            f"run starts with; expected at least {generators.replicas}"
        )
    if generators.most > generators.replicas and config.placement.mode == "colocated":
        problems.append(
            f"generators.max: found {generators.max} with generators.replicas {generators.replicas} and "
            "placement.mode colocated, where each is in the process of a learner rank and none can join; "
            f"expected {generators.replicas} or null, or placement.mode split"
        )
    elif generators.most > generators.replicas and config.placement.address is None:
        problems.append(
            f"generators.max: found {generators.max} with generators.replicas {generators.replicas} and "
            "placement.address null, where the run has one machine and no node ever joins; expected "
            f"{generators.replicas} or null, or the address of a cluster"
        )
    return problems


def _one_node(config: Config) -> list[str]:
    """Without a cluster there is this machine alone."""
    placement = config.placement
    if placement.address is not None:
        return []
    problems = []
    if placement.nodes is not None and placement.nodes > 1:
        problems.append(
            f"placement.nodes: found {placement.nodes} with placement.address null, where there is 1 node, "
            "this machine; expected 1 or null, or the address of a cluster"
        )
    for side in ("learner", "generators"):
        section = getattr(placement, side)
        if section != type(section)():
            problems.append(
                f"placement.{side}: found {section.model_dump(exclude_defaults=True)} with placement.address "
                "null, where everything is on this machine; expected the address of a cluster, or null"
            )
    return problems


def _together(config: Config) -> list[str]:
    generators = config.placement.generators
    if config.placement.mode != "colocated" or generators == type(generators)():
        return []
    return [
        f"placement.generators: found {generators.model_dump(exclude_defaults=True)} with placement.mode "
        "colocated, where generators are where the learner's ranks are; expected it under placement.learner"
    ]


def _room(config: Config) -> list[str]:
    """More nodes by name than the run may take, or fewer than a strategy takes."""
    placement = config.placement
    problems = []
    for side, key, count in (
        ("learner", "learner.ranks", config.learner.ranks),
        ("generators", "generators.replicas", config.generators.replicas),
    ):
        section = getattr(placement, side)
        limits = {
            "placement.nodes": placement.nodes,
            f"placement.{side}.nodes": section.nodes and len(section.nodes),
        }
        for limit, nodes in limits.items():
            if nodes is not None and section.strategy == "STRICT_SPREAD" and count > nodes:
                problems.append(
                    f"placement.{side}.strategy: found STRICT_SPREAD, a node for each of {key} {count}, with "
                    f"{nodes} in {limit}; expected at least {count} nodes, or SPREAD"
                )
    named = {name for side in (placement.learner, placement.generators) for name in side.nodes or ()}
    if placement.nodes is not None and len(named) > placement.nodes:
        problems.append(
            f"placement.nodes: found {placement.nodes}, and {len(named)} different nodes by name "
            f"({', '.join(sorted(named))}); expected at least {len(named)}"
        )
    return problems
