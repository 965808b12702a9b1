"""What vLLM is started with: its arguments and its environment, from the config. Imports no vllm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.generators.vllm_options import worker_count
from asyncrl.placement import deal_cores

_KV_BLOCK = 128
"""Tokens in a block of vLLM's cache on CPU; a sequence takes whole blocks."""
_KV_MEMORY_SHARE = 0.4
"""Of the memory that is free at the start, what the cache may take at most on CPU."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """One engine: what ``VLLMEngine`` needs to know."""

    model: str
    dtype: str
    slots: int
    max_sequence: int
    """Tokens of the longest prompt with its answer: vLLM's ``max_model_len`` unless ``options`` has one."""
    device: str = "auto"
    threads: int = 1
    cores: tuple[int, ...] | None = None
    """Cores to bind vLLM's workers to, on CPU; None: unbound, with ``threads`` each."""
    trust_remote_code: bool = False
    seed: int = 0
    shares_device: bool = False
    """It takes turns with a learner on its device, asleep in the other's turn and at the start."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``generators.vllm``: more arguments of vLLM, by its own names."""

    @property
    def max_model_len(self) -> int:
        return int(self.options.get("max_model_len") or self.max_sequence)

    @property
    def workers(self) -> int:
        return worker_count(self.options)

    @property
    def prefix_caching(self) -> bool:
        return bool(self.options.get("enable_prefix_caching", True))


def environment(settings: VLLMSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that have to be set before vllm is imported; some of ``inherited`` stay as they are."""
    return {
        # vLLM's workers inherit threads and locks by a fork; a fresh process has neither.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Its warnings at each start are of options that we chose: set this to see them.
        "VLLM_LOGGING_LEVEL": inherited.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # torch's own are of how vLLM binds memory, and of connections that end with a run.
        "TORCH_CPP_LOG_LEVEL": inherited.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": inherited.get("VLLM_NO_USAGE_STATS", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": _bindings(settings, inherited),
        "OMP_NUM_THREADS": str(settings.threads),
    }


def _bindings(settings: VLLMSettings, inherited: Mapping[str, str]) -> str:
    if settings.cores is None:
        return inherited.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    dealt = deal_cores(settings.cores, settings.workers)
    return "|".join(",".join(map(str, cores)) for cores in dealt if cores)


def cpu_cache_bytes(settings: VLLMSettings, available: int) -> int:
    """Bytes of keys and values that let every slot hold a longest sequence, on CPU, for each worker.

    vLLM's own default is a share of all memory, whoever else uses it. At most 0.4 of ``available``.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = 4 if settings.dtype == "float32" else 2
    per_token = 2 * config.num_hidden_layers * heads * width * item
    blocks = -(-settings.max_model_len // _KV_BLOCK)
    wanted = (settings.slots + 1) * blocks * _KV_BLOCK * per_token
    return int(min(wanted, _KV_MEMORY_SHARE * available / settings.workers))


def has_tokenizer(model: str) -> bool:
    """Whether a model folder has a tokenizer; a name on the hub is taken to have one."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / n).exists() for n in _TOKENIZER_FILES)


_TOKENIZER_FILES: Sequence[str] = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
