"""Through DeepSpeed, each preset's gradient is that of its formula, whatever ranks, split and packing.

The reference is written without the objective: plain autograd in float64 over log pi, row by row and
unpadded, with the weights of the formula at the step's start, where pi = p.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.names import PRESETS
from tests.e2e.deepspeed_worker import LENGTH_NORM, TEMPERATURE, algorithm_gradients, run_ranks
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import gae_by_definition, record_batch, shares, with_values

Weight = Callable[[Tensor, Tensor], Tensor]
"""(pi/b, advantages) of all trained tokens -> what multiplies -A log pi."""


def truncated(ratio: Tensor, advantages: Tensor) -> Tensor:
    return ratio.clamp(max=2.0)


def topr(ratio: Tensor, advantages: Tensor) -> Tensor:
    return torch.where(advantages < 0, ratio.clamp(max=1.0), 1.0)


def m2po(ratio: Tensor, advantages: Tensor) -> Tensor:
    squares = ratio.log().square()
    order = squares.argsort()
    kept = squares[order].cumsum(0) / torch.arange(1, len(order) + 1) < 0.2
    assert 0.3 < kept.double().mean() < 0.95
    weights = torch.zeros_like(ratio)
    weights[order[kept]] = ratio[order[kept]]
    return weights


UNCORRECTED = {"correction": "none"}
ALGORITHMS: list[tuple[dict[str, Any], Weight]] = [
    *(({"preset": preset}, truncated) for preset in PRESETS if preset != "ppo"),
    ({"preset": "ppo", "gamma": 0.95, "gae_lambda": 0.9}, truncated),
    ({"loss": "topr", **UNCORRECTED}, topr),
    ({"loss": "m2po", "m2po_tau": 0.2, **UNCORRECTED}, m2po),
]
SPLITS = [(10_000, False), (80, False), (10_000, True), (120, True)]
"""micro_batch_tokens and packing: everything at once, and in many parts, a row each and several a row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("deepspeed") / "model")


def per_token(values: dict[str, Any], lengths: list[int], advantage: str) -> tuple[Tensor, Tensor]:
    """Advantage and divisor of each trained token, all answers one after the other."""
    (share,) = shares(record_batch(2), 2, 1, 10**6, advantage)
    spread = torch.tensor(lengths)
    advantages = torch.tensor([s.advantage for s in share.samples]).double().repeat_interleave(spread)
    if advantage == "gae":
        gamma, lam = values["gamma"], values["gae_lambda"]
        by_sample = [gae_by_definition(s, gamma, lam) for s in with_values(share).samples]
        advantages = torch.from_numpy(np.concatenate(by_sample))
    if advantage in ("reinforce_plus_plus", "gae"):
        advantages = (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt()
    divisors = {
        "token-mean": torch.full((len(lengths),), float(sum(lengths))),
        "seq-mean-token-mean": spread * float(len(lengths)),
        "seq-mean-token-sum-norm": torch.full((len(lengths),), len(lengths) * LENGTH_NORM),
    }[values.get("aggregation", "token-mean")]
    return advantages, divisors.double().repeat_interleave(spread)


def by_autograd(folder: Path) -> list[dict[str, np.ndarray]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    (share,) = shares(record_batch(2), 2, 1, 10**6)
    logprobs, behaviour, lengths = [], [], []
    for sample in share.samples:
        t = sample.trajectory
        tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        logits = model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
        row = logits.log_softmax(-1).gather(-1, tokens[1:, None])[len(t.prompt_ids) - 1 :, 0]
        mask = torch.from_numpy(t.loss_mask)
        logprobs.append(row[mask])
        behaviour.append(torch.from_numpy(t.logprobs)[mask].double())
        lengths.append(int(mask.sum()))
    log_pi, log_b = torch.cat(logprobs), torch.cat(behaviour)
    names = [name for name, _ in model.named_parameters()]
    found = []
    for algorithm, weight in ALGORITHMS:
        values = {**PRESETS[algorithm.get("preset", "grpo")], **algorithm}
        advantages, divisors = per_token(values, lengths, values.get("advantage", "grpo"))
        weights = weight((log_pi.detach() - log_b).exp(), advantages)
        loss = -(weights * advantages / divisors * log_pi).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        found.append({name: g.numpy() for name, g in zip(names, gradients, strict=True)})
    return found


@pytest.fixture(scope="module")
def references(folder: Path) -> list[dict[str, np.ndarray]]:
    return by_autograd(folder)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_the_gradient_of_each_algorithm_is_that_of_its_formula(
    folder: Path, references: list[dict[str, np.ndarray]], ranks: int, stage: int
) -> None:
    algorithms = [values for values, _ in ALGORITHMS]
    by_rank = run_ranks(
        algorithm_gradients, folder, stage=stage, ranks=ranks, algorithms=algorithms, splits=SPLITS
    )
    for found in by_rank:
        for values, reference, of_algorithm in zip(algorithms, references, found, strict=True):
            whole, parts, packed_whole, packed_parts = (count for count, _ in of_algorithm)
            assert whole == packed_whole == 1
            assert parts >= 4
            assert packed_parts == 4 // ranks
            assert max(np.abs(g).max() for g in reference.values()) > 1e-3
            for _, gradient in of_algorithm:
                assert gradient.keys() == reference.keys()
                for name, expected in reference.items():
                    difference = np.abs(gradient[name] - expected).max()
                    assert difference <= 1e-6, (values, name, difference)
