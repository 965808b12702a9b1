"""What is made of vLLM's final output, and what is not believed of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import GeneratorError
from asyncrl.generators.stopping import StopStrings
from asyncrl.generators.vllm_answers import completion_of, cut_across, partial_of, request_seed
from asyncrl.types import Completion, DrawKey

from .tiny_models import Letters


def final(
    tokens: list[int],
    spans: list[tuple[str, int, int]],
    *,
    logprobs: list[float] | None = None,
    reason: str | None = "length",
) -> Any:
    flat = SimpleNamespace(
        token_ids=list(tokens), logprobs=[-0.5] * len(tokens) if logprobs is None else logprobs
    )
    labels = [SimpleNamespace(version=v, start=start, end=end) for v, start, end in spans]
    answer = SimpleNamespace(token_ids=tokens, logprobs=flat, weight_versions=labels, finish_reason=reason)
    return SimpleNamespace(outputs=[answer])


def test_labels_become_one_version_a_token() -> None:
    got = completion_of("r", final([5, 6, 7, 8], [("3", 0, 1), ("5", 1, 4)]), [(3, 0), (4, 1), (5, 1)])
    assert got.token_ids.tolist() == [5, 6, 7, 8]
    assert got.versions.tolist() == [3, 5, 5, 5]
    assert got.logprobs.tolist() == [-0.5] * 4
    assert got.finish_reason == "length"


@pytest.mark.parametrize("start", [1, 3])
def test_a_label_that_is_one_token_off_is_an_error(start: int) -> None:
    with pytest.raises(GeneratorError, match=r"stamped token \d of 4 with version [34], but .* version [34]"):
        completion_of("r", final([5, 6, 7, 8], [("3", 0, start), ("4", start, 4)]), [(3, 0), (4, 2)])


def test_a_token_without_a_label_is_an_error() -> None:
    with pytest.raises(GeneratorError, match="token 1 of 2 with version -1"):
        completion_of("r", final([5, 6], [("3", 0, 1)]), [(3, 0)])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (final([5, 6], [("0", 0, 2)], logprobs=[-1.0]), "1 log-probs for 2 tokens"),
        (final([5, 6], [("0", 0, 2)], logprobs=[-1.0, float("nan")]), "1 of 2 log-probs are not finite"),
        (final([5], [("0", 0, 1)], reason="error"), "ended it with 'error'"),
    ],
)
def test_what_does_not_add_up_is_an_error(output: Any, words: str) -> None:
    with pytest.raises(GeneratorError, match=words):
        completion_of("r", output, [(0, 0)])


def test_an_aborted_request_without_a_token_holds_nothing() -> None:
    got = completion_of("r", final([], [], reason="abort"), [(0, 0)])
    assert (len(got.token_ids), got.finish_reason) == (0, "abort")


def test_seeds_are_63_bits_and_differ_with_each_part_of_the_key() -> None:
    keys = [
        DrawKey(1, 2, 3, 4),
        DrawKey(0, 2, 3, 4),
        DrawKey(1, 0, 3, 4),
        DrawKey(1, 2, 0, 4),
        DrawKey(1, 2, 3),
    ]
    seeds = [request_seed(key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(DrawKey(1, 2, 3, 4)) == seeds[0]


def test_a_continuation_draws_from_a_seed_of_its_own() -> None:
    key = DrawKey(1, 2, 3, 4)
    assert request_seed(key, 0) == request_seed(key)
    assert len({request_seed(key, given) for given in range(20)}) == 20


def running(tokens: list[int], logprobs: list[float]) -> Any:
    flat = SimpleNamespace(token_ids=list(tokens), logprobs=logprobs)
    return SimpleNamespace(
        detokenizer=SimpleNamespace(output_token_ids=tokens),
        logprobs_processor=SimpleNamespace(logprobs=flat),
    )


def test_what_a_running_request_has_is_stamped_by_our_counts() -> None:
    got = partial_of("r", running([5, 6, 7], [-0.5, -0.25, -1.0]), [(3, 0), (5, 2)])
    assert got.token_ids.tolist() == [5, 6, 7]
    assert got.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert got.versions.tolist() == [3, 3, 5]
    assert got.finish_reason == "abort"
    assert len(partial_of("r", running([], []), [(3, 0)]).token_ids) == 0
    with pytest.raises(GeneratorError, match="1 log-probs for 2 tokens"):
        partial_of("r", running([5, 6], [-0.5]), [(3, 0)])


@pytest.mark.parametrize("seam", [3, 4])
def test_a_stop_string_across_the_seam_ends_the_answer(seam: int) -> None:
    # ABCDEFG...: of CDE the engine that goes on from the seam sees only what lies after it.
    ids = np.arange(40, dtype=np.int32)
    answer = Completion(ids, -ids.astype(np.float32), ids + 1, "length")
    got = cut_across(answer, seam, StopStrings(("CDE", "nowhere"), Letters()))
    assert got.token_ids.tolist() == list(range(5))
    assert got.logprobs.tolist() == [-i for i in range(5)]
    assert got.versions.tolist() == [i + 1 for i in range(5)]
    assert got.finish_reason == "stop"
    assert cut_across(answer, seam, StopStrings(("CE", "nowhere"), Letters())) is answer
