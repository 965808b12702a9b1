"""What the ``algorithm`` block cannot mean by itself.

Findings are text, as in ``config_checks``, from the section's own key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algorithms.names import CORRECTING, PREFERENCE_NAMES, PRESETS, advantage_problem, loss_problem

if TYPE_CHECKING:
    from asyncrl.config import AlgorithmSection


def algorithm_problems(algorithm: AlgorithmSection) -> list[str]:
    """Names that nothing bears, bounds in the wrong order, corrections that would be made twice."""
    problems = []
    for key, problem in (
        ("advantage", advantage_problem(algorithm.advantage)),
        ("loss", loss_problem(algorithm.loss)),
    ):
        if problem is not None:
            by_preset = PRESETS[algorithm.preset].get(key) == getattr(algorithm, key)
            source = f" (set by preset {algorithm.preset!r})" if by_preset else ""
            problems.append(f"{key}: {problem}{source}")
    for low, high, bounds in (
        ("icepop_low", "icepop_high", (algorithm.icepop_low, algorithm.icepop_high)),
        ("mask_low", "mask_high", (algorithm.mask_low, algorithm.mask_high)),
        ("reward_clip", "reward_clip", algorithm.reward_clip or (0.0, 1.0)),
    ):
        if bounds[0] >= bounds[1]:
            problems.append(f"{low}: found {bounds[0]:g}; expected less than {high} = {bounds[1]:g}")
    problems += _kl(algorithm)
    if algorithm.objectives == "normalised":
        for key, found, expected in (
            ("advantage", algorithm.advantage, "grpo"),
            ("reward_normalisation", algorithm.reward_normalisation, "none"),
        ):
            if found != expected:
                problems.append(
                    f"{key}: found {found!r} with objectives 'normalised', which normalises the rewards of "
                    f"each function within their group; expected {expected}, or objectives sum"
                )
        if algorithm.kl == "reward":
            problems.append(
                "kl: found 'reward' with objectives 'normalised', where no single reward pays it; "
                "expected loss or none, or objectives sum"
            )
    correction = algorithm.correction
    if algorithm.loss in PREFERENCE_NAMES:
        problems += _preferences(algorithm)
    elif algorithm.loss in CORRECTING and correction != "none":
        problems.append(
            f"correction: found {correction!r} with loss {algorithm.loss!r}, which corrects for stale data "
            "by itself; expected none"
        )
    elif algorithm.old_logprobs == "behaviour" and correction != "none":
        problems.append(
            f"correction: found {correction!r} with old_logprobs 'behaviour', which corrects twice: its "
            "ratio is to the behaviour policy already; expected correction none, or old_logprobs recompute"
        )
    return problems


def _kl(algorithm: AlgorithmSection) -> list[str]:
    problems = []
    if algorithm.kl == "loss" and algorithm.kl_form == "k1":
        problems.append(
            "kl_estimator: found 'k1' with kl 'loss', where its gradient has mean 0 and holds nothing; "
            "expected k1+, k2, k3 or k3+, or kl reward"
        )
    if algorithm.kl_target is not None and algorithm.kl == "none":
        problems.append(
            f"kl_target: found {algorithm.kl_target:g} with kl 'none'; expected kl loss or reward, or null"
        )
    elif algorithm.kl_target is not None and algorithm.kl_coef == 0:
        problems.append(
            f"kl_coef: found 0 with kl_target {algorithm.kl_target:g}, which can only multiply it; expected "
            "more than 0"
        )
    return problems


def _preferences(algorithm: AlgorithmSection) -> list[str]:
    """dpo and ipo weigh whole answers by their margin alone: what would change that is refused."""
    return [
        f"{key}: found {found!r} with loss {algorithm.loss!r}, which {why}; expected {expected}"
        for key, found, expected, why in (
            ("correction", algorithm.correction, "none", "has no ratio that could be corrected"),
            ("kl", algorithm.kl, "none", "keeps to the reference by preference_beta"),
            ("entropy_coef", algorithm.entropy_coef, 0.0, "is a function of pairs alone"),
            ("objectives", algorithm.objectives, "sum", "chooses its pairs by whole rewards"),
        )
        if found != expected
    ]
