"""Ranks that share the work on the same samples: sequences (Ulysses), layers (AutoTP).

What they compute together is what one rank computes alone: gradients, metrics, weights, pushes, state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.errors import ConfigError
from tests.e2e.deepspeed_worker import gradients, lone_gradient, run_ranks, skip, train
from tests.e2e.push_worker import push_to_a_receiver_that_dies
from tests.e2e.runs import assert_sound, finish
from tests.e2e.state_worker import resume, train_and_save
from tests.e2e.test_engine_gradients import by_autograd
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import VOCABULARY

SEQUENCE: dict[str, Any] = {"sequence_parallel": 2}
TENSOR: dict[str, Any] = {"tensor_parallel": 2}
SPLITS = [(3, 60), (1, 10_000)]
"""(groups, micro_batch_tokens), as in ``test_engine_gradients``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="module")
def references(folder: Path) -> list[dict[str, np.ndarray]]:
    return [by_autograd(folder, groups) for groups, _ in SPLITS]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one rank makes of three steps."""
    (found,) = run_ranks(train, folder, stage=1, ranks=1, versions=3)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("sharing", "stage", "ranks"),
    [
        pytest.param(SEQUENCE | {"checkpointing": True}, 0, 2, id="sequence, ZeRO-0, checkpointing"),
        pytest.param(SEQUENCE, 2, 4, id="sequence, ZeRO-2, two replicas"),
        pytest.param(SEQUENCE, 3, 2, id="sequence, ZeRO-3"),
        pytest.param(TENSOR | {"checkpointing": True}, 0, 2, id="tensor, ZeRO-0, checkpointing"),
        pytest.param(TENSOR, 2, 4, id="tensor, ZeRO-2, two replicas"),
    ],
)
def test_gradient_is_that_of_plain_autograd(
    folder: Path, references: list[dict[str, np.ndarray]], sharing: dict[str, Any], stage: int, ranks: int
) -> None:
    by_rank = run_ranks(gradients, folder, stage=stage, ranks=ranks, splits=SPLITS, **sharing)
    for split, reference in enumerate(references):
        rows = [found[split][0] for found in by_rank]
        assert rows[0] == rows[1], "ranks that share samples have the same micro-batches"
        largest = max(np.abs(g).max() for g in reference.values())
        for found in by_rank:
            assert found[split][1].keys() == reference.keys()
            for name, expected in reference.items():
                difference = np.abs(found[split][1][name] - expected).max()
                assert difference <= 1e-5 * largest, (split, name, difference, largest)


@pytest.mark.parametrize("sharing", [SEQUENCE, TENSOR], ids=["sequence", "tensor"])
def test_steps_metrics_and_all_that_leaves_the_learner_are_those_of_one_rank(
    folder: Path, alone: dict[str, Any], sharing: dict[str, Any]
) -> None:
    first, second = run_ranks(train, folder, stage=1, ranks=2, versions=3, **sharing)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"].keys() == alone["metrics"].keys()
    for name, value in alone["metrics"].items():
        # Counted once, though two ranks know of each sample.
        assert first["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    np.testing.assert_allclose(first["norms"], alone["norms"], rtol=1e-4)
    np.testing.assert_allclose(first["scores"], alone["scores"], atol=1e-4)
    assert first["checksum"] == second["checksum"]
    for name, parameter in alone["parameters"].items():
        np.testing.assert_allclose(first["parameters"][name], parameter, atol=1e-5)
    assert second["buckets"] is None
    for names, bucket in zip(first["bucket_names"], first["buckets"], strict=True):
        whole = np.concatenate([first["parameters"][name].ravel() for name in names])
        np.testing.assert_array_equal(bucket, whole)
    exported = AutoModelForCausalLM.from_pretrained(folder.parent / "export-deepspeed-1-2").state_dict()
    for name, parameter in first["parameters"].items():
        np.testing.assert_array_equal(exported[name].numpy(), parameter)


def test_bfloat16_is_close(folder: Path) -> None:
    run: dict[str, Any] = {"stage": 2, "versions": 2, "dtype": "bfloat16"}
    (alone,) = run_ranks(train, folder, ranks=1, **run)
    for sharing in (SEQUENCE, TENSOR):
        found, _ = run_ranks(train, folder, ranks=2, **run, **sharing)
        np.testing.assert_allclose(found["norms"], alone["norms"], rtol=0.02)
        np.testing.assert_allclose(found["scores"], alone["scores"], atol=0.1)


@pytest.mark.parametrize("sharing", [SEQUENCE, TENSOR], ids=["sequence", "tensor"])
def test_a_bad_update_is_skipped_by_all_of_them(folder: Path, sharing: dict[str, Any]) -> None:
    for found in run_ranks(skip, folder, stage=0, ranks=2, kinds=["advantage"], **sharing):
        before, after, last = found["digests"]
        assert found["results"][0].skipped
        assert before == after != last


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The state after two of four steps, of one rank and of two that divide layers; and what came after."""
    found = {}
    for name, (ranks, sharing) in {"one rank": (1, {}), "tensor": (2, TENSOR)}.items():
        target = folder.parent / f"state of {name}"
        first, *_ = run_ranks(
            train_and_save, folder, stage=2, ranks=ranks, end=4, save_at=2, target=target, **sharing
        )
        found[name] = target, first
    return found


@pytest.mark.parametrize(
    ("before", "ranks", "sharing"),
    [
        pytest.param("tensor", 2, TENSOR, id="tensor to tensor"),
        pytest.param("tensor", 2, SEQUENCE, id="tensor to sequence"),
        pytest.param("one rank", 2, TENSOR, id="one rank to tensor"),
    ],
)
def test_state_goes_on_whoever_shares_the_work(
    folder: Path,
    saved: dict[str, tuple[Path, dict[str, Any]]],
    before: str,
    ranks: int,
    sharing: dict[str, Any],
) -> None:
    source, expected = saved[before]
    found, *_ = run_ranks(resume, folder, stage=2, ranks=ranks, start=2, end=4, source=source, **sharing)
    if before == "tensor" and sharing == TENSOR:
        assert found["digests"] == expected["digests"][2:], "masters, moments and counts, to the bit"
    np.testing.assert_allclose(found["norms"], expected["norms"][2:], rtol=1e-4)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, atol=1e-5)


def test_no_rank_is_left_waiting_when_a_receiver_dies(folder: Path) -> None:
    first, second = run_ranks(push_to_a_receiver_that_dies, folder, stage=1, ranks=2, overlap=False, **TENSOR)
    assert "sending version 0" in first["failure"]
    assert second["failure"] is None
    assert first["sent"] == (first["held"], first["held"])


def test_another_model_has_the_gradient_of_one_rank(tmp_path: Path) -> None:
    """A norm of each head, an output head of its own, and an inner width that two ranks cannot halve."""
    torch.manual_seed(1)
    place = save_tiny_policy(tmp_path / "other")
    Qwen3ForCausalLM(config(Qwen3Config, intermediate_size=129, head_dim=16)).save_pretrained(place)
    (expected,) = run_ranks(gradients, place, stage=1, ranks=1, splits=SPLITS)
    ranks = [
        *run_ranks(gradients, place, stage=1, ranks=2, splits=SPLITS, **SEQUENCE),
        *run_ranks(gradients, place, stage=1, ranks=2, splits=SPLITS, **TENSOR),
    ]
    for found in ranks:
        for (_, whole), (_, shared) in zip(expected, found, strict=True):
            largest = max(np.abs(g).max() for g in whole.values())
            for name, gradient in whole.items():
                assert np.abs(shared[name] - gradient).max() <= 1e-5 * largest, name


def test_a_model_that_looks_back_only_so_far_is_refused(tmp_path: Path) -> None:
    place = save_tiny_policy(tmp_path / "sliding")
    MistralForCausalLM(config(MistralConfig, sliding_window=4)).save_pretrained(place)
    with pytest.raises(ConfigError, match=r"sequence_parallel: found 2 .* layers of sliding_attention"):
        run_ranks(gradients, place, stage=1, ranks=2, splits=SPLITS, **SEQUENCE)


def test_one_sample_on_three_ranks_has_the_gradient_of_one_rank(folder: Path) -> None:
    ((count, expected),) = run_ranks(lone_gradient, folder, stage=2, ranks=1, advantage=1.5)
    assert count == 1
    found = run_ranks(lone_gradient, folder, stage=2, ranks=3, advantage=1.5)
    assert sorted(count for count, _ in found) == [0, 0, 1]
    largest = max(np.abs(g).max() for g in expected.values())
    assert largest > 0
    for _, shared in found:
        for name, gradient in expected.items():
            assert np.abs(shared[name] - gradient).max() <= 1e-5 * largest, name


def test_a_run_goes_on_when_its_ranks_share_something_else(tmp_path: Path) -> None:
    """Real actors, pushes and checkpoints: layers divided for two steps, then sequences."""
    settings = ("learner.ranks=2", "model.create.kv_heads=2", "weight_sync.canary_every=1", "eval.every=0")
    finish(tmp_path, *settings, "run.steps=2", "learner.tensor_parallel=2")
    run = finish(tmp_path, *settings, "run.steps=4", "learner.sequence_parallel=2")
    assert "learner.tensor_parallel was 2 and is 1 from here on" in run.text
    assert_sound(run, max_staleness=2, capacity=4)
    assert [line["policy_version"] for line in run.metrics] == [0, 1, 2, 3, 4]
    # Every push had the learner's own log-probs, whoever had which part of the weights.
    assert all(line.get("weight_sync/canary_diff_max", 0) < 1e-3 for line in run.metrics)
    assert run.metrics[-1]["ledger/trained"] == 8


def config(kind: Any, **settings: Any) -> Any:
    """Of a model like ``save_tiny_policy``'s, with a head of its own."""
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        **{"intermediate_size": 128, **settings},
    )
