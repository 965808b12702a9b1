"""What every engine asks of a request before it takes it, and how its answer is put together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.errors import RolloutError
from asyncrl.types import Completion, GenerationRequest


def check_request(
    request: GenerationRequest, *, limit: int, limit_text: str, remedy: str, vocab_size: int
) -> None:
    """Raise RolloutError for a request that can never be served.

    ``limit`` is the longest sequence in tokens; ``limit_text`` says whose limit it is, ``remedy`` which
    setting raises it.
    """
    sampling, prompt = request.sampling, request.prompt_ids
    if not prompt:
        raise RolloutError(f"request {request.uid} has an empty prompt; at least one token is needed")
    if sampling.max_new_tokens < 1:
        raise RolloutError(f"request {request.uid}: max_new_tokens is {sampling.max_new_tokens}, not >= 1")
    if request.max_tokens < 1:
        raise RolloutError(
            f"request {request.uid} brings {request.given} tokens of its answer along, but max_new_tokens is "
            f"{sampling.max_new_tokens}: nothing is left to sample"
        )
    total = len(prompt) + sampling.max_new_tokens
    if total > limit:
        raise RolloutError(
            f"request {request.uid} needs {total} tokens ({len(prompt)} of prompt and up to "
            f"{sampling.max_new_tokens} new), but {limit_text} {limit}: shorten the prompt, lower "
            f"max_new_tokens, or raise {remedy}"
        )
    _check_vocabulary(f"request {request.uid} has", prompt, vocab_size)
    if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
        raise RolloutError(
            f"request {request.uid}: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k "
            f"{sampling.top_k}; expected temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )


def check_scored(token_ids: Sequence[int], *, limit: int, vocab_size: int) -> None:
    """Raise RolloutError for tokens that can never be scored. ``limit`` is how many fit the engine."""
    if not 2 <= len(token_ids) <= limit:
        raise RolloutError(f"asked to score {len(token_ids)} tokens, expected 2 to {limit}")
    _check_vocabulary("asked to score", token_ids, vocab_size)


def _check_vocabulary(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RolloutError(
            f"{what} token ids from {min(token_ids)} to {max(token_ids)}, but the model's vocabulary has "
            f"{vocab_size}: was another tokenizer used?"
        )


def nothing_sampled() -> Completion:
    """What a request has that is aborted before its first token."""
    ids = np.zeros(0, dtype=np.int32)
    return Completion(ids, np.zeros(0, dtype=np.float32), ids.copy(), "abort")


def whole_answer(request: GenerationRequest, sampled: Completion) -> Completion:
    """The answer: the prefix that the request brought along, then what was sampled here."""
    prefix = request.prefix
    if prefix is None:
        return sampled
    return Completion(
        np.concatenate((prefix.token_ids, sampled.token_ids)),
        np.concatenate((prefix.logprobs, sampled.logprobs)),
        np.concatenate((prefix.versions, sampled.versions)),
        sampled.finish_reason,
        sampled.stay,
    )
