"""Reference inputs and outputs in float64, and which functions of asyncrl their names stand for.

A set is a JSON file ``{"cases": [{"inputs": ..., "expected": {kind: {name: ...}}}]}``. A name spells a
function and its constants, ``gae(gamma=0.99,lam=0.95,whiten)``; what comes after ``=`` behind the
bracket is a remark. The environment variable ASYNCRL_VECTORS names another set of the same form.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import group_advantages, remax
from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings, effective_sample_size
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings
from asyncrl.algorithms.masks import MEAN_EPSILON, masked, whiten
from asyncrl.algorithms.returns import WHITENED, discounted_returns, gae
from asyncrl.algorithms.values import clipped_value_loss

PATH = Path(os.environ.get("ASYNCRL_VECTORS") or Path(__file__).parent.parent / "data" / "vectors.json")
CASES: list[dict[str, Any]] = json.loads(PATH.read_text())["cases"]

LOSS_CONSTANTS = {
    "low": ("clip_low",),
    "high": ("clip_high",),
    "eps": ("clip_low", "clip_high"),
    "dual_clip": ("clip_dual",),
    "tau_pos": ("sapo_tau_positive",),
    "tau_neg": ("sapo_tau_negative",),
    "rho": ("aipo_cap",),
    "d": ("dppo_threshold",),
    "k": ("dppo_penalty",),
    "tau": ("m2po_tau",),
}
METRICS = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped_lower", "actor/ppo_kl": "kl"}


def tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Call:
    """A function by name, with constants that have a name and words that have none."""

    name: str
    constants: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Call:
        match = re.fullmatch(r"([\w+]+)(?:\((.*?)\))?(?:=.*)?", text.strip())
        if match is None:
            raise ValueError(f"found {text!r}, expected name(constant=value,word)")
        parts = [part.strip() for part in (match[2] or "").split(",") if part.strip()]
        named = dict(part.split("=", 1) for part in parts if "=" in part)
        return cls(match[1], named, tuple(part for part in parts if "=" not in part))

    def number(self, name: str, default: float) -> float:
        return float(self.constants.get(name, default))


class Inputs:
    """The inputs of a case as tensors."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        inputs = case["inputs"]
        self.groups: list[int] = inputs["groups"]
        self.mask = tensor(inputs["mask"]).bool()
        for name in ("token_rewards", "logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
            setattr(self, name, tensor(inputs[name]))
        self.values, self.value_preds = tensor(inputs["values"]), tensor(inputs["value_preds"])

    token_rewards: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor

    @property
    def counts(self) -> StepCounts:
        sequences = int(self.mask.any(-1).sum())
        return StepCounts(int(self.mask.sum()), sequences, length_norm=float(self.mask.shape[1]))

    @property
    def rewards(self) -> list[float]:
        return self.token_rewards.sum(-1).tolist()

    def loss_inputs(self) -> LossInputs:
        advantages = next(
            v["adv"] for k, v in self.case["expected"]["advantages"].items() if k.startswith("grpo(std)")
        )
        return LossInputs(
            logprobs=self.logprobs.clone().requires_grad_(),
            proximal=self.old_logprobs,
            behaviour=self.rollout_logprobs,
            advantages=tensor(advantages),
            mask=self.mask,
        )


def advantage(inputs: Inputs, name: str, expected: dict[str, Any]) -> dict[str, Any]:
    call = Call.parse(name)
    mask, counted = inputs.mask, call.name
    if call.name == "gae":
        gamma, lam = call.number("gamma", 1.0), call.number("lam", 1.0)
        advantages, returns = gae(inputs.token_rewards, inputs.values, mask, gamma, lam)
        whitened = whiten(advantages, mask) if "whiten" in call.words else advantages
        return {"adv": whitened, "returns": masked(returns, mask)}
    if call.name == "reinforce_plus_plus":
        returns = discounted_returns(inputs.token_rewards, mask, call.number("gamma", 1.0))
        return {"adv": whiten(returns, mask)}
    if call.name == "remax":
        pairs = zip(inputs.rewards, expected["baselines"], strict=True)
        scalars = [remax([reward], baseline)[0] for reward, baseline in pairs]
        return {"adv": masked(tensor(scalars)[:, None], mask), "baselines": tensor(expected["baselines"])}
    if call == Call("grpo", {}, ("no_std",)):
        counted = "dr_grpo"
    scalars = [0.0] * len(mask)
    lengths = mask.sum(-1).tolist()
    for group in set(inputs.groups):
        rows = [i for i, g in enumerate(inputs.groups) if g == group]
        found = group_advantages(counted, [inputs.rewards[i] for i in rows], [lengths[i] for i in rows])
        for i, value in zip(rows, found, strict=True):
            scalars[i] = value
    spread = masked(tensor(scalars)[:, None], mask)
    return {"adv": whiten(spread, mask) if counted in WHITENED else spread}


def policy_loss(inputs: Inputs, name: str, expected: dict[str, Any]) -> dict[str, Any]:
    formula, _, factor = name.removeprefix("decoupled:").partition("*")
    call = Call.parse(formula)
    settings = LossSettings(
        **{
            key: float(value)
            for name, value in call.constants.items()
            if name != "agg"
            for key in LOSS_CONSTANTS[name]
        }
    )
    loss_inputs = inputs.loss_inputs()
    result = LOSSES[call.name](loss_inputs, settings)
    weights = torch.ones_like(inputs.logprobs)
    if factor:
        truncation = Call.parse(factor)
        level, cap = truncation.words
        weights = correction(inputs, f"{level}:{cap}", {})["weights"]
    aggregation = AGGREGATIONS[call.constants.get("agg") or call.words[0]]
    loss = aggregation(weights * result.loss, inputs.mask, inputs.counts)
    loss.backward()
    found = {"loss": loss.detach(), "grad_logprobs": loss_inputs.logprobs.grad}
    # Means of the reference divide by n + 1e-8.
    tokens = inputs.counts.tokens + MEAN_EPSILON
    for metric in expected.get("metrics", {}):
        tally = getattr(result, METRICS[metric])
        total = torch.zeros(()) if tally is None else tally.double().sum()
        found[f"metrics/{metric}"] = total / tokens
    return found


def correction(inputs: Inputs, name: str, expected: dict[str, Any]) -> dict[str, Any]:
    level, _, bounds = name.partition(":")
    numbers = [float(bound) for bound in bounds.split("_")]
    if len(numbers) == 1:
        function = {"token": "tis", "sequence": "tis_sequence"}[level]
        settings = CorrectionSettings(tis_cap=numbers[0])
    else:
        function = {"token": "icepop"}[level]
        settings = CorrectionSettings(icepop_low=numbers[0], icepop_high=numbers[1])
    weights = CORRECTIONS[function](
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, settings
    ).weights
    total, squares, count = weights.sum().item(), weights.square().sum().item(), inputs.counts.tokens
    return {
        "weights": weights,
        "mean": tensor(total / (count + MEAN_EPSILON)),
        "ess": tensor(effective_sample_size(total, squares, count)),
    }


def divergence(inputs: Inputs, name: str, expected: Any) -> dict[str, Any]:
    return {"": KL_ESTIMATORS[name](inputs.logprobs, inputs.ref_logprobs, inputs.mask)}


def value_loss(inputs: Inputs, name: str, expected: dict[str, Any]) -> dict[str, Any]:
    call = Call.parse(name)
    aggregation, _half = call.words
    # R are the returns of the set's own gae.
    estimate = Call.parse(next(k for k in inputs.case["expected"]["advantages"] if k.startswith("gae")))
    gamma, lam = estimate.number("gamma", 1.0), estimate.number("lam", 1.0)
    _, returns = gae(inputs.token_rewards, inputs.values, inputs.mask, gamma, lam)
    values = inputs.value_preds.clone().requires_grad_()
    result = clipped_value_loss(values, inputs.values, returns, inputs.mask, call.number("clip", 0.2))
    loss = AGGREGATIONS[aggregation](result.loss, inputs.mask, inputs.counts)
    loss.backward()
    tokens = inputs.counts.tokens + MEAN_EPSILON
    return {
        "loss": loss.detach(),
        "grad_value_preds": values.grad,
        "clipfrac": result.clipped.double().sum() / tokens,
    }


KINDS: dict[str, Callable[[Inputs, str, Any], dict[str, Any]]] = {
    "advantages": advantage,
    "policy_losses": policy_loss,
    "corrections": correction,
    "kl": divergence,
    "value_loss": value_loss,
}


@dataclass(frozen=True)
class Entry:
    """One named function of one case, with everything that is expected of it."""

    case: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}, case {self.case}"

    @property
    def expected(self) -> dict[str, Any]:
        """Flat: ``loss``, ``grad_logprobs``, ``metrics/actor/ppo_kl``, ..."""
        section = CASES[self.case]["expected"]
        raw = next(v for k, v in section.items() if k.split("(")[0] == self.kind)
        raw = raw if self.kind == "value_loss" else raw[self.name]
        return _flat(raw)

    def compute(self) -> dict[str, Any]:
        inputs = Inputs(CASES[self.case])
        section = CASES[self.case]["expected"]
        raw = next(v for k, v in section.items() if k.split("(")[0] == self.kind)
        return KINDS[self.kind](inputs, self.name, raw if self.kind == "value_loss" else raw[self.name])

    def differences(self) -> dict[str, float]:
        """The largest absolute difference of each expected output. KeyError for one not computed."""
        found = self.compute()
        return {
            key: float((torch.as_tensor(found[key]).double() - tensor(value)).abs().max())
            for key, value in self.expected.items()
        }


def entries() -> Iterator[Entry]:
    """Every entry of the set, a kind after the other, a case after the other."""
    for i, case in enumerate(CASES):
        for section, content in case["expected"].items():
            kind = section.split("(")[0]
            names = [section] if kind == "value_loss" else list(content)
            for name in names:
                yield Entry(i, kind, name)


def _flat(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        return {"": raw}
    flat = {}
    for key, value in raw.items():
        flat |= {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat
