"""``generators.vllm``: what of it can be judged without vllm.

Invariants:
- A key that asyncrl sets itself is refused, never overridden in silence.
- A way to share a model out that weights were never pushed into is refused.
- Everything else passes through under vLLM's own name; vLLM judges it at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWNED: Mapping[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "run.seed",
    "max_num_seqs": "generators.slots",
    "logprobs_mode": "",
    "generation_config": "",
    "override_generation_config": "",
    "weight_transfer_config": "",
    "worker_extension_cls": "",
    "disable_log_stats": "",
    "enable_log_requests": "",
    "use_tqdm_on_load": "",
    "distributed_executor_backend": "",
    "enable_sleep_mode": "placement.mode",
}
"""Arguments of vLLM that asyncrl sets, with the key to use instead; empty: nothing to choose."""

NEVER_RUN: Mapping[str, str] = {
    "pipeline_parallel_size": "use tensor_parallel_size, which divides every layer among the workers",
    "prefill_context_parallel_size": "use tensor_parallel_size",
    "decode_context_parallel_size": "use tensor_parallel_size",
    "enable_expert_parallel": "leave it out: workers then divide each expert",
    "enable_eplb": "leave it out",
    "nnodes": "leave it out: a replica is on one node",
}
"""Ways of vLLM to share a model out that no push of weights was tried with, and what to do instead."""
_DATA_PARALLEL = "data_parallel_"


def worker_count(options: Mapping[str, Any]) -> int:
    """Processes that share one replica's model: each is a rank of the push group."""
    return int(options.get("tensor_parallel_size", 1))


def option_problems(options: Mapping[str, Any], longest: int) -> list[str]:
    """What is wrong with ``generators.vllm`` that can be seen without vllm, as ``config_checks`` wants it.

    ``longest`` is the longest sequence of the run in tokens.
    """
    problems = []
    for name in sorted(set(options) & set(OWNED)):
        instead = f"set {OWNED[name]} instead" if OWNED[name] else "remove it"
        problems.append(f"generators.vllm.{name}: found it set, but asyncrl sets it itself: {instead}")
    for name, value in sorted(options.items()):
        if name.startswith(_DATA_PARALLEL):
            problems.append(
                f"generators.vllm.{name}: found {value!r}; expected it left out: vLLM's data "
                "parallelism was never run with pushes of weights; set generators.replicas: engines of "
                "their own, to which weights are pushed together"
            )
        elif name in NEVER_RUN and (value is True or value not in (1, False)):  # True equals 1
            problems.append(
                f"generators.vllm.{name}: found {value!r}; expected it left out: weights were never "
                f"pushed into a model that is divided that way; {NEVER_RUN[name]}"
            )
    for name in ("tensor_parallel_size", "max_model_len"):
        value = options.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"generators.vllm.{name}: found {value!r}; expected a whole number from 1")
    length = options.get("max_model_len")
    if isinstance(length, int) and 1 <= length < longest:
        problems.append(
            f"generators.vllm.max_model_len: found {length}; expected at least the longest prompt with the "
            f"longest answer, {longest} tokens: raise it, or leave it out"
        )
    return problems
