"""vLLM's words for what a request asks for. vLLM is imported by what is called here, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.generators.vllm_answers import request_seed
from asyncrl.types import GenerationRequest


def sampling_parameters(request: GenerationRequest, eos: Sequence[int]) -> Any:
    """vLLM's ``SamplingParams`` for a request; ``eos`` end a sequence."""
    from vllm import SamplingParams as VLLMSampling
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return VLLMSampling(
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request_seed(request.key, request.given),
        stop=list(sampling.stop),
        include_stop_str_in_output=bool(sampling.stop),
        # EOS comes from the model's files, as for the torch engine, and not from the tokenizer.
        ignore_eos=True,
        stop_token_ids=None if sampling.ignore_eos else list(eos),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> Any:
    """Likewise for the log-probs of a prompt: one token is sampled, which vLLM cannot do without."""
    from vllm import SamplingParams as VLLMSampling
    from vllm.sampling_params import RequestOutputKind

    return VLLMSampling(
        max_tokens=1,
        temperature=1.0,
        seed=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_of(token_ids: Sequence[int], salt: str | None) -> Any:
    """vLLM's prompt of tokens; ``salt``: of the blocks of the prefix cache that it may share."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids), cache_salt=salt)
