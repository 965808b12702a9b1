"""Adapters through the DeepSpeed learner: gradients, frozen weights, and what is pushed and exported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.learners.policy import manifest_of
from asyncrl.weight_sync.verify import state_checksum
from tests.e2e.deepspeed_worker import TEMPERATURE, run_ranks
from tests.e2e.tiny_policy import save_tiny_policy
from tests.unit.recorded_batches import KL_COEF, record_batch, shares

if find_spec("peft") is None and os.environ.get("CI") != "true":
    pytest.skip("peft is not installed: pip install 'asyncrl[lora]'", allow_module_level=True)

from peft import PeftModel

from tests.e2e.lora_worker import train_adapter

VERSIONS = 2
KEYS = [
    (0, 1, "float32"),
    (1, 2, "float32"),
    (2, 2, "float32"),
    (3, 2, "float32"),
    (2, 2, "bfloat16"),
]
"""(ZeRO stage, ranks, dtype)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("lora") / "model")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[tuple[int, int, str], list[dict[str, Any]]]:
    """What each rank returned. Stage 1 computes activations again, stage 2 packs."""
    return {
        (stage, ranks, dtype): run_ranks(
            train_adapter,
            folder,
            stage=stage,
            ranks=ranks,
            dtype=dtype,
            packing=stage == 2,
            lr=1e-2,
            versions=VERSIONS,
        )
        for stage, ranks, dtype in KEYS
    }


def exported(folder: Path, key: tuple[int, int, str]) -> Path:
    return folder.parent / "hf-{}-{}-{}".format(*key)


def answer_logprobs(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    logits = model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[prompt - 1 :, 0]


def by_autograd(folder: Path, adapter: Path) -> dict[str, np.ndarray]:
    """Gradient of the adapter by peft and autograd alone, row by row, unpadded, in float64.

    The loss is that of a step with the KL (k3) to the base in it.
    """
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).double()
    (share,) = shares(record_batch(VERSIONS), VERSIONS, 1, 10**6)
    for sample in share.samples:
        t = sample.trajectory
        tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        logprobs = answer_logprobs(model, tokens, len(t.prompt_ids))
        with torch.no_grad(), model.disable_adapter():
            reference = answer_logprobs(model, tokens, len(t.prompt_ids))
        kl = (reference - logprobs).expm1() - (reference - logprobs)
        weights = (logprobs.detach() - torch.from_numpy(t.logprobs)).exp().clamp(max=2.0)
        losses = -sample.advantage * weights * logprobs + KL_COEF * kl
        loss = losses[torch.from_numpy(t.loss_mask)].sum()
        (loss / share.loss_tokens).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("key", KEYS[:-1], ids=str)
def test_gradients_of_the_adapters_are_those_of_plain_autograd(
    folder: Path, runs: dict[tuple[int, int, str], list[dict[str, Any]]], key: tuple[int, int, str]
) -> None:
    reference = by_autograd(folder, exported(folder, key) / "adapter")
    assert max(np.abs(gradient).max() for gradient in reference.values()) > 1e-3
    for rank in runs[key]:
        assert rank["frozen_gradients"] == 0
        assert rank["gradients"].keys() == reference.keys()
        for name, expected in reference.items():
            np.testing.assert_allclose(rank["gradients"][name], expected, rtol=0, atol=1e-6, err_msg=name)


def test_adapters_are_trained_by_ranks_that_share_sequences(folder: Path) -> None:
    ranks = run_ranks(
        train_adapter, folder, stage=0, ranks=2, sequence_parallel=2, lr=1e-2, versions=VERSIONS
    )
    reference = by_autograd(folder, exported(folder, (0, 2, "float32")) / "adapter")
    for rank in ranks:
        assert rank["gradients"].keys() == reference.keys()
        for name, expected in reference.items():
            np.testing.assert_allclose(rank["gradients"][name], expected, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_base_keeps_its_bits_and_the_adapters_alone_have_optimizer_state(
    folder: Path, runs: dict[tuple[int, int, str], list[dict[str, Any]]], key: tuple[int, int, str]
) -> None:
    start = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, key[2])).named_parameters()
    )
    for rank in runs[key]:
        assert list(rank["base"]) == list(start)
        for name, parameter in start.items():
            np.testing.assert_array_equal(rank["start"][name], parameter.detach().float().numpy())
            np.testing.assert_array_equal(rank["base"][name], rank["start"][name])
        assert all(adapter.any() for adapter in rank["adapter"].values()), "an adapter never moved"
        # The base is the reference: at first the policy is its equal.
        distances = [metrics["actor/reference_kl"] for metrics in rank["metrics"]]
        assert abs(distances[0]) < 1e-6 < distances[1]
        # Adapters that add nothing change no bit.
        assert rank["start_checksum"] == state_checksum(start.items()) != rank["checksum"]
    trained = sum(adapter.size for adapter in runs[key][0]["adapter"].values())
    held = sum(rank["optimizer"] for rank in runs[key])
    copies = 1 if key[0] > 0 else key[1]
    assert trained * copies <= held <= trained * copies * 1.1 < sum(p.numel() for p in start.values())


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_view_of_the_weights_is_pefts_own_merge(
    folder: Path, runs: dict[tuple[int, int, str], list[dict[str, Any]]], key: tuple[int, int, str]
) -> None:
    dtype = getattr(torch, key[2])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    manifest = manifest_of(base)
    adapter = exported(folder, key) / "adapter"
    model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)
    merged = dict(model.merge_and_unload().named_parameters())
    written = dict(
        AutoModelForCausalLM.from_pretrained(exported(folder, key), dtype=dtype).named_parameters()
    )
    for rank in runs[key]:
        assert rank["manifest"] == manifest
        assert rank["checksum"] == runs[key][0]["checksum"]
        assert list(rank["named"]) == list(merged) == list(written)
        for name, tensor in rank["named"].items():
            assert torch.equal(written[name], tensor), name
            if dtype == torch.float32:
                assert torch.equal(merged[name], tensor), name
            else:
                # peft rounds what the adapter adds before it adds it.
                torch.testing.assert_close(merged[name], tensor, rtol=2**-6, atol=2**-10)


@pytest.mark.parametrize("other", KEYS[1:-1], ids=str)
def test_stages_and_ranks_agree(
    runs: dict[tuple[int, int, str], list[dict[str, Any]]], other: tuple[int, int, str]
) -> None:
    expected, found = runs[KEYS[0]][0], runs[other][0]
    for of_step, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert of_step["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=1e-4)
    for name, adapter in expected["adapter"].items():
        np.testing.assert_allclose(found["adapter"][name], adapter, rtol=0, atol=1e-4)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_pushes_deliver_the_merged_weights_of_their_version(
    runs: dict[tuple[int, int, str], list[dict[str, Any]]], key: tuple[int, int, str]
) -> None:
    first, *others = runs[key]
    # Between two updates, and from copies while the weights have moved on.
    assert first["sent"] == [(first["checksum"], first["checksum"])] * 2
    assert first["later"] != first["checksum"]
    assert all(rank["sent"] == [None, None] for rank in others)
    for checksum, sent in first["sent_adapters"]:
        assert sent == (checksum, checksum)
