"""Fed the same recorded batches, every engine and every ZeRO stage ends in the same place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.types import group_lag
from tests.e2e.deepspeed_worker import SCORED, run_ranks, skip, train
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import batch_of, record_batch

VERSIONS = 20
Setup = tuple[str, int, int]
"""Backend, ZeRO stage, ranks."""
PLAIN: Setup = ("deepspeed", 0, 1)
DEEPSPEED: list[Setup] = [("deepspeed", stage, 2) for stage in range(4)]
FSDP: list[Setup] = [("fsdp2", 2, 1), ("fsdp2", 2, 2), ("fsdp2", 3, 2)]
VIEWED: list[Setup] = [PLAIN, *(("deepspeed", stage, 2) for stage in (0, 2, 3)), ("fsdp2", 3, 2)]
KINDS = ["advantage", "infinite advantage", "behaviour log-probs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("deepspeed") / "model")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[Setup, list[dict[str, Any]]]:
    """What each rank returned."""
    return {
        setup: run_ranks(train, folder, **options_of(setup), versions=VERSIONS)
        for setup in [PLAIN, *DEEPSPEED, *FSDP]
    }


def options_of(setup: Setup) -> dict[str, Any]:
    return dict(zip(("backend", "stage", "ranks"), setup, strict=True))


def test_the_recorded_batches_are_uneven() -> None:
    batches = [batch_of(record_batch(v), v) for v in range(VERSIONS)]
    lags = {group_lag(b.version, item.meta) for b in batches for item in b.items}
    assert lags == {0, 1, 2}
    advantages = {a for b in batches for item in b.items for a in item.advantages}
    assert 0.0 in advantages
    assert len(advantages) > 4
    lengths = {t.response_tokens for b in batches for item in b.items for t in item.meta.trajectories}
    assert len(lengths) == 24


@pytest.mark.parametrize("other", [*DEEPSPEED, *FSDP], ids=str)
def test_engines_and_stages_agree(runs: dict[Setup, list[dict[str, Any]]], other: Setup) -> None:
    expected, found = runs[PLAIN][0], runs[other][0]
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
    difference = max(np.abs(found["parameters"][n] - p).max() for n, p in expected["parameters"].items())
    assert difference <= 1e-5
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-3, abs=1e-6)


def test_the_runs_really_moved_and_were_clipped(
    folder: Path, runs: dict[Setup, list[dict[str, Any]]]
) -> None:
    run = runs[PLAIN][0]
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = max(np.abs(start[n].numpy() - p).max() for n, p in run["parameters"].items())
    assert moved > 1e-3
    assert max(run["norms"]) > 0.05
    assert run["lrs"][:4] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


@pytest.mark.parametrize("key", VIEWED, ids=str)
def test_every_view_of_the_weights_is_the_same(
    folder: Path, runs: dict[Setup, list[dict[str, Any]]], key: Setup
) -> None:
    first, *others = runs[key]
    for other in others:
        assert other["checksum"] == first["checksum"]
        assert other["buckets"] is None
    # Tied weights travel once.
    assert "lm_head.weight" not in first["parameters"]
    assert [n for names in first["bucket_names"] for n in names] == list(first["parameters"])
    assert len(first["buckets"]) > 1
    for names, bucket in zip(first["bucket_names"], first["buckets"], strict=True):
        np.testing.assert_array_equal(bucket, np.concatenate([first["parameters"][n].ravel() for n in names]))
    exported = folder.parent / "-".join(["export", *map(str, key)])
    state = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    for name, parameter in first["parameters"].items():
        np.testing.assert_array_equal(state[name].numpy(), parameter)
    np.testing.assert_array_equal(state["lm_head.weight"].numpy(), state["model.embed_tokens.weight"].numpy())
    assert AutoTokenizer.from_pretrained(exported)("w3 w7")["input_ids"] == [3, 7]


@pytest.mark.parametrize("key", VIEWED, ids=str)
def test_scores_are_those_of_a_forward_pass_on_every_rank(
    folder: Path, runs: dict[Setup, list[dict[str, Any]]], key: Setup
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "-".join(["export", *map(str, key)])).eval()
    ids = torch.tensor(SCORED)
    with torch.inference_mode():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()
    for rank in runs[key]:
        np.testing.assert_allclose(rank["scores"], expected, atol=1e-5)


@pytest.mark.parametrize("setup", [*DEEPSPEED, ("fsdp2", 3, 2)], ids=str)
def test_an_update_that_is_not_finite_on_one_rank_leaves_every_bit_on_all(
    folder: Path, runs: dict[Setup, list[dict[str, Any]]], setup: Setup
) -> None:
    ranks = run_ranks(skip, folder, **options_of(setup), kinds=KINDS)
    for rank, undisturbed in zip(ranks, runs[setup], strict=True):
        assert [result.skipped for result in rank["results"]] == [True] * len(KINDS)
        for result in rank["results"]:
            assert result.metrics["actor/nonfinite_grads"] == 1.0
            assert result.metrics["actor/nonfinite_losses"] >= 1.0
            assert all(np.isfinite(value) for value in result.metrics.values())
        # Parameters and optimizer state: as after the good step before, and the next good step
        # ends where it would have ended without the bad ones.
        before, *after_bad, last = rank["digests"]
        assert after_bad == [before] * len(KINDS)
        assert before == undisturbed["digests"][0]
        assert last == undisturbed["digests"][1] != before


@pytest.mark.parametrize("setup", [*(DEEPSPEED[stage] for stage in (0, 2, 3)), ("fsdp2", 3, 2)], ids=str)
def test_bfloat16_follows_float32_and_skips_likewise(
    folder: Path, runs: dict[Setup, list[dict[str, Any]]], setup: Setup
) -> None:
    for run in run_ranks(train, folder, **options_of(setup), versions=3, dtype="bfloat16"):
        np.testing.assert_allclose(run["norms"], runs[PLAIN][0]["norms"][:3], rtol=0.03)
        assert len(set(run["digests"])) == 3
    for run in run_ranks(skip, folder, **options_of(setup), kinds=KINDS[:1], dtype="bfloat16"):
        before, after_bad, last = run["digests"]
        assert [result.skipped for result in run["results"]] == [True]
        assert after_bad == before != last
