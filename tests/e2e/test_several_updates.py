"""Epochs and mini-batches: one step of several updates is that of a loop written out in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.learners.base import TrainSample
from tests.e2e.deepspeed_worker import TEMPERATURE, run_ranks, several_updates
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import record_batch, shares

LR = 3e-3
ALGORITHM: dict[str, Any] = {
    "epochs": 2,
    "mini_batches": 2,
    "clip_low": 0.05,
    "clip_high": 0.05,
    "clip_dual": None,
}
# As the worker's learner has them; the warm-up of 3 steps is over at version 2.
BETAS, EPSILON, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("deepspeed") / "model")


def logprobs(model: Any, sample: TrainSample) -> Tensor:
    """log pi of the trained tokens of one answer."""
    t = sample.trajectory
    tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
    logits = model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
    row = logits.log_softmax(-1).gather(-1, tokens[1:, None])[len(t.prompt_ids) - 1 :, 0]
    return row[torch.from_numpy(t.loss_mask)]


def by_torch(folder: Path) -> tuple[dict[str, np.ndarray], list[float], float]:
    """Parameters after the step, the norm of each update's gradient, and the share of clipped tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    (share,) = shares(record_batch(2), 2, 1, 80, "grpo", mini_batches=2)
    with torch.no_grad():
        start = [logprobs(model, sample) for sample in share.samples]
    norms, clipped = [], []
    for update in [*share.mini_batches, *share.mini_batches]:
        optimizer.zero_grad()
        for row in [row for rows in update.micro_batches for row in rows]:
            sample, p = share.samples[row], start[row]
            behaviour = torch.from_numpy(sample.trajectory.logprobs[sample.trajectory.loss_mask])
            u = (logprobs(model, sample) - p).exp()
            bounded = u.clamp(0.95, 1.05)
            surrogate = torch.minimum(u * sample.advantage, bounded * sample.advantage)
            clipped.append((bounded * sample.advantage < u * sample.advantage).detach())
            weights = (p - behaviour).exp().clamp(max=2.0)
            (-(weights * surrogate).sum() / update.loss_tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
    parameters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return parameters, norms, float(torch.cat(clipped).float().mean())


@pytest.mark.parametrize(("ranks", "stage", "packing"), [(1, 0, True), (2, 3, False)])
def test_a_step_of_several_updates(folder: Path, ranks: int, stage: int, packing: bool) -> None:
    expected, norms, clipped = by_torch(folder)
    assert 0.05 < clipped < 0.9, "the clip has to act for this to be a test of p"
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for skipped, metrics, found in run_ranks(
        several_updates, folder, stage=stage, ranks=ranks, lr=LR, packing=packing, algorithm=ALGORITHM
    ):
        assert not skipped
        assert metrics["actor/updates"] == 4.0
        assert metrics["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
        assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped, abs=0.01)
        for name, value in expected.items():
            moved = np.abs(value - before[name].numpy()).mean()
            # Adam turns a gradient that is nearly nothing into a step of its sign: the mean, not the most.
            assert np.abs(found[name] - value).mean() <= 1e-3 * moved, name


def test_an_update_that_is_not_finite_ends_its_step(folder: Path) -> None:
    """The first one breaks the policy, so the step counts, and the other three are left out."""
    ((skipped, metrics, _),) = run_ranks(
        several_updates, folder, stage=0, ranks=1, lr=1e30, algorithm=ALGORITHM
    )
    assert not skipped
    assert metrics["actor/nonfinite_grads"] == 1.0
    assert metrics["actor/updates"] == 1.0
