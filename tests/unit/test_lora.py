"""Adapters on small models: what is merged is what the adapter computes, and what peft would merge."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from asyncrl.check import require_lora
from asyncrl.config import Config, LearnerSection, LoraSection
from asyncrl.errors import ConfigError
from asyncrl.learners.lora import LoraAdapter
from asyncrl.learners.policy import manifest_of

from .tiny_models import tiny_gpt2, tiny_llama, tiny_qwen2

needs_peft = pytest.mark.skipif(
    find_spec("peft") is None and os.environ.get("CI") != "true",
    reason="peft is not installed: pip install 'asyncrl[lora]'",
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


def adapted(model: Any, **section: Any) -> LoraAdapter:
    """An adapter that adds something: B is 0 at the start."""
    adapter = LoraAdapter(model, LoraSection(rank=4, alpha=8, **section))
    for seed, pair in enumerate(adapter.pairs.values()):
        generator = torch.Generator().manual_seed(seed)
        pair.b.data.copy_(0.1 * torch.randn(pair.b.shape, generator=generator))
    return adapter


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@needs_peft
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
def test_the_merged_model_computes_what_the_adapter_does(make: Callable[[], Any]) -> None:
    model, plain = make(), make()
    names = [spec.name for spec in manifest_of(plain)]
    adapter = adapted(model)
    base = adapter.base(model)
    assert list(base) == names
    assert not any(p.requires_grad for p in base.values())
    with adapter.off():
        torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=0)
    assert (logits(model) - logits(plain)).abs().max() > 0.01
    held = {name: parameter.clone() for name, parameter in base.items()}
    for name, parameter in plain.named_parameters():
        pair = adapter.pairs.get(name)
        if pair is not None:
            parameter.data = pair.merge(base[name].detach(), torch.float32)
    assert all(torch.equal(base[name], kept) for name, kept in held.items())
    # In float64, where only the merged weights' own rounding differs.
    torch.testing.assert_close(
        logits(copy.deepcopy(plain).double()), logits(model.double()), rtol=0, atol=1e-6
    )
    merged = adapter._peft.float().merge_and_unload().state_dict()
    for name, parameter in plain.named_parameters():
        assert torch.equal(merged[name], parameter), name


@needs_peft
def test_in_bfloat16_the_sum_is_rounded_once() -> None:
    model = tiny_llama().bfloat16()
    adapter = adapted(model)
    base = adapter.base(model)
    assert {p.dtype for p in adapter.trained.values()} == {torch.bfloat16}
    for name, pair in adapter.pairs.items():
        exact = base[name].double() + pair.scaling * (pair.b.double() @ pair.a.double())
        found = pair.merge(base[name].detach(), torch.bfloat16)
        # Half of the distance between two neighbours, and what float32 cannot decide.
        assert ((found.double() - exact).abs() <= exact.abs() * (2**-8 * 1.001) + 1e-12).all(), name


@needs_peft
def test_all_linear_layers_but_the_head_get_one_from_the_seed_alone() -> None:
    model = tiny_llama(tied=True)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = LoraAdapter(model, LoraSection(rank=4))
    assert torch.equal(torch.get_rng_state(), state)
    names = {name.split(".")[-2] for name in first.pairs}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(first.pairs) == 14
    assert all(not pair.b.any() and pair.scaling == 8.0 for pair in first.pairs.values())
    torch.manual_seed(2)
    second, other = (LoraAdapter(tiny_llama(tied=True), LoraSection(rank=4, seed=seed)) for seed in (0, 1))
    for name, pair in first.pairs.items():
        assert torch.equal(pair.a, second.pairs[name].a)
        assert not torch.equal(pair.a, other.pairs[name].a)


@needs_peft
@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (("q_porj",), "q_proj, up_proj, v_proj"),
        (("q_proj", "lm_head"), "lm_head is the output embedding"),
        (("embed_tokens",), "model.embed_tokens is a Embedding"),
    ],
)
def test_layers_that_are_not_there_or_cannot_be_merged_are_refused(
    targets: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=r"^learner\.lora\.target_modules: found") as caught:
        LoraAdapter(tiny_llama(), LoraSection(target_modules=targets))
    assert says in str(caught.value)


def test_dropout_is_refused_and_the_message_says_why() -> None:
    with pytest.raises(ValidationError, match=r"dropout: found 0.05; expected 0, because"):
        LearnerSection.model_validate({"lora": {"dropout": 0.05}})
    for bad in (
        {"rank": 0},
        {"alpha": 0},
        {"target_modules": []},
        {"target_modules": ["all-linear", "q_proj"]},
    ):
        with pytest.raises(ValidationError):
            LoraSection.model_validate(bad)
    assert LearnerSection().lora is None
    assert LoraSection.model_validate({"target_modules": "q_proj"}).target_modules == ("q_proj",)


def test_without_peft_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[lora\]'"):
        LoraAdapter(nn.Linear(2, 2), LoraSection())
    monkeypatch.setattr("asyncrl.check.find_spec", lambda name: None)
    values: dict[str, Any] = {"model": {"create": {}}, "reward": {"functions": ["a:b"]}}
    values["data"] = {"train": "rows.jsonl", "max_prompt_tokens": 16}
    require_lora(Config.model_validate(values))
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[lora\]'"):
        require_lora(Config.model_validate({**values, "learner": {"lora": {}}}))
