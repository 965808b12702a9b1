"""Between vLLM's terms and ours: the seed of a trajectory, and what a final output holds.

Imports no vllm: outputs are read by attribute.

Invariant: a completion's versions are vLLM's labels, and agree with our own counts at each swap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.errors import GeneratorError
from asyncrl.generators.requests import nothing_sampled
from asyncrl.generators.stopping import StopStrings
from asyncrl.types import Completion, DrawKey, FinishReason, Float32Array, Int32Array

_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def request_seed(key: DrawKey, given: int = 0) -> int:
    """The seed of one trajectory's draws, a pure function of its key: 63 bits, as vLLM takes them.

    vLLM's draws start from the seed with each request. One that continues an answer after ``given`` tokens
    takes another seed, lest it repeats the draws that these were made with.
    """
    words = f"{key.seed}:{key.ordinal}:{key.sample}:{key.attempt}" + (f":{given}" if given else "")
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1


def completion_of(uid: str, output: Any, starts: Sequence[tuple[int, int]]) -> Completion:
    """The completion that vLLM's final output holds. Raises GeneratorError for what does not add up.

    ``starts`` are version and index of its first token, for each version, by our own counts.
    """
    answer = output.outputs[0]
    if answer.finish_reason not in _FINISH:
        raise GeneratorError(f"request {uid}: vLLM ended it with {answer.finish_reason!r}")
    if not len(answer.token_ids):
        return nothing_sampled()
    token_ids, logprobs = _sampled(uid, answer.token_ids, answer.logprobs, starts)
    versions = _versions(answer.weight_versions, len(token_ids))
    counted = _counted(starts, len(token_ids))
    if not np.array_equal(versions, counted):
        first = int(np.flatnonzero(versions != counted)[0])
        raise GeneratorError(
            f"request {uid}: vLLM stamped token {first} of {len(token_ids)} with version "
            f"{versions[first]}, but by the counts at each swap it is of version {counted[first]}"
        )
    return Completion(token_ids, logprobs, versions, _FINISH[answer.finish_reason], _stay(output))


def _stay(output: Any) -> tuple[float, float] | None:
    """When vLLM had it in its batch: by the monotonic clock, as its scheduler stamps it."""
    times = getattr(output, "metrics", None)
    if times is None or not 0 < times.scheduled_ts <= times.last_token_ts:
        return None
    return times.scheduled_ts, times.last_token_ts


def partial_of(uid: str, state: Any, starts: Sequence[tuple[int, int]]) -> Completion:
    """What vLLM's state of a running request holds so far. Versions are by our own counts.

    The output handler takes in a step's token and its log-prob without an await in between, so that on its
    loop there is one for each.
    """
    token_ids = state.detokenizer.output_token_ids
    if not len(token_ids):
        return nothing_sampled()
    ids, logprobs = _sampled(uid, token_ids, state.logprobs_processor.logprobs, starts)
    return Completion(ids, logprobs, _counted(starts, len(ids)), "abort")


def cut_across(answer: Completion, seam: int, stop: StopStrings) -> Completion:
    """The answer up to a stop string that lies across ``seam``: vLLM looks at what it sampled itself only."""
    end = stop.end_across(answer.token_ids.tolist(), seam)
    if end is None:
        return answer
    return replace(
        answer,
        token_ids=answer.token_ids[:end],
        logprobs=answer.logprobs[:end],
        versions=answer.versions[:end],
        finish_reason="stop",
    )


def _sampled(
    uid: str, tokens: Sequence[int], flat: Any, starts: Sequence[tuple[int, int]]
) -> tuple[Int32Array, Float32Array]:
    """Token ids (T,) and their log-probs (T,); ``flat`` is vLLM's FlatLogprobs."""
    token_ids = np.array(tokens, dtype=np.int32)
    # One candidate a position: the sampled token's own.
    logprobs = np.array(flat.logprobs, dtype=np.float32)
    if len(logprobs) != len(token_ids) or flat.token_ids != list(tokens):
        raise GeneratorError(
            f"request {uid}: vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens, "
            "expected one for each sampled token"
        )
    broken = int((~np.isfinite(logprobs)).sum())
    if broken:
        raise GeneratorError(
            f"request {uid}: {broken} of {len(logprobs)} log-probs are not finite at version "
            f"{starts[-1][0]}: are the weights finite?"
        )
    return token_ids, logprobs


def scores_of(uid: str, token_ids: Sequence[int], output: Any) -> Float32Array:
    """Log-probs (T - 1,) of all but the first of a prompt's T tokens. Raises GeneratorError if some lack."""
    # Nothing for the first token, then one candidate a position: the prompt's own.
    found = output.prompt_logprobs
    if found is None or list(found.token_ids) != list(token_ids[1:]):
        count = 0 if found is None else len(found.token_ids)
        raise GeneratorError(
            f"request {uid}: vLLM gave {count} prompt log-probs for {len(token_ids)} tokens, expected one "
            "for each token but the first"
        )
    return np.array(found.logprobs, dtype=np.float32)


def _versions(spans: Any, count: int) -> Int32Array:
    """vLLM's labels as one version a token, (T,)."""
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans or ():
        versions[span.start : span.end] = int(span.version)
    return versions


def _counted(starts: Sequence[tuple[int, int]], count: int) -> Int32Array:
    """Our own counts as one version a token, (T,)."""
    versions = np.full(count, -1, dtype=np.int32)
    for version, start in starts:
        versions[start:] = version
    return versions
