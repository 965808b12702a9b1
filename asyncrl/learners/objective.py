"""The loss of one micro-batch, put together from the algorithm's parts, and what it measured.

Shapes: B rows, T response positions, N trained tokens, as in ``collate``.

Invariants:
- The losses of a step's micro-batches, over all ranks, add up to the step's loss; so do gradients.
- A loss that is not finite makes every gradient of its micro-batch NaN, so that looking at the
  gradient alone is enough to skip an update.
- Measuring needs no synchronisation with the device before the step's end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings, effective_sample_size
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.algorithms.losses import LossInputs, LossSettings, m2po_limit
from asyncrl.algorithms.masks import masked
from asyncrl.algorithms.preferences import weighted_answers
from asyncrl.algorithms.ratios import log_linear_proximal, log_ratio
from asyncrl.algorithms.registry import policy_loss
from asyncrl.config import AlgorithmSection
from asyncrl.errors import InvariantError
from asyncrl.learners.collate import MicroBatch
from asyncrl.types import Metrics

_BY_AGE = ("kl", "weight_mean", "clip_fraction", "tokens")
"""What is summed up by the lag of a token; the last divides the others."""
Settings = TypeVar("Settings", LossSettings, CorrectionSettings)


class Objective:
    """Config to a function of (logits, micro-batch). A user's own loss is looked up from ``folder``."""

    def __init__(
        self,
        algorithm: AlgorithmSection,
        temperature: float,
        max_staleness: int,
        folder: Path | None = None,
    ) -> None:
        self._temperature = temperature
        self._ages = max_staleness + 1
        self._old_logprobs = algorithm.old_logprobs
        self._corrected = algorithm.correction != "none"
        self._entropy_coef = algorithm.entropy_coef
        self._m2po_tau = algorithm.m2po_tau if algorithm.loss == "m2po" else None
        self._kl = KL_ESTIMATORS[algorithm.kl_form] if algorithm.kl == "loss" else None
        # What pairs teach comes as weights of their answers: see ``learners/preferences.py``.
        pairs = algorithm.learns_from_pairs
        self._loss = weighted_answers if pairs else policy_loss(algorithm.loss, folder or Path.cwd())
        self._loss_settings = _settings(LossSettings, algorithm)
        self._correction = CORRECTIONS[algorithm.correction]
        self._correction_settings = _settings(CorrectionSettings, algorithm)
        self._aggregate = AGGREGATIONS["seq-mean-token-sum" if pairs else algorithm.aggregation]

    @torch.no_grad()
    def logprobs(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """log pi of a micro-batch, 0 outside the mask: (N, V) -> (B, T)."""
        flat, _ = self._tokens(logits, batch)  # (N,)
        return flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat)

    @property
    def needs_preview(self) -> bool:
        """Whether the loss of a token depends on the log-probs of all tokens of the step."""
        return self._m2po_tau is not None

    @torch.no_grad()
    def preview(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """What such a loss has to know of a micro-batch: (log pi/b)^2 of its tokens, (N,)."""
        flat, _ = self._tokens(logits, batch)  # (N,)
        behaviour = batch.behaviour[batch.mask].to(flat.dtype)
        return log_ratio(flat, behaviour, torch.ones_like(flat, dtype=torch.bool)).square()

    def limit(self, previews: Tensor) -> Tensor:
        """What ``__call__`` takes as ``limit``, from the previews of the whole step, (N,) -> ()."""
        assert self._m2po_tau is not None
        return m2po_limit(previews, self._m2po_tau)

    def __call__(
        self,
        logits: Tensor,
        batch: MicroBatch,
        counts: StepCounts,
        tally: Tally,
        limit: Tensor | None = None,
        kl_coef: float = 0.0,
    ) -> Tensor:
        """The micro-batch's share of the step's loss, a scalar; ``logits`` (N, V).

        ``kl_coef`` is the factor of the KL to the reference, where that is in the loss.
        """
        flat, entropy = self._tokens(logits, batch, entropy_gradient=self._entropy_coef > 0)  # (N,), (N,)
        mask = batch.mask
        logprobs = flat.new_zeros(mask.shape).masked_scatter(mask, flat)  # (B, T)
        own = logprobs.detach()
        # In the first update of a step, the policy at its start is the one that was just run.
        start = own if batch.proximal is None else batch.proximal.to(own.dtype)
        behaviour = batch.behaviour.to(own.dtype)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal=self._proximal(start, own, behaviour, batch.ages),
            behaviour=behaviour,
            advantages=batch.advantages.to(own.dtype),
            mask=mask,
            m2po_limit=limit,
        )
        result = self._loss(inputs, self._loss_settings)
        correction = self._correction(inputs.proximal, behaviour, mask, self._correction_settings)
        loss = pg_loss = self._aggregate(correction.weights * masked(result.loss, mask), mask, counts)
        if self._entropy_coef > 0:
            entropies = flat.new_zeros(mask.shape).masked_scatter(mask, entropy)  # (B, T)
            loss = loss - self._entropy_coef * self._aggregate(entropies, mask, counts)
        if self._kl is not None:
            kl = self._kl(logprobs, _reference(batch, own), mask)  # (B, T)
            kl_loss = self._aggregate(kl, mask, counts)
            loss = loss + kl_coef * kl_loss
            tally.add(kl_loss=kl_loss, reference_kl=kl.sum())
        with torch.no_grad():
            ratio = torch.where(mask, log_ratio(start, behaviour, mask).exp(), 0.0)
            weights = correction.weights if self._corrected else ratio
            difference = torch.where(mask & batch.fresh, (start - behaviour).abs(), 0.0)
            behaviour_kl = torch.where(mask, behaviour - start, 0.0)
            lower = torch.zeros_like(mask) if result.clipped_lower is None else result.clipped_lower
            tally.add(
                loss=pg_loss,
                bad_losses=(~loss.isfinite()).float(),
                tokens=mask.sum(),
                clipped=result.clipped.sum(),
                clipped_lower=lower.sum(),
                ppo_kl=result.kl.sum(),
                entropy=entropy.sum(),
                behaviour_kl=behaviour_kl.sum(),
                weights=weights.sum(),
                squared_weights=weights.square().sum(),
                capped=correction.clipped.sum(),
                fresh_tokens=(mask & batch.fresh).sum(),
                fresh_difference=difference.sum(),
            )
            tally.add_by_age(
                torch.stack([behaviour_kl, weights, correction.clipped, mask]), batch.ages, self._ages
            )
            tally.maximum(weight=weights.max(), fresh_difference=difference.max())
        # 0 times a finite loss adds nothing; 0 times another is NaN, and so is every gradient then.
        return loss + flat.sum() * (loss.detach() * 0.0)

    def _tokens(
        self, logits: Tensor, batch: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each trained token: (N, V) -> (N,), (N,).

        Where ranks share the rows, ``logits`` are those of this rank's tokens, and the call is collective.
        """
        targets = batch.targets if batch.part is None else batch.targets[batch.part.owned]
        logprobs, entropy = token_logprobs(
            logits, targets, self._temperature, entropy_gradient=entropy_gradient
        )
        if batch.part is None:
            return logprobs, entropy
        return batch.part.whole(logprobs), batch.part.whole(entropy)

    def _proximal(self, start: Tensor, own: Tensor, behaviour: Tensor, ages: Tensor) -> Tensor:
        """log p, (B, T)."""
        if self._old_logprobs == "recompute":
            return start
        return behaviour if self._old_logprobs == "behaviour" else log_linear_proximal(own, behaviour, ages)


def _reference(batch: MicroBatch, own: Tensor) -> Tensor:
    """The reference's log-probs, (B, T); only a micro-batch without a token may lack them."""
    if batch.reference is not None:
        return batch.reference.to(own.dtype)
    if len(batch.targets):
        raise InvariantError(
            f"{len(batch.targets)} tokens came without the reference's log-probs, which the loss needs"
        )
    return own


def _settings(kind: type[Settings], algorithm: AlgorithmSection) -> Settings:
    """The constants that the section has under the same names."""
    return kind(**{field.name: getattr(algorithm, field.name) for field in fields(kind)})


@dataclass
class Tally:
    """Sums and maxima over the micro-batches of a step, on the device, then over the ranks."""

    device: torch.device

    def __post_init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._by_age: Tensor | None = None  # (4, ages)

    def add(self, **values: Tensor) -> None:
        """Add to sums by name; every micro-batch names the same ones."""
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_by_age(self, values: Tensor, ages: Tensor, count: int) -> None:
        """Add those of ``_BY_AGE`` to sums by age: (4, B, T), (B, T), for the ages 0 to ``count`` - 1."""
        # A product with an indicator, because scattered additions have no fixed order on a GPU.
        is_age = (ages.flatten()[:, None] == torch.arange(count, device=ages.device)).double()
        sums = values.flatten(1).double() @ is_age  # (4, B * T) @ (B * T, count)
        self._by_age = sums if self._by_age is None else self._by_age + sums

    def maximum(self, **values: Tensor) -> None:
        """Raise maxima by name; every call names the same ones. Values are at least 0."""
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def metrics(self, all_sum: Callable[[Tensor], None], all_max: Callable[[Tensor], None]) -> Metrics:
        """Metrics of the step, reduced in place over the ranks; a collective call."""
        sums = torch.stack(list(self._sums.values())).to(self.device)
        maxima = torch.stack(list(self._maxima.values())).to(self.device)
        all_sum(sums)
        all_max(maxima)
        by_age = self._by_age
        if by_age is not None:
            all_sum(by_age)
        total = dict(zip(self._sums, sums.tolist(), strict=True))
        largest = dict(zip(self._maxima, maxima.tolist(), strict=True))
        tokens = max(total["tokens"], 1.0)
        metrics = {
            "actor/pg_loss": total["loss"],
            "actor/nonfinite_losses": total["bad_losses"],
            "actor/pg_clipfrac": total["clipped"] / tokens,
            "actor/pg_clipfrac_lower": total["clipped_lower"] / tokens,
            "actor/ppo_kl": total["ppo_kl"] / tokens,
            "actor/entropy": total["entropy"] / tokens,
            "rollout_corr/kl": total["behaviour_kl"] / tokens,
            "rollout_corr/weight_mean": total["weights"] / tokens,
            "rollout_corr/weight_max": largest["weight"],
            "rollout_corr/ess": effective_sample_size(total["weights"], total["squared_weights"], tokens),
            "rollout_corr/clip_fraction": total["capped"] / tokens,
        }
        if "kl_loss" in total:
            metrics["actor/kl_loss"] = total["kl_loss"]
            metrics["actor/reference_kl"] = total["reference_kl"] / tokens
        if total.get("pairs"):
            metrics["actor/preference_loss"] = total["preference_loss"] / total["pairs"]
            metrics["actor/preference_margin"] = total["preference_margin"] / total["pairs"]
            metrics["actor/preference_accuracy"] = total["preferred"] / total["pairs"]
        if total["fresh_tokens"] > 0:
            metrics["generator/logprob_diff_mean"] = total["fresh_difference"] / total["fresh_tokens"]
            metrics["generator/logprob_diff_max"] = largest["fresh_difference"]
        if by_age is not None:
            metrics |= _metrics_by_age(by_age)
        return metrics


def _metrics_by_age(sums: Tensor) -> Metrics:
    """``rollout_corr/..._age<k>`` for each age k that any trained token of the step has."""
    return {
        f"rollout_corr/{name}_age{age}": total / tokens
        for age, (*totals, tokens) in enumerate(sums.T.tolist())
        if tokens > 0
        for name, total in zip(_BY_AGE[:-1], totals, strict=True)
    }
