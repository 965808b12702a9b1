"""Small random causal LMs, built in memory, and helpers to ask an engine for continuations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams

VOCAB = 48
DEADLINE_S = 15.0


def tiny_llama(
    seed: int = 0, *, kv_heads: int = 2, tied: bool = False, layers: int = 2, **options: Any
) -> LlamaForCausalLM:
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "eos_token_id": None,
        "bos_token_id": None,
        **options,
    }
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        **options,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def tiny_qwen2(seed: int = 0) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Learned positions, tied embeddings, fused attention weights, biases."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config).eval()


def request(
    uid: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    new: int = 12,
    ordinal: int = 0,
    sample: int = 0,
    **sampling: Any,
) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=new, **sampling)
    return GenerationRequest(uid, tuple(prompt), params, DrawKey(7, ordinal, sample))


def full_logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Logits (T, V) that one uncached forward pass gives for each token of the answer."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def full_logprobs(
    model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs (T,) of the answer's tokens by one uncached forward pass."""
    logprobs = torch.log_softmax(full_logits(model, prompt, answer) / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(list(answer))[:, None])[:, 0]


@asynccontextmanager
async def running(model: Any, **options: Any) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(model, **{"slots": 4, "max_sequence": 64, "device": "cpu", **options})
    await engine.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield engine
    finally:
        await engine.close()


class ForwardPasses:
    """Awaitable count of a model's forward passes with a head: those that sample a token."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._waiters: list[tuple[int, asyncio.Event]] = []
        model.register_forward_hook(self._passed)

    def _passed(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._pass)

    def _pass(self) -> None:
        self._count += 1
        for target, event in self._waiters:
            if self._count >= target:
                event.set()

    async def more(self, count: int) -> None:
        event = asyncio.Event()
        self._waiters.append((self._count + count, event))
        await event.wait()


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(ord("A") + i) for i in ids)
