"""On every engine, values and gradients of the critic are those of plain autograd, whatever the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from asyncrl.learners.base import TrainSample
from tests.e2e.critic_worker import (
    GAMMA,
    LAMBDA,
    VALUE_CLIP,
    VERSION,
    Key,
    critic_gradients,
    critic_skips,
    moved,
)
from tests.e2e.deepspeed_worker import run_ranks
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import gae_by_definition, record_batch

SPLITS = [10_000, 80]
"""micro_batch_tokens: everything at once, and in many parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("critic") / "model")


class Reference:
    """The value model once more, in float64: rows one by one, unpadded."""

    def __init__(self, folder: Path, weights: dict[str, np.ndarray]) -> None:
        self.transformer = AutoModel.from_pretrained(folder, dtype=torch.float64)
        self.head = torch.nn.Linear(self.transformer.config.hidden_size, 1, dtype=torch.float64)
        parts = {"transformer": self.transformer, "head": self.head}
        self.parameters = {
            f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()
        }
        assert self.parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(weights[name]))

    def values(self) -> dict[Key, Tensor]:
        """By sample, the values of its trained tokens: of the state before each."""
        found = {}
        for group in record_batch(VERSION):
            for t in group.trajectories:
                tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
                hidden = self.transformer(input_ids=tokens[None]).last_hidden_state[0]
                of_answer = self.head(hidden)[len(t.prompt_ids) - 1 : -1, 0]
                found[group.ordinal, t.sample] = of_answer[torch.from_numpy(t.loss_mask)]
        return found

    def gradients(self, old: dict[Key, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
        """Of the clipped value loss, mean over all tokens; and the share of tokens that the clip decided."""
        losses, clipped = [], []
        values = self.values()
        for group in record_batch(VERSION):
            for t in group.trajectories:
                key = (group.ordinal, t.sample)
                before = torch.from_numpy(old[key][t.loss_mask]).double()
                sample = TrainSample(group.ordinal, t, t.reward, values=old[key])
                returns = torch.from_numpy(gae_by_definition(sample, GAMMA, LAMBDA)) + before
                plain = (values[key] - returns).square()
                bounded = before + (values[key] - before).clamp(-VALUE_CLIP, VALUE_CLIP)
                held = (bounded - returns).square()
                losses.append(0.5 * torch.where(held > plain, held, plain))
                clipped.append(held > plain)
        loss = torch.cat(losses).mean()
        found = torch.autograd.grad(loss, list(self.parameters.values()))
        by_name = {name: g.numpy() for name, g in zip(self.parameters, found, strict=True)}
        return by_name, float(torch.cat(clipped).double().mean())


@pytest.mark.parametrize(
    ("backend", "ranks", "stage"),
    [("deepspeed", 1, 0), ("deepspeed", 2, 2), ("deepspeed", 2, 3), ("fsdp2", 2, 3)],
)
def test_values_and_gradients_are_those_of_plain_autograd(
    folder: Path, backend: str, ranks: int, stage: int
) -> None:
    where: dict[str, Any] = {"backend": backend, "stage": stage, "ranks": ranks}
    by_rank = run_ranks(critic_gradients, folder, **where, lr=3e-3, splits=SPLITS)
    for found in by_rank:
        assert not any(values.any() for values in found["start"].values()), "a new critic values all at 0"
        # No variance is explained by zeros, and some is after a few updates on the same batch.
        first, *_, last = [result.metrics for result in found["results"]]
        assert first["critic/explained_variance"] == 0.0
        assert last["critic/vf_loss"] < first["critic/vf_loss"]
        assert last["critic/vpred_mean"] > first["critic/vpred_mean"] == 0.0

        reference = Reference(folder, found["weights"])
        expected_values = reference.values()
        for group in record_batch(VERSION):
            for t in group.trajectories:
                values = found["values"][group.ordinal, t.sample]
                assert not values[~t.loss_mask].any()
                of_autograd = expected_values[group.ordinal, t.sample].detach().numpy()
                np.testing.assert_allclose(values[t.loss_mask], of_autograd, atol=1e-5)
        expected, clipped = reference.gradients(moved(found["values"]))
        assert 0.02 < clipped < 0.9
        (whole, _), (parts, _) = found["gradients"]
        assert whole < 4 <= parts
        assert min(np.abs(g).max() for name, g in expected.items() if "head" in name) > 1e-3
        assert max(np.abs(g).max() for name, g in expected.items() if "head" not in name) > 1e-3
        for _, gradient in found["gradients"]:
            assert gradient.keys() == expected.keys()
            for name, of_autograd in expected.items():
                difference = np.abs(gradient[name] - of_autograd).max()
                assert difference <= 1e-6, (name, difference)


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(folder: Path) -> None:
    for results, states in run_ranks(critic_skips, folder, stage=2, ranks=2):
        assert [r.skipped for r in results] == [False, True, False]
        assert [r.metrics["critic/nonfinite_grads"] for r in results] == [0.0, 1.0, 0.0]
        assert all(np.isfinite(value) for r in results for value in r.metrics.values())
        before, after, later = states
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array)
        assert any((later[name] != array).any() for name, array in before.items())
