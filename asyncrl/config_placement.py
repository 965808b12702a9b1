"""What ``placement.mode: colocated`` cannot be combined with.

One process holds a generator and a learner rank, and in it the parameters of both. So there are as many of
one as of the other, whole weights in each, and one setting for what a process has once.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def placement_contradictions(config: Config) -> list[str]:
    """Every key that the placement does not allow."""
    if config.placement.mode != "colocated":
        return []
    if config.generators.backend != "torch":
        return [
            f"placement.mode: found 'colocated' with generators.backend {config.generators.backend!r}; "
            "expected generators.backend torch, which can compute with the learner's parameters, or "
            "placement.mode split"
        ]
    return [*_counts(config), *_weights(config), *_process(config), *_schedule(config)]


def _counts(config: Config) -> list[str]:
    replicas, ranks = config.generators.replicas, config.learner.ranks
    if replicas == ranks:
        return []
    return [
        f"generators.replicas: found {replicas} with learner.ranks {ranks} and placement.mode colocated; "
        "expected equal numbers, because each process holds one of both: set generators.replicas and "
        f"learner.ranks to {max(replicas, ranks)}, or placement.mode to split"
    ]


def _weights(config: Config) -> list[str]:
    """Whole weights in one place, of which no copy is ever sent to generators."""
    problems = []
    learner, sync = config.learner, config.weight_sync
    if learner.backend == "fsdp2":
        problems.append(
            "learner.backend: found 'fsdp2' with placement.mode colocated; expected deepspeed, because "
            "generators compute with the ranks' own parameters, of which each holds a part alone with FSDP2: "
            "set learner.backend to deepspeed, or placement.mode to split"
        )
    elif learner.zero_stage > 2:
        problems.append(
            f"learner.zero_stage: found {learner.zero_stage} with placement.mode colocated; expected at most "
            "2, because generators compute with the ranks' own parameters, of which a rank holds only a part "
            "with ZeRO 3: lower zero_stage, or set placement.mode to split"
        )
    elif learner.zero_stage < 2 and config.model.dtype == "bfloat16":
        problems.append(
            f"learner.zero_stage: found {learner.zero_stage} with model.dtype bfloat16 and placement.mode "
            "colocated; expected 2, because below it DeepSpeed keeps gradients in float32, twice the size of "
            "the weights, while generators have their turn"
        )
    if learner.lora is not None:
        problems.append(
            "learner.lora: found it set with placement.mode colocated, where generators compute with the "
            "weights that lie in the learner, but adapters are merged only into what is sent; expected null, "
            "or placement.mode split"
        )
    if sync.overlap:
        problems.append(
            "weight_sync.overlap: found true with placement.mode colocated, where no weights are sent to "
            "generators; expected false"
        )
    return problems


def _process(config: Config) -> list[str]:
    """What one process has once, and the two sections both say."""
    generators, learner = config.generators, config.learner
    problems = [
        f"generators.{key}: found {ours!r} with learner.{key} {theirs!r} and placement.mode colocated; "
        "expected the same, because one process is both"
        for key, ours, theirs in (
            ("threads", generators.threads, learner.threads),
            ("cpu_cores", generators.cpu_cores, learner.cpu_cores),
        )
        if ours != theirs
    ]
    if generators.device not in ("auto", learner.device):
        problems.append(
            f"generators.device: found {generators.device!r} with learner.device {learner.device!r} and "
            "placement.mode colocated; expected auto or the learner's, where the parameters lie"
        )
    return problems


def _schedule(config: Config) -> list[str]:
    """Weights change in place, so that no version can be held back, and no keys and values outlive a turn."""
    schedule = config.schedule
    problems = []
    if schedule.publish_every != 1:
        problems.append(
            f"schedule.publish_every: found {schedule.publish_every} with placement.mode colocated; expected "
            "1, because an update changes the very weights that generators have: no version can be held back"
        )
    if schedule.pipeline_depth == 0:
        return problems
    depth = f"schedule.pipeline_depth {schedule.pipeline_depth} and placement.mode colocated"
    if schedule.kv_after_swap != "recompute":
        problems.append(
            f"schedule.kv_after_swap: found {schedule.kv_after_swap!r} with {depth}, where unfinished "
            "answers are carried over an update, during which their keys and values are freed; expected "
            "recompute, or pipeline_depth 0, which carries none over"
        )
    if not schedule.in_flight_updates:
        problems.append(
            f"schedule.in_flight_updates: found false with {depth}, where unfinished answers go on under the "
            "next version; expected true, or pipeline_depth 0, which leaves none unfinished"
        )
    return problems
