from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.algorithms.corrections import CORRECTIONS, CorrectionSettings, effective_sample_size
from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings
from tests.unit.reference_vectors import CASES, tensor

CLIP = LossSettings(clip_low=0.2, clip_high=0.2, clip_dual=3.0)
POLICY_LOSSES = [
    ("ppo_clip(eps=0.2,dual_clip=3,agg=token-mean)", CLIP, "token-mean", "none"),
    ("ppo_clip(eps=0.2,dual_clip=3,agg=seq-mean-token-sum)", CLIP, "seq-mean-token-sum", "none"),
    ("ppo_clip(eps=0.2,dual_clip=3,agg=seq-mean-token-mean)", CLIP, "seq-mean-token-mean", "none"),
    (
        "ppo_clip(low=0.2,high=0.28,dual_clip=10,agg=token-mean)=dapo",
        LossSettings(clip_low=0.2, clip_high=0.28, clip_dual=10.0),
        "token-mean",
        "none",
    ),
    ("decoupled: ppo_clip(eps=0.2,dual_clip=3,token-mean) * tis(token,2.0)", CLIP, "token-mean", "tis"),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['inputs']['seed']}")


def loss_inputs(case: dict[str, Any]) -> LossInputs:
    inputs = case["inputs"]
    return LossInputs(
        logprobs=tensor(inputs["logprobs"]).requires_grad_(),
        proximal=tensor(inputs["old_logprobs"]),
        behaviour=tensor(inputs["rollout_logprobs"]),
        advantages=tensor(case["expected"]["advantages"]["grpo(std)"]["adv"]),
        mask=tensor(inputs["mask"]).bool(),
    )


@cases
@pytest.mark.parametrize(("name", "settings", "aggregation", "correction"), POLICY_LOSSES)
def test_policy_losses_match_the_reference(
    case: dict[str, Any], name: str, settings: LossSettings, aggregation: str, correction: str
) -> None:
    inputs = loss_inputs(case)
    mask = inputs.mask
    counts = StepCounts(tokens=int(mask.sum()), sequences=int(mask.any(-1).sum()))
    result = LOSSES["ppo_clip"](inputs, settings)
    weights = CORRECTIONS[correction](
        inputs.proximal, inputs.behaviour, mask, CorrectionSettings(tis_cap=2.0)
    ).weights
    loss = AGGREGATIONS[aggregation](weights * result.loss, mask, counts)
    loss.backward()

    expected = case["expected"]["policy_losses"][name]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
    torch.testing.assert_close(inputs.logprobs.grad, tensor(expected["grad_logprobs"]), atol=1e-9, rtol=0)
    clipped = result.clipped.sum().item() / counts.tokens
    assert clipped == pytest.approx(expected["metrics"]["actor/pg_clipfrac"], abs=1e-9)
    kl = result.kl.sum().item() / counts.tokens
    assert kl == pytest.approx(expected["metrics"]["actor/ppo_kl"], abs=1e-9)


@cases
def test_truncated_importance_weights_match_the_reference(case: dict[str, Any]) -> None:
    inputs = loss_inputs(case)
    expected = case["expected"]["corrections(old/rollout)"]["token:2.0"]
    found = CORRECTIONS["tis"](
        inputs.proximal, inputs.behaviour, inputs.mask, CorrectionSettings(tis_cap=2.0)
    )
    torch.testing.assert_close(found.weights, tensor(expected["weights"]), atol=1e-9, rtol=0)
    w, n = found.weights, int(inputs.mask.sum())
    assert w.sum().item() / n == pytest.approx(expected["mean"], abs=1e-7)
    ess = effective_sample_size(w.sum().item(), w.square().sum().item(), n)
    assert ess == pytest.approx(expected["ess"], abs=1e-7)


@pytest.mark.parametrize("name", ["logprobs", "proximal", "behaviour", "advantages"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_junk_outside_the_mask_reaches_nothing(name: str, junk: float) -> None:
    def run(fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        clean = loss_inputs(CASES[0])
        fields = {
            f: getattr(clean, f).detach().clone() for f in ("logprobs", "proximal", "behaviour", "advantages")
        }
        fields[name] = torch.where(clean.mask, fields[name], fill)
        logprobs = fields["logprobs"].requires_grad_()
        inputs = LossInputs(**fields, mask=clean.mask)
        result = LOSSES["ppo_clip"](inputs, CLIP)
        weights = CORRECTIONS["tis"](inputs.proximal, inputs.behaviour, inputs.mask, CorrectionSettings())
        counts = StepCounts(int(clean.mask.sum()), len(clean.mask))
        loss = AGGREGATIONS["token-mean"](weights.weights * result.loss, clean.mask, counts)
        loss.backward()
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad

    (loss, grad), (junk_loss, junk_grad) = run(0.0), run(junk)
    assert torch.equal(loss, junk_loss)
    assert torch.equal(grad, junk_grad)


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
