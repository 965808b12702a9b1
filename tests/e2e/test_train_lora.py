"""Whole runs that train an adapter: every push proven by the canary, and what is left behind."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from .runs import Run, assert_sound, finish

if find_spec("peft") is None and os.environ.get("CI") != "true":
    pytest.skip("peft is not installed: pip install 'asyncrl[lora]'", allow_module_level=True)

STEPS = 16


def proven_differences(run: Run) -> list[float]:
    """The largest difference of each canary; the last line has none where nobody is sent that version."""
    name = "weight_sync/canary_diff_max"
    return [line[name] for line in run.metrics if name in line]


def test_a_run_with_an_adapter_learns_and_leaves_model_and_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    run = finish(
        tmp_path,
        f"run.steps={STEPS}",
        "learner.lora={rank: 8, alpha: 16}",
        "learner.lr=2e-2",
        "learner.micro_batch_tokens=512",
        "rollout={group_size: 8, groups_per_step: 4, max_new_tokens: 16}",
        "algorithm.kl=loss",
        "reference.place=lora_base",
        "weight_sync={overlap: true, canary_every: 1}",
        "data.eval=null",
        name="lora",
    )
    assert_sound(run, max_staleness=2, capacity=8)
    lines = run.metrics[1:]
    proven = proven_differences(run)
    assert len(proven) >= STEPS - 2
    assert max(proven) < 1e-3
    rewards = [line["reward/mean"] for line in lines]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.1, rewards
    assert abs(lines[0]["actor/reference_kl"]) < 1e-5 < lines[-1]["actor/reference_kl"]

    (hf,) = (run.folder / "checkpoints").glob(f"step_{STEPS}/hf")
    settings = json.loads((hf / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (8, 16.0, 0.0)
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    start = {name: parameter.clone() for name, parameter in base.named_parameters()}
    merged = dict(PeftModel.from_pretrained(base, hf / "adapter").merge_and_unload().named_parameters())
    written = dict(AutoModelForCausalLM.from_pretrained(hf).named_parameters())
    assert written.keys() == merged.keys() == start.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in merged.items())
    moved = {name.split(".")[-2] for name, tensor in written.items() if not torch.equal(tensor, start[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_generators_that_are_sent_adapters_alone_compute_what_the_learner_does(tmp_path: Path) -> None:
    run = finish(
        tmp_path,
        "run.steps=3",
        "learner={lora: {target_modules: [q_proj, down_proj]}, lr: 2e-2, ranks: 2, zero_stage: 3}",
        "generators.replicas=2",
        "weight_sync={adapter_only: true, overlap: true, canary_every: 1}",
        "data.eval=null",
        name="adapters",
    )
    assert_sound(run, max_staleness=2, capacity=4)
    proven = proven_differences(run)
    assert len(proven) >= 2
    assert max(proven) < 1e-3
