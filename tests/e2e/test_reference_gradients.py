"""Through DeepSpeed, the gradient of a loss with a reference is that of its formula.

Whatever the ranks and the split: with ``micro_batch_tokens`` small, the two answers of a pair are in
micro-batches of their own. The formulas are written out here, in float64, and differentiated by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from tests.e2e.deepspeed_worker import TEMPERATURE, reference_gradients, run_ranks
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import KL_COEF, record_batch, shares, with_reference

BETA = 0.3
PAIRS = {"correction": "none", "preference_beta": BETA}
ALGORITHMS: list[dict[str, Any]] = [
    {"kl": "loss"},
    {"kl": "loss", "kl_estimator": "k3+", "aggregation": "seq-mean-token-mean"},
    {"loss": "dpo", **PAIRS},
    {"loss": "ipo", **PAIRS},
]
SPLITS = [10_000, 40]
"""micro_batch_tokens: everything at once, and one answer or two at a time."""


@dataclass
class Answer:
    ordinal: int
    advantage: float
    reward: float
    log_pi: Tensor  # (N,) of its trained tokens
    log_b: Tensor
    log_ref: Tensor

    @property
    def k3(self) -> Tensor:
        d = self.log_ref - self.log_pi
        return d.exp() - 1 - d

    @property
    def k3_with_the_gradient_of_k2(self) -> Tensor:
        return self.k3.detach() + (self.log_pi - self.log_ref).detach() * (self.log_pi - self.log_pi.detach())

    @property
    def policy_loss(self) -> Tensor:
        weight = (self.log_pi.detach() - self.log_b).exp().clamp(max=2.0)
        return -self.advantage * weight * (self.log_pi - self.log_pi.detach()).exp()


def answers(model: Any) -> list[Answer]:
    (share,) = shares(record_batch(2), 2, 1, 10**6)
    found = []
    for sample in with_reference(share, {}).samples:
        t = sample.trajectory
        tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        logits = model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
        row = logits.log_softmax(-1).gather(-1, tokens[1:, None])[len(t.prompt_ids) - 1 :, 0]
        mask = torch.from_numpy(t.loss_mask)
        log_b, log_ref = (torch.from_numpy(x)[mask].double() for x in (t.logprobs, sample.reference))
        found.append(Answer(sample.ordinal, sample.advantage, t.reward, row[mask], log_b, log_ref))
    return found


def margins(found: list[Answer]) -> Tensor:
    """Of the best and the worst answer of each group that has both; of equal ones the first."""
    pairs = []
    for ordinal in sorted({a.ordinal for a in found}):
        group = [a for a in found if a.ordinal == ordinal]
        best, worst = max(group, key=lambda a: a.reward), min(group, key=lambda a: a.reward)
        if best.reward > worst.reward:
            pairs.append((best.log_pi - best.log_ref).sum() - (worst.log_pi - worst.log_ref).sum())
    assert len(pairs) >= 3
    return torch.stack(pairs)


def losses(found: list[Answer]) -> list[Tensor]:
    tokens = sum(len(a.log_pi) for a in found)
    in_loss = sum((a.policy_loss + KL_COEF * a.k3).sum() for a in found) / tokens
    by_answer = sum((a.policy_loss + KL_COEF * a.k3_with_the_gradient_of_k2).mean() for a in found) / len(
        found
    )
    h = margins(found)
    return [in_loss, by_answer, -logsigmoid(BETA * h).mean(), (h - 1 / (2 * BETA)).square().mean()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("reference") / "model")


@pytest.fixture(scope="module")
def references(folder: Path) -> list[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """For each algorithm: gradient, and metrics that the learner has to report."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = answers(model)
    kl = torch.cat([a.k3 for a in found]).mean().item()
    h = margins(found)
    metrics = [
        {"actor/kl_loss": kl, "actor/reference_kl": kl},
        {"actor/kl_loss": torch.stack([a.k3.mean() for a in found]).mean().item(), "actor/reference_kl": kl},
        *(
            {
                "actor/preference_loss": loss.item(),
                "actor/preference_margin": h.mean().item(),
                "actor/preference_accuracy": (h > 0).double().mean().item(),
            }
            for loss in losses(found)[2:]
        ),
    ]
    gradients = []
    for loss in losses(found):
        of_loss = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        names = [name for name, _ in model.named_parameters()]
        gradients.append({name: g.numpy() for name, g in zip(names, of_loss, strict=True)})
    return list(zip(gradients, metrics, strict=True))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2)])
def test_the_gradient_is_that_of_the_formula(
    folder: Path, references: list[tuple[dict[str, np.ndarray], dict[str, float]]], ranks: int, stage: int
) -> None:
    by_rank = run_ranks(
        reference_gradients, folder, stage=stage, ranks=ranks, algorithms=ALGORITHMS, splits=SPLITS
    )
    for found in by_rank:
        for values, (reference, expected), of_algorithm in zip(ALGORITHMS, references, found, strict=True):
            largest = max(np.abs(g).max() for g in reference.values())
            assert largest > 1e-3
            for metrics, gradient in of_algorithm:
                assert gradient.keys() == reference.keys()
                for name, wanted in reference.items():
                    difference = np.abs(gradient[name] - wanted).max()
                    assert difference <= 1e-6 * max(largest, 1.0), (values, name, difference, largest)
                for name, number in expected.items():
                    assert metrics[name] == pytest.approx(number, abs=1e-5, rel=1e-5), (values, name)
