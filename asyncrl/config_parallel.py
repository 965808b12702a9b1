"""What work that is shared out over ranks cannot be combined with, and the heads that it has to divide.

Each rank computes some of the heads: with sequence parallelism in attention alone, with tensor parallelism
everywhere. So their number divides evenly, or the run is refused before any actor starts.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a model's attention, as ``source`` says."""

    source: str
    attention: int
    kv: int
    """Of keys and values."""


def parallel_contradictions(config: Config) -> list[str]:
    """Every key that the learner's parallelism does not allow, and the heads of a model that is made."""
    problems = [] if config.learner.shared == 1 else [*_ranks(config), *_together(config)]
    create = config.model.create
    if create is not None:
        problems += head_problems(config, Heads("model.create", create.heads, create.kv_heads))
    return problems


def head_problems(config: Config, heads: Heads) -> list[str]:
    """The sizes of parallelism, of learner and generators, that do not divide the policy's heads."""
    learner, generators = config.learner, config.generators
    problems = []
    for key, size in (
        ("learner.sequence_parallel", learner.sequence_parallel),
        ("learner.tensor_parallel", learner.tensor_parallel),
    ):
        for count, what in ((heads.attention, "attention heads"), (heads.kv, "key-value heads")):
            if count % size:
                problems.append(_undivided(key, size, count, what, heads.source))
                break
    key, size = "generators.vllm.tensor_parallel_size", generators.vllm.get("tensor_parallel_size", 1)
    if generators.backend != "vllm" or not isinstance(size, int) or size < 1:
        return problems  # said elsewhere
    if heads.attention % size:
        problems.append(_undivided(key, size, heads.attention, "attention heads", heads.source))
    elif heads.kv % size and size % heads.kv:
        problems.append(
            f"{key}: found {size}; expected a divisor or a multiple of the {heads.kv} key-value heads of "
            f"{heads.source}, because vLLM gives each of its workers whole ones"
        )
    return problems


def _undivided(key: str, size: int, count: int, what: str, source: str) -> str:
    sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    return f"{key}: found {size}; expected a divisor of the {count} {what} of {source}: one of {sizes}"


def _ranks(config: Config) -> list[str]:
    learner = config.learner
    if learner.ranks % learner.shared == 0:
        return []
    name, size = _parallelism(config)
    more = -(-learner.ranks // size) * size
    return [
        f"learner.ranks: found {learner.ranks} with {name} {size}; expected a multiple of {size}, because "
        f"each sample is trained by {size} ranks together: {more} is the next one"
    ]


def _together(config: Config) -> list[str]:
    learner = config.learner
    if learner.sequence_parallel > 1 and learner.tensor_parallel > 1:
        return [
            f"learner.tensor_parallel: found {learner.tensor_parallel} with learner.sequence_parallel "
            f"{learner.sequence_parallel}; expected one of them to be 1: together they were never run"
        ]
    name, size = _parallelism(config)
    problems = []
    if config.placement.mode == "colocated":
        problems.append(
            f"{name}: found {size} with placement.mode colocated, where generators compute with the whole "
            "model of each rank; expected 1, or placement.mode split"
        )
    problems += _sequences(config) if learner.sequence_parallel > 1 else _layers(config)
    return problems


def _layers(config: Config) -> list[str]:
    learner, problems = config.learner, []
    name = f"learner.tensor_parallel {learner.tensor_parallel}"
    if learner.zero_stage == 3:
        problems.append(
            f"learner.zero_stage: found 3 with {name}; expected at most 2: what leaves the learner would "
            "have to be put together from parts of parts. ZeRO 3 alone divides parameters too"
        )
    if learner.lora is not None:
        problems.append(
            f"learner.lora: found it set with {name}, which replaces the layers that adapters stand beside; "
            "expected null, or tensor_parallel 1"
        )
    if config.weight_sync.overlap:
        problems.append(
            f"weight_sync.overlap: found true with {name}, where no rank has whole tensors, or runs of them, "
            "to copy out; expected false"
        )
    if config.reference.place == "learner" and config.reference.refresh_every:
        problems.append(
            f"reference.refresh_every: found {config.reference.refresh_every} with reference.place learner "
            f"and {name}, of which no checkpoint is written; expected 0, or reference.place actors"
        )
    return problems


def _sequences(config: Config) -> list[str]:
    learner, problems = config.learner, []
    name = f"learner.sequence_parallel {learner.sequence_parallel}"
    problems += [
        f"learner.{key}: found true with {name}, whose attention takes no mask that would keep answers in a "
        "row apart; expected false, or sequence_parallel 1"
        for key in ("packing", "shared_prompts")
        if getattr(learner, key)
    ]
    if learner.attention not in ("auto", "sdpa"):
        problems.append(
            f"learner.attention: found {learner.attention!r} with {name}; expected auto or sdpa, which it "
            "was run with: others need a mask, or were never tried"
        )
    return problems


def _parallelism(config: Config) -> tuple[str, int]:
    """The key that shares the work out, and how many ranks it takes."""
    learner = config.learner
    if learner.sequence_parallel > 1:
        return "learner.sequence_parallel", learner.shared
    return "learner.tensor_parallel", learner.shared
