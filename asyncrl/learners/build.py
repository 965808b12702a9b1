"""From the config to one rank of the learner or the critic, inside the rank's process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.learners.base import LearnerRank

if TYPE_CHECKING:
    from asyncrl.learners.critic import CriticRank


def build_rank(config: Config, model_path: str, rank: int, host: str, port: int, folder: Path) -> LearnerRank:
    """A rank that is ready to ``start``; rank 0 listens on ``host`` and ``port``.

    Users' own functions are looked up from ``folder``.
    """
    from asyncrl.learners.policy_rank import PolicyRank

    return PolicyRank(
        model=config.model,
        learner=config.learner,
        algorithm=config.algorithm,
        model_path=model_path,
        temperature=config.rollout.temperature,
        max_staleness=config.schedule.max_staleness,
        mask_stale=config.schedule.at_bound == "mask",
        total_steps=config.run.steps,
        rank=rank,
        world_size=config.learner.ranks,
        master=(host, port),
        deterministic=config.run.deterministic,
        length_norm=config.length_norm,
        folder=folder,
        reference=config.reference,
        push_adapters=config.weight_sync.adapter_only,
    )


def build_critic(config: Config, model_path: str, rank: int, host: str, port: int) -> CriticRank:
    """A critic's rank that is ready to ``start``; rank 0 listens on ``host`` and ``port``."""
    from asyncrl.learners.critic import CriticRank

    return CriticRank(
        model=config.model,
        critic=config.critic,
        algorithm=config.algorithm,
        model_path=model_path,
        max_staleness=config.schedule.max_staleness,
        mask_stale=config.schedule.at_bound == "mask",
        rank=rank,
        world_size=config.critic.ranks,
        master=(host, port),
        deterministic=config.run.deterministic,
        length_norm=config.length_norm,
    )
