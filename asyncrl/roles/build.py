"""From the config to the reference and the reward model of a run, as the controller gets them; nothing
runs yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from asyncrl.config import REWARD_MODEL, Config, RoleSection
from asyncrl.hub import model_place
from asyncrl.roles.actor import BuildWorker, RayRoleMember
from asyncrl.roles.base import RoleWorker, ScoringMember, ScoringWorker
from asyncrl.roles.group import MemberGroup, RoleGroup
from asyncrl.roles.moving import MovingReference
from asyncrl.roles.reward_group import RewardModelGroup
from asyncrl.weight_sync.refresh import ReferencePush

if TYPE_CHECKING:
    from asyncrl.learners.base import Learner
    from asyncrl.placement import Placement
    from asyncrl.roles.reference import ReferenceSettings, Wanted
    from asyncrl.roles.reward_model import RewardModelSettings


def build_reference_role(
    config: Config, model_path: str, placement: Placement, learner: Learner
) -> RoleGroup | MovingReference | None:
    """The reference that ``config`` asks for, which follows what ``learner`` trains where it has to.

    ``model_path`` is where the start model is.
    """
    if "reference" not in config.roles:
        return None
    section, sync = config.reference, config.weight_sync
    group = _members(config, model_path, placement)
    if section.refresh_every == 0:
        return group
    on_gpus = placement.push_backend == "nccl" and placement.role_gpus["reference"] > 0
    backend: Literal["gloo", "nccl"] = "nccl" if on_gpus and sync.backend != "gloo" else "gloo"
    push = ReferencePush(learner, backend=backend, bucket_bytes=sync.bucket_bytes, timeout_s=sync.timeout_s)
    return MovingReference(
        group,
        push,
        every=section.refresh_every,
        ema=section.ema,
        deterministic=config.run.deterministic,
    )


def build_reward_model(config: Config, model_path: str, placement: Placement) -> RewardModelGroup | None:
    """The reward model that ``config`` asks for. ``model_path`` is where the policy's tokenizer is."""
    section = config.reward_model
    if section is None:
        return None
    settings = reward_model_settings(config, model_path)
    make = _maker(REWARD_MODEL, section, partial(make_reward_model, settings), placement)
    group: MemberGroup[ScoringMember] = MemberGroup(
        REWARD_MODEL,
        [make(name) for name in _names(REWARD_MODEL, section)],
        restart=make,
        timeout_s=section.timeout_s,
        setting="reward_model.timeout_s",
    )
    return RewardModelGroup(
        group,
        weight=section.weight,
        # One group a call, whatever else is waiting: the bits of a score depend on its batch.
        call_tokens=0 if config.run.deterministic else settings.micro_batch_tokens,
    )


def _members(config: Config, model_path: str, placement: Placement) -> RoleGroup:
    section = config.reference
    settings = reference_settings(config, model_path)
    make = _maker("reference", section, partial(build_reference, settings), placement)
    return RoleGroup(
        "reference",
        [make(name) for name in _names("reference", section)],
        restart=make,
        timeout_s=section.timeout_s,
        setting="reference.timeout_s",
    )


def _names(role: str, section: RoleSection) -> list[str]:
    return [f"{role} {i}" for i in range(section.replicas)]


def _maker(
    role: str, section: RoleSection, build: BuildWorker, placement: Placement
) -> Callable[[str], RayRoleMember]:
    """What makes an actor of ``role``, given one of its names."""
    from asyncrl.placement import deal_cores

    cores = dict(zip(_names(role, section), deal_cores(section.cpu_cores, section.replicas), strict=True))

    def make(name: str) -> RayRoleMember:
        return RayRoleMember(
            name,
            role,
            build,
            cores=cores[name],
            gpus=placement.role_gpus[role],
            start_timeout_s=section.start_timeout_s,
        )

    return make


def reference_settings(config: Config, model_path: str) -> ReferenceSettings:
    """What the reference of this run computes, and with what."""
    from asyncrl.roles.reference import ReferenceSettings

    section, algorithm = config.reference, config.algorithm
    wanted: Wanted = "reference"
    if algorithm.kl == "reward":
        wanted = "token_penalty" if algorithm.penalises_tokens else "penalty"
    return ReferenceSettings(
        path=model_path if section.path is None else model_place(section.path),
        dtype=section.dtype or config.model.dtype,
        device=section.device,
        threads=section.threads,
        temperature=config.rollout.temperature,
        micro_batch_tokens=section.micro_batch_tokens or config.learner.micro_batch_tokens,
        wanted=wanted,
        kl_form=algorithm.kl_form,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_reference(settings: ReferenceSettings) -> RoleWorker:
    """In the actor's process, which alone imports torch and the model's library."""
    from asyncrl.roles.reference import ReferencePolicy

    return ReferencePolicy(settings)


def reward_model_settings(config: Config, model_path: str) -> RewardModelSettings:
    """What the reward model of this run is, and what it reads."""
    from asyncrl.roles.reward_model import RewardModelSettings

    section = config.reward_model
    assert section is not None, "only asked of a run that has one"
    return RewardModelSettings(
        path=model_place(section.path),
        policy_path=model_path,
        data=config.data,
        template=section.template,
        dtype=section.dtype or config.model.dtype,
        device=section.device,
        threads=section.threads,
        micro_batch_tokens=section.micro_batch_tokens or config.learner.micro_batch_tokens,
        max_tokens=section.max_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_reward_model(settings: RewardModelSettings) -> ScoringWorker:
    """In the actor's process, which alone imports torch and the model's library."""
    from asyncrl.roles.reward_model import RewardModel

    return RewardModel(settings)
