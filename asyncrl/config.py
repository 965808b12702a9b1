"""The typed config: every key, its unit, its bounds.

Invariants:
- Imports no torch, ray, vllm or deepspeed, so that ``--help`` and config errors are instant.
- A config object that exists has passed every bound and every cross-field check.
- Relative paths are meant from the folder that the command was started in.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from asyncrl.config_checks import contradictions
from asyncrl.sections.algorithm import AlgorithmSection, ScheduleSection
from asyncrl.sections.base import Dtype, Section, Strategy, refuse
from asyncrl.sections.data import DataSection, SourceSection
from asyncrl.sections.generators import GeneratorsSection
from asyncrl.sections.learner import EngineSection, LearnerSection, LoraSection
from asyncrl.sections.model import CreateSection, ModelSection, WarmStartSection
from asyncrl.sections.placement import PlacementSection, SidePlacementSection, WeightSyncSection
from asyncrl.sections.rewards import EnvironmentSection, RewardFunctionSection, RewardSection, ServeSection
from asyncrl.sections.roles import CriticSection, ReferenceSection, RewardModelSection, RoleSection
from asyncrl.sections.rollout import EvalSection, RolloutSection
from asyncrl.sections.run import CheckpointSection, LogSection, RunSection

__all__ = [
    "ENVIRONMENT",
    "REWARD_MODEL",
    "AlgorithmSection",
    "CheckpointSection",
    "Config",
    "CreateSection",
    "CriticSection",
    "DataSection",
    "Dtype",
    "EngineSection",
    "EnvironmentSection",
    "EvalSection",
    "GeneratorsSection",
    "LearnerSection",
    "LogSection",
    "LoraSection",
    "ModelSection",
    "PlacementSection",
    "ReferenceSection",
    "RewardFunctionSection",
    "RewardModelSection",
    "RewardSection",
    "RoleSection",
    "RolloutSection",
    "RunSection",
    "ScheduleSection",
    "Section",
    "ServeSection",
    "SidePlacementSection",
    "SourceSection",
    "Strategy",
    "WarmStartSection",
    "WeightSyncSection",
]

REWARD_MODEL = "reward_model"
"""The reward model's name as a role, and as that of its score beside those of reward functions."""

ENVIRONMENT = "environment"
"""The name of an environment's own reward beside those of reward functions."""


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    """The run itself: its name, place, length and seed."""
    model: ModelSection
    """The policy that training starts from."""
    data: DataSection
    """Prompts, and how they are written."""
    rollout: RolloutSection = RolloutSection()
    """Sampling for training."""
    reward: RewardSection = RewardSection()
    """What a good answer is."""
    environment: EnvironmentSection | None = None
    """What the model acts in; null: it answers the prompt, once."""
    reward_model: RewardModelSection | None = None
    """A model that says so too, in actors of its own; null: none."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantage, loss, and the correction for stale data."""
    eval: EvalSection = EvalSection()
    """Measurements on held-out prompts."""
    schedule: ScheduleSection = ScheduleSection()
    """How far rollouts and updates overlap, and how old data may be."""
    generators: GeneratorsSection = GeneratorsSection()
    """The engines that sample."""
    learner: LearnerSection = LearnerSection()
    """The ranks that update."""
    reference: ReferenceSection = ReferenceSection()
    """The reference policy, where ``algorithm`` needs one, in actors of its own or in the learner."""
    critic: CriticSection = CriticSection()
    """The value model, where ``algorithm`` needs one: trained, in actors of its own."""
    weight_sync: WeightSyncSection = WeightSyncSection()
    """How weights travel from the learner to the generators."""
    placement: PlacementSection = PlacementSection()
    """What runs where."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept to go on from after an interruption."""
    log: LogSection = LogSection()
    """What is written and shown."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(contradictions(self))
        return self

    @property
    def has_critic(self) -> bool:
        """Whether the run has a critic."""
        return self.algorithm.advantage == "gae" and not self.algorithm.learns_from_pairs

    @property
    def roles(self) -> dict[str, RoleSection | CriticSection]:
        """The roles in actors of their own that this run has, by name."""
        roles: dict[str, RoleSection | CriticSection] = {}
        if self.algorithm.needs_reference and self.reference.place == "actors":
            roles["reference"] = self.reference
        if self.has_critic:
            roles["critic"] = self.critic
        if self.reward_model is not None:
            roles[REWARD_MODEL] = self.reward_model
        return roles

    @property
    def max_sequence_tokens(self) -> int:
        """Longest training sequence, prompt and answer, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def length_norm(self) -> float:
        """What ``seq-mean-token-sum-norm`` divides by, in tokens."""
        return self.algorithm.length_norm or float(self.rollout.max_new_tokens)

    @property
    def overlong_buffer(self) -> int:
        """Length of the buffer of ``algorithm.overlong_buffer``, in tokens; 0: none."""
        share = self.algorithm.overlong_buffer
        return max(round(share * self.rollout.max_new_tokens), 1) if share else 0

    @property
    def max_eval_tokens(self) -> int:
        """Longest sequence of an evaluation, in tokens."""
        return self.data.max_prompt_tokens + (self.eval.max_new_tokens or self.rollout.max_new_tokens)
