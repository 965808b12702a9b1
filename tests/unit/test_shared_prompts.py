"""Answers that share their prompt: the same log-probs and gradients as with a prompt each, for less work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.attention import shared_rows
from asyncrl.attention.shared_rows import SharedRows, use_shared_rows
from asyncrl.config import AlgorithmSection
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.learners.base import RankStep
from asyncrl.learners.collate import collate
from asyncrl.learners.layout import Layout, lay_out_shared, shared_row
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.packed import require_exact_sharing, sharing_differences
from asyncrl.learners.packing import pack_prompts, plan_step
from asyncrl.learners.policy import selected_logits
from asyncrl.types import TrajectoryMeta
from tests.unit.recorded_batches import (
    MAX_AGE,
    VOCABULARY,
    batch_of,
    one_prompt_a_group,
    record_batch,
    shares,
)
from tests.unit.test_packed import EXACT, LEAKING, tiny
from tests.unit.test_packing import groups as group_lists

CPU = torch.device("cpu")
FULL = sorted(family for family, options in EXACT.items() if "sliding_window" not in options)


def step(layout: Layout, micro_batch_tokens: int = 10**6) -> RankStep:
    groups = one_prompt_a_group(record_batch(version=2, groups=3))
    (share,) = shares(groups, 2, 1, micro_batch_tokens, layout=layout)
    return share


def gradient(model: Any, share: RankStep, layout: Layout) -> torch.Tensor:
    objective, tally = Objective(AlgorithmSection(), temperature=0.8, max_staleness=MAX_AGE), Tally(CPU)
    model.zero_grad()
    for rows in share.micro_batches:
        batch = collate([share.samples[row] for row in rows], share.version, CPU, layout)
        logits = selected_logits(model, batch.input_ids, batch.positions, batch.position_ids, batch.shared)
        objective(logits, batch, StepCounts(share.loss_tokens, share.sequences), tally).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("attention", ["rows", "sdpa", "eager"])
@pytest.mark.parametrize("family", FULL)
def test_gradients_are_those_of_a_prompt_each(family: str, attention: str) -> None:
    model = tiny(family, EXACT[family], "eager" if attention == "eager" else "sdpa").double()
    if attention == "rows":
        use_shared_rows(model)
    expected = gradient(model, step("padded"), "padded")
    assert expected.abs().max() > 1e-4
    # All in one micro-batch, and in several, in some of which a prompt is computed again.
    for budget in (10**6, 40):
        difference = (gradient(model, step("shared", budget), "shared") - expected).abs().max()
        assert difference <= 1e-6 * expected.abs().max()  # norms are computed in float32 in any dtype
    require_exact_sharing(model.float(), "float32", CPU)


def test_no_score_between_two_answers_is_computed() -> None:
    """Whatever the number of answers: a mask over the row would grow with its square."""
    model = tiny("llama", {})
    use_shared_rows(model)
    share = step("shared")
    batch = collate(share.samples, share.version, CPU, "shared")
    assert batch.shared is not None
    longest = max(len(s.trajectory.prompt_ids) + len(s.trajectory.token_ids) - 1 for s in share.samples)
    with mock.patch.object(
        shared_rows, "sdpa_attention_forward", wraps=shared_rows.sdpa_attention_forward
    ) as attention:
        selected_logits(model, batch.input_ids, batch.positions, batch.position_ids, batch.shared)
    assert attention.call_count == model.config.num_hidden_layers
    for call in attention.call_args_list:
        _, query, key, _, mask = call.args
        assert mask is None
        assert query.shape[2] == key.shape[2] == longest < batch.input_ids.shape[1]


def rows_of(prompt: int, answers: int, length: int) -> SharedRows:
    segments = np.repeat(np.arange(answers + 1), [prompt] + answers * [length])[None]
    return SharedRows.of(segments, CPU)


def test_many_short_answers_to_a_long_prompt_get_a_mask_and_no_copies_of_it() -> None:
    assert rows_of(prompt=2_000, answers=32, length=20).unfold is None
    assert rows_of(prompt=20, answers=8, length=200).unfold is not None
    assert rows_of(prompt=100, answers=8, length=100).unfold is not None


def test_layers_that_do_not_hand_on_what_they_are_called_with_take_masks() -> None:
    model = tiny("nemotron", {})
    use_shared_rows(model)
    assert model.config._attn_implementation == shared_rows.NAME
    require_exact_sharing(model, "float32", CPU)
    assert model.config._attn_implementation == "sdpa"


def test_a_prompt_and_its_answers_are_one_row() -> None:
    share = step("shared")
    together = [share.samples[i] for i in share.micro_batches[0]]
    batch = collate(together, share.version, CPU, "shared")
    prompts = {(s.ordinal, s.trajectory.prompt_ids.tobytes()) for s in together}
    assert batch.input_ids.shape[0] == len(prompts) == 4  # of 3 groups, one with 2 prompts
    answers = sum(len(s.trajectory.token_ids) - 1 for s in together)
    assert batch.shared is not None
    tokens = int((batch.shared.segments >= 0).sum())
    assert tokens == answers + sum(len(prompt) // 4 for _, prompt in prompts)


@given(group_lists, st.integers(60, 240))
@settings(deadline=None)
def test_rows_keep_within_the_budget_and_lose_no_answer(
    groups: list[list[TrajectoryMeta]], budget: int
) -> None:
    everything = [t for group in groups for t in group]
    # All of these have one hash; prompts of another group are never shared.
    keys = [(g, t.prompt_tokens) for g, group in enumerate(groups) for t in group]
    plan = pack_prompts(groups, budget)
    assert sorted(i for rows in plan for i in rows) == [i for i, t in enumerate(everything) if t.loss_tokens]
    for rows in plan:
        places = lay_out_shared(
            [keys[i] for i in rows],
            [everything[i].prompt_tokens for i in rows],
            [everything[i].response_tokens for i in rows],
        )
        assert places.rows * places.width <= budget
        assert places.width == max(
            shared_row(
                everything[i].prompt_tokens,
                [
                    everything[j].response_tokens
                    for j, place in zip(rows, places.places, strict=True)
                    if place == at
                ],
            )
            for i, at in zip(rows, places.places, strict=True)
        )


def test_prompts_of_one_length_that_differ_are_planned_apart() -> None:
    meta = TrajectoryMeta(0, 50, 11, 0.0, "stop", ((0, 11),), prompt=1)
    other = replace(meta, sample=1, prompt=2)
    assert pack_prompts([[meta, meta]], 80) == ((0, 1),)
    assert pack_prompts([[meta, other]], 80) == ((0,), (1,))


def test_groups_with_long_prompts_count_them_once_in_the_balance_over_ranks() -> None:
    groups = one_prompt_a_group(record_batch(version=2, groups=6))
    for ranks in (1, 2, 3):
        plans = plan_step(batch_of(groups, 2), ranks, 100, layout="shared")
        assert sorted(i for plan in plans for i in plan.items) == list(range(6))
        assert len({len(plan.micro_batches) for plan in plans}) == 1


def test_an_answer_that_does_not_fit_is_refused_with_both_numbers() -> None:
    long = TrajectoryMeta(0, 50, 51, 0.0, "stop", ((0, 51),))
    with pytest.raises(ConfigError, match=r"101 tokens, learner\.micro_batch_tokens is 100"):
        pack_prompts([[long]], 100)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "mamba", "lfm2", "bloom"])
def test_a_model_whose_answers_cannot_share_a_prompt_is_refused(family: str) -> None:
    model = tiny(family, (EXACT | LEAKING)[family])
    with pytest.raises(ConfigError, match=r"learner\.shared_prompts: found true with .*to false|or learner"):
        require_exact_sharing(model, "float32", CPU)


def test_rounding_in_bfloat16_is_no_fault() -> None:
    model = tiny("llama", {"num_hidden_layers": 30}).to(torch.bfloat16)
    apart, leak = sharing_differences(model, VOCABULARY, CPU)
    assert apart > 0
    assert leak == 0
    require_exact_sharing(model, "bfloat16", CPU)


@pytest.mark.parametrize("other", ["learner.packing=true", "learner.attention=flash_attention_2"])
def test_what_contradicts_it_is_refused(other: str) -> None:
    values = {
        "model": {"path": "m", "dtype": "bfloat16"},
        "data": {"train": "rows.jsonl"},
        "reward": {"functions": ["exact_match"]},
    }
    with pytest.raises(ConfigError, match=r"learner\.shared_prompts: found true with learner\."):
        parse_config(values, ["learner.shared_prompts=true", other])
