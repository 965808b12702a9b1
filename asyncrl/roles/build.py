"""From the config to the reference of a run, as the controller gets it; nothing runs yet."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from asyncrl.config import Config
from asyncrl.hub import model_place
from asyncrl.roles.actor import RayRoleMember
from asyncrl.roles.base import RoleWorker
from asyncrl.roles.group import RoleGroup
from asyncrl.roles.moving import MovingReference
from asyncrl.weight_sync.refresh import ReferencePush

if TYPE_CHECKING:
    from asyncrl.learners.base import Learner
    from asyncrl.placement import Placement
    from asyncrl.roles.reference import ReferenceSettings, Wanted


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


def _members(config: Config, model_path: str, placement: Placement) -> RoleGroup:
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
