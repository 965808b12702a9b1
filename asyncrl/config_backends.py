"""What ``backend: fsdp2`` cannot do, in ``learner`` and in ``critic``.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config


def backend_contradictions(config: Config) -> list[str]:
    """Every key that an engine on FSDP2 does not allow."""
    problems = []
    sections = [("learner", config.learner), *([("critic", config.critic)] if config.has_critic else [])]
    for name, section in sections:
        if section.backend == "fsdp2" and section.zero_stage < 2:
            problems.append(
                f"{name}.zero_stage: found {section.zero_stage} with {name}.backend fsdp2, which shares out "
                f"gradients and parameters in any case; expected 2 or 3, or {name}.backend deepspeed"
            )
    learner = config.learner
    if learner.backend == "fsdp2" and learner.lora is not None:
        problems.append(
            "learner.lora: found it set with learner.backend fsdp2, which trains all weights; expected null, "
            "or learner.backend deepspeed"
        )
    for key in ("sequence_parallel", "tensor_parallel"):
        size = getattr(learner, key)
        if learner.backend == "fsdp2" and size > 1:
            problems.append(
                f"learner.{key}: found {size} with learner.backend fsdp2, whose ranks have samples of their "
                "own; expected 1, or learner.backend deepspeed"
            )
    return problems
