"""What cannot be meant of adapters and of a reference in the learner: ``learner.lora``, ``reference.place``.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config import Config, LoraSection


def lora_problems(lora: LoraSection) -> list[str]:
    """Adapters that would make log-probs depend on chance, and layers named twice."""
    problems = []
    if lora.dropout != 0:
        problems.append(
            f"dropout: found {lora.dropout:g}; expected 0, because the same tokens have to get the same "
            "log-probs in learner, generators and reference"
        )
    if "all-linear" in lora.target_modules and len(lora.target_modules) > 1:
        problems.append(
            f"target_modules: found all-linear among {len(lora.target_modules)} names; expected it alone, or "
            "names of layers alone"
        )
    return problems


def adapter_contradictions(config: Config) -> list[str]:
    """Keys that need adapters where there are none, or none where there are, or that exclude each other."""
    return [*_reference_in_the_learner(config), *_adapter_only(config)]


def _reference_in_the_learner(config: Config) -> list[str]:
    """Without actors the reference is the learner's own model in another state: what that cannot be."""
    reference, place = config.reference, config.reference.place
    if place == "actors":
        return []
    found = f"reference.place: found {place!r} with"
    problems = []
    if place == "lora_base" and config.learner.lora is None:
        problems.append(
            f"{found} learner.lora null, where all weights are trained; expected learner.lora to be set, or "
            "place learner or actors"
        )
    if place == "learner" and config.learner.lora is not None:
        problems.append(
            f"{found} learner.lora set, where the start model is under the adapters already; expected place "
            "lora_base, or actors"
        )
    if reference.path is not None:
        problems.append(
            f"{found} reference.path {reference.path!r}; expected path null, because it is the model that "
            "training starts from, or place actors"
        )
    if reference.dtype not in (None, config.model.dtype):
        problems.append(
            f"{found} reference.dtype {reference.dtype!r}; expected null or model.dtype = "
            f"{config.model.dtype!r}, in which the learner computes, or place actors"
        )
    if place == "lora_base" and reference.refresh_every:
        problems.append(
            f"{found} reference.refresh_every {reference.refresh_every}, but the base never moves; expected "
            "refresh_every 0, or place actors"
        )
    if config.algorithm.kl == "reward":
        problems.append(
            f"{found} algorithm.kl 'reward', where rewards need the KL as a group lands and the learner "
            "knows it only when it trains; expected algorithm.kl loss, or place actors"
        )
    return problems


def _adapter_only(config: Config) -> list[str]:
    if not config.weight_sync.adapter_only:
        return []
    problems = []
    if config.learner.lora is None:
        problems.append(
            "weight_sync.adapter_only: found true with learner.lora null, where there are no adapters; "
            "expected learner.lora to be set, or adapter_only false"
        )
    if config.reference.refresh_every:
        problems.append(
            "weight_sync.adapter_only: found true with reference.refresh_every "
            f"{config.reference.refresh_every}, which sends whole weights; expected refresh_every 0, or "
            "adapter_only false"
        )
    if config.generators.backend != "torch":
        problems.append(
            f"weight_sync.adapter_only: found true with generators.backend {config.generators.backend!r}, "
            "which is sent whole weights; expected generators.backend torch, or adapter_only false"
        )
    return problems
