"""Sequences that share a row: which models keep them apart, and that others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.learners.collate import collate
from asyncrl.learners.packed import LEAK, packing_differences, require_exact_packing
from asyncrl.learners.policy import prepare_policy, selected_logits
from tests.unit.recorded_batches import VOCABULARY, record_batch, shares

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
EXACT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    # Windows that are shorter than the sequences.
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    # Learned positions.
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
}
LEAKING: dict[str, dict[str, Any]] = {
    # A state that goes from token to token, in all layers or in some.
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    # Positions by distance alone, so that the mask is never told where a sequence starts.
    "bloom": {"n_head": 4, "n_layer": 2},
}


def tiny(family: str, options: dict[str, Any], attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    choice = {} if family in LEAKING else {"attn_implementation": attention}
    return prepare_policy(AutoModelForCausalLM.from_config(config, **choice))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", EXACT)
def test_log_probs_of_packed_answers_are_those_of_padded_ones(family: str, attention: str) -> None:
    model = tiny(family, EXACT[family], attention)
    (share,) = shares(record_batch(2, groups=2), 2, 1, 10**6)
    found = []
    for layout in ("padded", "packed", "one_row"):
        batch = collate(share.samples, 2, CPU, layout)  # type: ignore[arg-type]
        with torch.no_grad():
            logits = selected_logits(model, batch.input_ids, batch.positions, batch.position_ids)
        found.append(logits.log_softmax(-1))
    padded, packed, one_row = found
    assert (packed - padded).abs().max() < 5e-6
    # In a single row gpt2 would run out of learned positions, did they not start again.
    assert (one_row - padded).abs().max() < 5e-6
    require_exact_packing(model, "float32", CPU)


@pytest.mark.parametrize("family", LEAKING)
def test_a_model_that_leaks_is_refused(family: str) -> None:
    model = tiny(family, LEAKING[family])
    assert packing_differences(model, VOCABULARY, CPU)[1] > 10 * LEAK
    with pytest.raises(
        ConfigError, match=r"learner\.packing: found true with .*set learner\.packing to false"
    ):
        require_exact_packing(model, "float32", CPU)
    # In bfloat16 too, where rounding is as large as a leak may be.
    with pytest.raises(ConfigError, match="in bfloat16"):
        require_exact_packing(model.to(torch.bfloat16), "bfloat16", CPU)


def test_a_model_without_positions_to_give_is_refused() -> None:
    class Deaf(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny("llama", {})
            self.config = self.inner.config

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.inner.get_output_embeddings()

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    with pytest.raises(ConfigError, match=r"Deaf, which takes no position_ids"):
        require_exact_packing(Deaf(), "float32", CPU)


def test_rounding_in_bfloat16_is_no_leak() -> None:
    model = tiny("llama", {"num_hidden_layers": 30}).to(torch.bfloat16)
    apart, leak = packing_differences(model, VOCABULARY, CPU)
    assert apart > 0
    assert leak == 0
    require_exact_packing(model, "bfloat16", CPU)
