"""What ``placement.mode: colocated`` cannot be combined with.

With the torch engine one process holds a generator and a learner rank, and in it the parameters of both. So
there are as many of one as of the other, whole weights in each, and one setting for what a process has once.
With vLLM the two are processes of their own, each with its weights, on one device: the learner has to be able
to leave it, and what crosses between them crosses on that device.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config_cluster import cluster_contradictions
from asyncrl.weight_sync.base import BESIDE, HAS_SHM

if TYPE_CHECKING:
    from asyncrl.config import Config


def placement_contradictions(config: Config) -> list[str]:
    """Every key that the placement does not allow."""
    return [*cluster_contradictions(config), *_sides(config)]


def _sides(config: Config) -> list[str]:
    if config.placement.mode == "split" or config.generators.backend == "torch":
        problems = _no_handover(config)
        if config.placement.mode == "colocated":
            problems += [*_counts(config), *_weights(config), *_process(config), *_schedule(config)]
        return problems
    return [
        *_counts(config),
        *_leaving(config),
        *_device(config),
        *_handover(config),
        *_outside(config),
        *_schedule(config),
    ]


def _counts(config: Config) -> list[str]:
    replicas, ranks = config.generators.replicas, config.learner.ranks
    if replicas == ranks:
        return []
    shared = "process" if config.generators.backend == "torch" else "device"
    return [
        f"generators.replicas: found {replicas} with learner.ranks {ranks} and placement.mode colocated; "
        f"expected equal numbers, because each {shared} holds one of both: set generators.replicas and "
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
    problems = _device(config)
    if generators.threads != learner.threads:
        problems.append(
            f"generators.threads: found {generators.threads} with learner.threads {learner.threads} and "
            "placement.mode colocated; expected the same, because one process is both"
        )
    return problems


def _device(config: Config) -> list[str]:
    """What one device has once."""
    generators, learner = config.generators, config.learner
    problems = []
    if generators.cpu_cores != learner.cpu_cores:
        problems.append(
            f"generators.cpu_cores: found {generators.cpu_cores} with learner.cpu_cores {learner.cpu_cores} "
            "and placement.mode colocated; expected the same, because the two take turns on them"
        )
    if generators.device not in ("auto", learner.device):
        problems.append(
            f"generators.device: found {generators.device!r} with learner.device {learner.device!r} and "
            "placement.mode colocated; expected auto or the learner's, where the parameters lie"
        )
    return problems


def _leaving(config: Config) -> list[str]:
    """What keeps one of two processes from leaving the device to the other."""
    learner, workers = config.learner, config.generators.workers
    problems = []
    if learner.backend == "fsdp2" and learner.device != "cpu":
        problems.append(
            f"learner.backend: found 'fsdp2' with learner.device {learner.device!r}, placement.mode "
            "colocated and generators.backend 'vllm'; expected deepspeed, which can move all of a learner's "
            "state off a GPU while the generators have it, or learner.device cpu"
        )
    elif learner.zero_stage != 2 and learner.device != "cpu":
        problems.append(
            f"learner.zero_stage: found {learner.zero_stage} with learner.device {learner.device!r}, "
            "placement.mode colocated and generators.backend 'vllm'; expected 2, with which DeepSpeed can "
            "move all of a learner's state off a GPU while the generators have it, or learner.device cpu"
        )
    if workers > 1:
        problems.append(
            f"generators.vllm.tensor_parallel_size: found {workers} with "
            "placement.mode colocated; expected 1, because a replica shares the one device of its learner "
            "rank: set it to 1, or placement.mode to split"
        )
    return problems


def _handover(config: Config) -> list[str]:
    """How weights cannot get from one process to another on the same device."""
    sync, learner = config.weight_sync, config.learner
    problems = []
    if sync.overlap:
        problems.append(
            "weight_sync.overlap: found true with placement.mode colocated, where no generator works while "
            "the learner trains; expected false"
        )
    why = None
    if sync.backend == "nccl":
        why = "nccl does not connect two processes on one GPU"
    elif sync.backend == "ipc" and learner.device == "cpu":
        why = "ipc passes on memory of GPUs, and learner.device is cpu"
    elif sync.backend == "shm" and learner.device == "cuda":
        why = "shm passes on memory of CPUs, and learner.device is cuda"
    elif sync.backend == "shm" and not HAS_SHM:
        why = "shm needs Linux"
    if why is not None:
        problems.append(
            f"weight_sync.backend: found {sync.backend!r} with placement.mode colocated and "
            f"generators.backend 'vllm'; expected auto, because {why}"
        )
    return problems


def _outside(config: Config) -> list[str]:
    """Who would ask the learner for weights while it is off the device."""
    reference = config.reference
    follows = "reference" in config.roles and reference.refresh_every > 0
    if not follows:
        return []
    return [
        f"reference.refresh_every: found {reference.refresh_every} with reference.place 'actors', "
        "placement.mode colocated and generators.backend 'vllm', where an actor that died could not get its "
        "weights back while generators have their turn; expected 0, or reference.place learner"
    ]


def _no_handover(config: Config) -> list[str]:
    """Two processes on one device are what colocated vLLM has, and nothing else."""
    backend = config.weight_sync.backend
    if backend not in BESIDE:
        return []
    return [
        f"weight_sync.backend: found {backend!r} with placement.mode {config.placement.mode!r} and "
        f"generators.backend {config.generators.backend!r}; expected auto, nccl or gloo, because it hands "
        "weights over between two processes on one device, as placement.mode colocated with "
        "generators.backend vllm has them"
    ]


def _schedule(config: Config) -> list[str]:
    """No version can be held back, and no keys and values outlive a turn."""
    schedule = config.schedule
    problems = []
    if schedule.publish_every != 1:
        why = "generators give their weights up in the learner's turn, which has none but the newest"
        if config.generators.backend == "torch":
            why = "an update changes the very weights that generators have"
        problems.append(
            f"schedule.publish_every: found {schedule.publish_every} with placement.mode colocated; expected "
            f"1, because {why}: no version can be held back"
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
