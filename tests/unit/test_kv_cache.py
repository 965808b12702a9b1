"""Slots give what an ordinary cache gives, and prefill plans hold their promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.generators.kv_cache import SlotKV
from asyncrl.generators.prefill import (
    ALIGN,
    FIXED_ROWS,
    MAX_PADDING,
    PrefillBatch,
    plan_fixed,
    plan_relaxed,
)
from asyncrl.generators.runner import ModelRunner

from .tiny_models import VOCAB, full_logits, tiny_gpt2, tiny_llama, tiny_qwen2

CPU = torch.device("cpu")


def runner_of(model: torch.nn.Module, slots: int = 5) -> ModelRunner:
    return ModelRunner(model, slots=slots, max_sequence=32, device=CPU)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
def test_rows_at_their_own_positions_get_the_logits_of_a_full_pass(make):
    model = make()
    torch.manual_seed(3)
    lengths = [9, 4, 1, 6, 2]
    texts = [torch.randint(VOCAB, (32,)).tolist() for _ in lengths]
    truth = [full_logits(model, text[:1], text[1:]) for text in texts]
    with torch.inference_mode():
        runner = runner_of(model)
        tokens = torch.tensor(texts)
        # 3 rows at once, padded; one with a filler row; and one that needs no prefill (length 1)
        runner.prefill(PrefillBatch((), 3, 8), [0, 1, 3], tokens[[0, 1, 3], :8])
        runner.prefill(PrefillBatch((), 2, 2), [4], tokens[[4, 0], :2])
        for step in range(10):
            positions = torch.tensor([[length - 1 + step] for length in lengths])
            logits = runner.decode(tokens.gather(1, positions), positions, 24)
            for row, length in enumerate(lengths):
                expected = truth[row][length - 1 + step]
                torch.testing.assert_close(logits[row], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("shapes", [[((2, 8), (2, 8))] * 3, [((2, 8), (2, 4)), ((1, 8), (1, 8))]])
def test_a_copy_takes_the_asked_positions_and_nothing_else(shapes):
    kv = SlotKV(shapes, slots=4, max_sequence=10, dtype=torch.float32, device=CPU)
    for pair in kv.layers:
        for tensor in pair:
            tensor.normal_()
    before = [(keys.clone(), values.clone()) for keys, values in kv.layers]
    kv.copy(1, [3, 0], 6)
    for pair, old in zip(kv.layers, before, strict=True):
        for tensor, was in zip(pair, old, strict=True):
            assert tensor.shape[0] == 4
            for target in (0, 3):
                assert torch.equal(tensor[target, :, :6], was[1, :, :6])
                assert torch.equal(tensor[target, :, 6:], was[target, :, 6:])
            assert torch.equal(tensor[1:3], was[1:3])


LENGTHS = st.lists(st.integers(0, 60), max_size=70)


@given(LENGTHS)
def test_relaxed_plans_cover_all_with_bounded_padding(lengths: list[int]):
    plan = plan_relaxed(lengths, max_sequence=60, max_tokens=512)
    assert sorted(i for batch in plan for i in batch.members) == [i for i, n in enumerate(lengths) if n]
    for batch in plan:
        sizes = [lengths[i] for i in batch.members]
        assert batch.rows == len(sizes)
        assert max(sizes) <= batch.length <= min(max(sizes) + ALIGN - 1, 60)
        assert sum(sizes) >= (1 - MAX_PADDING) * max(sizes) * len(sizes)
        assert len(sizes) == 1 or batch.rows * batch.length <= 512


@given(LENGTHS)
def test_fixed_plans_shape_each_row_by_itself(lengths: list[int]):
    plan = plan_fixed(lengths, max_sequence=60)
    assert sorted(i for batch in plan for i in batch.members) == [i for i, n in enumerate(lengths) if n]
    for batch in plan:
        assert batch.rows == FIXED_ROWS >= len(batch.members)
        for i in batch.members:
            (alone,) = plan_fixed([lengths[i]], max_sequence=60)
            assert alone.length == batch.length >= lengths[i]
