"""What cannot be meant of adapters: ``learner.lora`` and the keys that build on it.

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
    """Keys that need adapters where there are none, or that cannot be met beside others."""
    return [*_base_of_lora(config), *_adapter_only(config)]


def _base_of_lora(config: Config) -> list[str]:
    """The reference is the frozen part of the learner's model: what needs another, or needs it elsewhere."""
    reference = config.reference
    if not reference.base_of_lora:
        return []
    problems = []
    if config.learner.lora is None:
        problems.append(
            "reference.base_of_lora: found true with learner.lora null, where all weights are trained; "
            "expected learner.lora to be set, or base_of_lora false"
        )
    if reference.path is not None:
        problems.append(
            f"reference.base_of_lora: found true with reference.path {reference.path!r}; expected path null, "
            "because the base is the model that training starts from, or base_of_lora false"
        )
    if reference.dtype not in (None, config.model.dtype):
        problems.append(
            f"reference.base_of_lora: found true with reference.dtype {reference.dtype!r}; expected null or "
            f"model.dtype = {config.model.dtype!r}, in which the base is held, or base_of_lora false"
        )
    if reference.refresh_every:
        problems.append(
            "reference.base_of_lora: found true with reference.refresh_every "
            f"{reference.refresh_every}, but the base never moves; expected refresh_every 0, or "
            "base_of_lora false"
        )
    if config.algorithm.kl == "reward":
        problems.append(
            "reference.base_of_lora: found true with algorithm.kl 'reward', where rewards need the KL as a "
            "group lands and the learner knows it only when it trains; expected algorithm.kl loss, or "
            "base_of_lora false"
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
