"""On every engine, the gradient of a step is that of plain autograd over the whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.deepspeed_worker import gradients, run_ranks
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import one_prompt_a_group, record_batch, shares

SPLITS = [(3, 60), (5, 110), (1, 10_000)]
"""(groups, micro_batch_tokens): an odd number of groups leaves the ranks unequal work."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("deepspeed") / "model")


def by_autograd(folder: Path, groups: int, one_prompt: bool = False) -> dict[str, np.ndarray]:
    """Row by row, unpadded, in float64: with u = 1 the gradient is that of -w A log pi."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch = record_batch(2, groups=groups)
    (share,) = shares(one_prompt_a_group(batch) if one_prompt else batch, 2, 1, 10**6)
    for sample in share.samples:
        t = sample.trajectory
        tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        logits = model(input_ids=tokens[None]).logits[0, :-1] / 0.9
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[len(t.prompt_ids) - 1 :, 0]
        weights = (logprobs.detach() - torch.from_numpy(t.logprobs)).exp().clamp(max=2.0)
        loss = -(sample.advantage * weights * logprobs)[torch.from_numpy(t.loss_mask)].sum()
        (loss / share.loss_tokens).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def references(folder: Path) -> list[dict[str, np.ndarray]]:
    return [by_autograd(folder, groups) for groups, _ in SPLITS]


@pytest.mark.parametrize(
    ("backend", "stage", "ranks", "checkpointing"),
    [
        *(("deepspeed", stage, ranks, False) for stage in range(4) for ranks in (1, 2)),
        ("fsdp2", 2, 1, False),
        ("fsdp2", 3, 2, True),
    ],
)
def test_gradient_is_that_of_plain_autograd(
    folder: Path,
    references: list[dict[str, np.ndarray]],
    backend: str,
    stage: int,
    ranks: int,
    checkpointing: bool,
) -> None:
    where: dict[str, Any] = {"backend": backend, "stage": stage, "ranks": ranks}
    by_rank = run_ranks(gradients, folder, **where, checkpointing=checkpointing, splits=SPLITS)
    for split, reference in enumerate(references):
        rows = [found[split][0] for found in by_rank]
        assert len({len(r) for r in rows}) == 1
        if ranks == 2:
            # The ranks' real micro-batches differ in number and size; the rest are dummies.
            assert rows[0] != rows[1]
        largest = max(np.abs(g).max() for g in reference.values())
        for found in by_rank:
            assert found[split][1].keys() == reference.keys()
            for name, expected in reference.items():
                difference = np.abs(found[split][1][name] - expected).max()
                assert difference <= 1e-5 * largest, (split, name, difference, largest)
    assert any(0 in found[0][0] for found in by_rank) == (ranks == 2)


@pytest.mark.parametrize(("backend", "stage", "ranks"), [("deepspeed", 3, 2), ("fsdp2", 2, 1)])
def test_answers_that_share_their_prompt_have_the_gradient_of_those_with_one_each(
    folder: Path, backend: str, stage: int, ranks: int
) -> None:
    by_rank = run_ranks(
        gradients, folder, backend=backend, stage=stage, ranks=ranks, shared_prompts=True, splits=SPLITS
    )
    for split, (groups, _) in enumerate(SPLITS):
        reference = by_autograd(folder, groups, one_prompt=True)
        largest = max(np.abs(g).max() for g in reference.values())
        for found in by_rank:
            for name, expected in reference.items():
                assert np.abs(found[split][1][name] - expected).max() <= 1e-5 * largest, (split, name)
