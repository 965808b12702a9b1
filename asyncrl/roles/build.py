"""From the config to the roles of a run, as the controller gets them; nothing runs yet."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.hub import model_place
from asyncrl.roles.actor import RayRoleMember
from asyncrl.roles.base import Role, RoleWorker
from asyncrl.roles.group import RoleGroup

if TYPE_CHECKING:
    from asyncrl.placement import Placement
    from asyncrl.roles.reference import ReferenceSettings, Wanted


def build_roles(config: Config, model_path: str, placement: Placement) -> list[Role]:
    """The roles that ``config`` asks for. ``model_path`` is where the start model is."""
    return [_reference(config, model_path, placement)] if "reference" in config.roles else []


def _reference(config: Config, model_path: str, placement: Placement) -> Role:
    from asyncrl.placement import deal_cores

    section = config.reference
    cores = deal_cores(section.cpu_cores, section.replicas)
    names = {f"reference {i}": cores[i] for i in range(section.replicas)}
    settings = reference_settings(config, model_path)

    def member(name: str) -> RayRoleMember:
        return RayRoleMember(
            name,
            "reference",
            partial(build_reference, settings),
            cores=names[name],
            gpus=placement.role_gpus["reference"],
            start_timeout_s=section.start_timeout_s,
        )

    return RoleGroup(
        "reference",
        [member(name) for name in names],
        restart=member,
        timeout_s=section.timeout_s,
        setting="reference.timeout_s",
    )


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
