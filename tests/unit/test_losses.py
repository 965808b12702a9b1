from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings

CLIP = LossSettings(clip_low=0.2, clip_high=0.2, clip_dual=3.0)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    inputs = LossInputs(10 * one, 0 * one, 0 * one, -one, torch.ones(1, 1, dtype=torch.bool))
    assert LOSSES["ppo_clip"](inputs, CLIP).loss.item() == 3.0
    unbounded = LOSSES["ppo_clip"](inputs, LossSettings(clip_dual=None)).loss.item()
    assert unbounded == pytest.approx(22026.47, rel=1e-6)


def test_token_logprobs_are_those_of_log_softmax_and_so_are_their_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    # More rows than are worked on at a time.
    logits = torch.randn(600, 11, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(11, (600,), generator=generator)
    upstream = torch.randn(600, dtype=torch.float64, generator=generator)

    plain = torch.log_softmax(logits / 0.7, -1)
    expected = plain.gather(-1, targets[:, None]).squeeze(-1)
    (expected_grad,) = torch.autograd.grad(expected @ upstream, logits)
    found, entropy = token_logprobs(logits, targets, 0.7)
    (grad,) = torch.autograd.grad(found @ upstream, logits)

    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(grad, expected_grad, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1), atol=1e-12, rtol=0)
    assert not entropy.requires_grad


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    found, _ = token_logprobs(logits, torch.arange(5), 1.0)
    expected = torch.log_softmax(logits.float(), -1).diagonal()[:5]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
