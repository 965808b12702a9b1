"""What ``algorithm.*`` may name, and the presets: known to the config, so nothing heavy is imported.

Tests hold the names here to the functions in the registries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADVANTAGE_NAMES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "remax",
)
LOSS_NAMES = ("ppo_clip", "gspo", "cispo", "gmpo", "sapo", "aipo", "topr", "dppo", "m2po")

PREFERENCE_NAMES = ("dpo", "ipo")
"""Losses of pairs of answers, the best and the worst of a group, by the reference's log-probs."""

KL_ESTIMATOR_NAMES = ("k1", "abs", "k2", "k3", "k1+", "k3+")
REWARDED_BY_TOKEN = frozenset({"reinforce_plus_plus", "gae"})
"""Advantages that see rewards token by token: a penalty for the KL is taken off where it arises."""

NEEDING_GREEDY = frozenset({"remax"})
"""Advantages whose baseline is a greedy answer to the prompt, one more that each group samples."""

COMPARING = frozenset(ADVANTAGE_NAMES) - {"reinforce_plus_plus", "gae", "remax"}
"""Advantages that compare the answers of a group, and so need two of them."""

CORRECTING = frozenset({"aipo", "topr", "dppo", "m2po"})
"""Losses that correct for stale data by themselves: their ratio is to the policy that sampled."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # DeepSeekMath, 2402.03300, with every token of the step weighing the same.
    "grpo": {},
    # Dr. GRPO, 2503.20783: neither the group's deviation nor an answer's length divides.
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm"},
    # DAPO, 2503.14476: clip-higher, dynamic sampling, token mean, soft penalty for overlong answers.
    "dapo": {
        "clip_high": 0.28,
        "clip_dual": 10.0,
        "filter_zero_variance": "refill",
        "overlong_buffer": 0.2,
    },
    # GSPO, 2507.18071: one ratio an answer.
    "gspo": {
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
    },
    # CISPO, MiniMax-M1, 2506.13585: the weight is clipped, and no token loses its gradient.
    "cispo": {"loss": "cispo", "clip_high": 0.28},
    # PPO, 1707.06347, with GAE, 1506.02438.
    "ppo": {"advantage": "gae"},
    # RLOO, 2402.14740.
    "rloo": {"advantage": "rloo"},
    # REINFORCE++, 2501.03262.
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus"},
}
"""What each preset sets beside the defaults of ``algorithm``, which are those of grpo."""


def is_path(name: str) -> bool:
    """Whether ``name`` is a user's own function: ``package.module:function``, ``file.py:function``."""
    return ":" in name or "." in name


def advantage_problem(name: str) -> str | None:
    """Why ``algorithm.advantage`` cannot be ``name``; None if it can."""
    return _unknown(name, ADVANTAGE_NAMES)


def loss_problem(name: str) -> str | None:
    """Why ``algorithm.loss`` cannot be ``name``; None if it can."""
    return _unknown(name, (*LOSS_NAMES, *PREFERENCE_NAMES))


def _unknown(name: str, known: tuple[str, ...]) -> str | None:
    return None if name in known or is_path(name) else f"found {name!r}; expected one of {_choices(known)}"


def _choices(known: tuple[str, ...]) -> str:
    return f"{', '.join(known)}, or a function of your own as package.module:function or file.py:function"
