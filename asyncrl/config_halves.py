"""One half of a run alone: what it cannot be combined with, and the settings that it goes by.

Invariants:
- What a half alone has no use for is switched off here, so that nobody further on has to ask.
- What decides which groups there are (data, rollout, reward, seed) is left as it is.

Findings are text, as in ``config_checks``: the key to change, what was found, what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config import Config

_NOBODY_SAMPLES: dict[str, dict[str, Any]] = {
    "schedule": {"pipeline_depth": 0, "publish_every": 1},
    "generators": {"backend": "torch", "vllm": {}, "replicas": 1, "min": None, "max": None},
    "weight_sync": {"backend": "auto", "overlap": False, "adapter_only": False, "canary_every": 0},
    "eval": {"every": 0},
}
_NOBODY_TRAINS: dict[str, dict[str, Any]] = {
    "algorithm": {"kl": "none", "kl_target": None},
    "reference": {"refresh_every": 0, "ema": None},
    "weight_sync": {"backend": "auto", "overlap": False, "adapter_only": False, "canary_every": 0},
    "checkpoint": {"hf": "never", "keep_best": False},
    "log": {"rollouts_every": 1},
}


def half_contradictions(config: Config) -> list[str]:
    """Every key that the half which is asked for does not allow."""
    run = config.run
    key = "run.rollout_only" if run.rollout_only else "run.replay"
    if not run.rollout_only and run.replay is None:
        return []
    problems = []
    if run.rollout_only and run.replay is not None:
        problems.append(
            f"run.replay: found {run.replay!r} with run.rollout_only true; expected one of them: a run "
            "without generators and without a learner has nothing to do"
        )
    if config.placement.mode == "colocated":
        problems.append(
            f"placement.mode: found 'colocated' with {key}; expected split, because the two sides of a "
            "colocated run share their processes"
        )
    if config.checkpoint.resume not in ("auto", "never"):
        problems.append(
            f"checkpoint.resume: found {config.checkpoint.resume!r} with {key}; expected auto or never. To "
            "start from a checkpoint's policy, write it with 'asyncrl export', and set model.path to that"
        )
    return problems


def absent_parts(config: Config) -> tuple[str, ...]:
    """What the names of actors begin with that are not there; () for a whole run."""
    if config.run.rollout_only:
        return "learner", "critic", "reference"
    return () if config.run.replay is None else ("generator", "reward_model")


def half_of(config: Config) -> Config:
    """The config that the half which ``config`` asks for goes by; ``config`` itself for a whole run."""
    from asyncrl.config_load import parse_config

    if not config.run.rollout_only and config.run.replay is None:
        return config
    changes = _NOBODY_TRAINS if config.run.rollout_only else _NOBODY_SAMPLES
    values = config.model_dump(mode="json")
    for section, own in changes.items():
        values[section] = {**values[section], **own}
    if config.run.replay is not None and config.schedule.at_bound == "drop":
        values["schedule"]["at_bound"] = "wait"  # everything is there: nothing is ever waited for
    return parse_config(values, name="the config of one half")
