"""A reference in the learner's host memory: the start model's log-probs, and a policy that keeps its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import AlgorithmSection, ReferenceSection
from tests.e2e.deepspeed_worker import TEMPERATURE, Referred, run_ranks, steps_with_a_reference
from tests.e2e.runs import assert_sound, finish
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import record_batch, shares

STEPS = 4
KL = AlgorithmSection.model_validate({"kl": "loss", "kl_coef": 0.1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("resident") / "model")


def run(folder: Path, stage: int, ranks: int, *, lr: float = 3e-2, **reference: Any) -> list[list[Referred]]:
    """By rank, the steps."""
    section = ReferenceSection.model_validate({"place": "learner", **reference})
    return run_ranks(
        steps_with_a_reference,
        folder,
        stage=stage,
        ranks=ranks,
        lr=lr,
        learns=KL,
        reference=section,
        steps=STEPS,
    )


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (3, 2)])
def test_it_is_the_start_model_whatever_the_policy_became(folder: Path, stage: int, ranks: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for rank, steps in enumerate(run(folder, stage, ranks)):
        for version, step in enumerate(steps):
            assert step.kept
            samples = shares(record_batch(version), version, ranks, 80)[rank].samples
            for sample, found in zip(samples, step.reference, strict=True):
                t = sample.trajectory
                tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
                with torch.no_grad():
                    row = (model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
                expected = row.gather(-1, tokens[1:, None])[len(t.prompt_ids) - 1 :, 0].numpy()
                np.testing.assert_allclose(found[t.loss_mask], expected[t.loss_mask], atol=1e-5)
        kl = [step.metrics["actor/reference_kl"] for step in steps]
        assert abs(kl[0]) < 1e-6 < 1e-4 < kl[-1], kl
        assert len({step.checksum for step in steps}) == STEPS, "the policy moves"


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (3, 2)])
def test_it_follows_the_policy_when_it_is_due(folder: Path, stage: int, ranks: int) -> None:
    for steps in run(folder, stage, ranks, refresh_every=2):
        assert [step.metrics["reference/version"] for step in steps] == [0, 0, 2, 2]
        differences = [
            max(np.abs(r - p).max() for r, p in zip(step.reference, step.policy, strict=True))
            for step in steps
        ]
        assert differences[0] == differences[2] == 0.0 < 1e-3 < min(differences[1], differences[3])


def test_an_average_is_between_what_it_was_and_what_the_policy_is(folder: Path) -> None:
    (steps,) = run(folder, 2, 1, lr=1e-3, refresh_every=2, ema=0.5)
    (start,) = run(folder, 2, 1, lr=1e-3)
    # Of small moves, log-probs are linear in the weights.
    middle, ends = steps[2].reference, zip(start[2].reference, steps[2].policy, strict=True)
    for found, (old, new) in zip(middle, ends, strict=True):
        np.testing.assert_allclose(found, (old + new) / 2, atol=0.25 * np.abs(new - old).max())


def test_a_run_with_it_starts_no_actors(tmp_path: Path) -> None:
    run = finish(
        tmp_path,
        "algorithm.kl=loss",
        "algorithm.kl_coef=0.1",
        "data.eval=null",
        "learner.lr=1e-2",
        "reference.place=learner",
        "reference.refresh_every=2",
        name="resident",
    )
    assert_sound(run, max_staleness=2, capacity=4)
    lines = run.metrics[1:]
    assert [line["reference/version"] for line in lines] == [0, 0, 2, 2]
    kl = [line["actor/reference_kl"] for line in lines]
    assert max(map(abs, kl[::2])) < 1e-5 < 1e-4 < min(map(abs, kl[1::2])), kl
    assert "timing_s/reference" not in lines[-1]
