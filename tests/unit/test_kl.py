"""The KL to a reference, in the loss and in the reward, and the coefficient that follows a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.masks import whiten
from asyncrl.algorithms.names import KL_ESTIMATOR_NAMES
from asyncrl.config import AlgorithmSection
from asyncrl.config_load import parse_config
from asyncrl.errors import InvariantError
from asyncrl.generators.scripted import ScriptedGenerator, log_normal_length
from asyncrl.learners.advantages import batch_wide
from asyncrl.learners.base import RankStep, StepResult
from asyncrl.learners.collate import collate
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.roles.base import Findings
from asyncrl.roles.group import RoleGroup
from asyncrl.roles.reference import ReferencePolicy, ReferenceSettings, Wanted
from asyncrl.roles.scripted import ScriptedRoleMember
from asyncrl.types import Batch, Float32Array, Group, Metrics
from tests.unit.controller_harness import Outcome, config, run
from tests.unit.recorded_batches import KL_COEF, MAX_AGE, VOCABULARY, record_batch, shares, with_reference
from tests.unit.test_config import VALUES, errors
from tests.unit.tiny_models import tiny_llama

CPU = torch.device("cpu")


def step(algorithm: dict[str, Any] | None = None, advantage: str = "grpo") -> RankStep:
    groups = record_batch(version=2, groups=3)
    (share,) = shares(groups, version=2, ranks=1, micro_batch_tokens=10**6, advantage=advantage)
    return with_reference(share, algorithm or {})


# ---------------------------------------------------------------------- in the loss


def evaluate(
    values: dict[str, Any], splits: list[range], kl_coef: float = KL_COEF
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """Loss, gradient by logits, and metrics of the whole step, in micro-batches of these rows."""
    share, algorithm = step(), AlgorithmSection.model_validate(values)
    objective, tally = Objective(algorithm, 1.0, MAX_AGE), Tally(CPU)
    tokens = sum(int(s.trajectory.loss_mask.sum()) for s in share.samples)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_()
    counts, losses, start = StepCounts(share.loss_tokens, share.sequences), [], 0
    for rows in splits:
        batch = collate([share.samples[row] for row in rows], share.version, CPU)
        own = logits[start : start + len(batch.targets)]
        losses.append(objective(own, batch, counts, tally, None, kl_coef))
        start += len(batch.targets)
    loss = torch.stack(losses).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad, tally.metrics(lambda _: None, lambda _: None)


def plain_kl(form: str, aggregation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same KL by plain autograd, row by row."""
    samples = step().samples
    tokens = sum(int(s.trajectory.loss_mask.sum()) for s in samples)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_()
    total, start = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        mask = torch.from_numpy(sample.trajectory.loss_mask)
        targets = torch.from_numpy(sample.trajectory.token_ids)[mask].long()
        n = len(targets)
        log_pi = logits[start : start + n].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        log_ref = torch.from_numpy(sample.reference)[mask].double()
        k2 = 0.5 * (log_pi - log_ref) ** 2
        k3 = (log_ref - log_pi).exp() - 1 - (log_ref - log_pi)
        kl = {"k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach()}[form]
        total = total + (kl.sum() / tokens if aggregation == "token-mean" else kl.mean() / len(samples))
        start += n
    (grad,) = torch.autograd.grad(total, logits)
    return total.detach(), grad


@pytest.mark.parametrize("form", ["k2", "k3", "k3+"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_loss_gets_coefficient_times_kl_aggregated_as_it_is(form: str, aggregation: str) -> None:
    whole = [range(12)]
    plain, plain_grad, _ = evaluate({"aggregation": aggregation}, whole)
    values = {"kl": "loss", "kl_estimator": form, "aggregation": aggregation}
    loss, grad, metrics = evaluate(values, whole)
    kl, kl_grad = plain_kl(form, aggregation)
    # seq-mean-token-mean divides by n + 1e-8.
    torch.testing.assert_close(loss, plain + KL_COEF * kl, atol=1e-7, rtol=0)
    torch.testing.assert_close(grad, plain_grad + KL_COEF * kl_grad, atol=1e-8, rtol=0)
    assert kl_grad.abs().max() > 1e-4
    assert metrics["actor/kl_loss"] == pytest.approx(kl.item(), abs=1e-7)
    by_token, _ = plain_kl(form, "token-mean")
    assert metrics["actor/reference_kl"] == pytest.approx(by_token.item())


def test_any_split_has_the_same_kl() -> None:
    values = {"kl": "loss", "aggregation": "seq-mean-token-sum"}
    loss, grad, metrics = evaluate(values, [range(12)])
    split_loss, split_grad, split = evaluate(values, [range(1), range(1, 6), range(6, 6), range(6, 12)])
    torch.testing.assert_close(split_loss, loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(split_grad, grad, atol=1e-12, rtol=0)
    assert split["actor/kl_loss"] == pytest.approx(metrics["actor/kl_loss"], abs=1e-12)


def test_a_run_without_a_reference_says_nothing_of_it_and_one_that_lacks_it_fails() -> None:
    _, _, metrics = evaluate({}, [range(12)])
    assert not [name for name in metrics if "kl_loss" in name or "reference" in name]
    share = step()
    samples = [replace(sample, reference=None) for sample in share.samples]
    objective = Objective(AlgorithmSection(kl="loss"), 1.0, MAX_AGE)
    batch = collate(samples, share.version, CPU)
    logits = torch.zeros(len(batch.targets), VOCABULARY)
    with pytest.raises(InvariantError, match="tokens came without the reference's log-probs"):
        objective(logits, batch, StepCounts(1, 1), Tally(CPU), None, 0.1)


def test_the_config_knows_the_estimators() -> None:
    assert set(KL_ESTIMATOR_NAMES) == KL_ESTIMATORS.keys()
    for name in KL_ESTIMATOR_NAMES:
        assert AlgorithmSection(kl="reward", kl_estimator=name).kl_form == name
    assert AlgorithmSection(kl="loss").kl_form == "k3"
    assert AlgorithmSection(kl="reward").kl_form == "k1"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.kl=loss", "algorithm.kl_estimator=k1"], ["kl_estimator: found 'k1'", "mean 0"]),
        (["algorithm.kl_target=0.1"], ["kl_target: found 0.1 with kl 'none'"]),
        (["algorithm.kl=loss", "algorithm.kl_target=0.1", "algorithm.kl_coef=0"], ["kl_coef: found 0"]),
        (["algorithm.kl=loss", "algorithm.kl_estimator=k4"], ["kl_estimator", "k4"]),
        (["algorithm.loss=dpo"], ["correction: found 'tis' with loss 'dpo'", "expected none"]),
        (
            ["algorithm.loss=ipo", "algorithm.correction=none", "algorithm.kl=loss"],
            ["kl: found 'loss' with loss 'ipo'", "preference_beta"],
        ),
        (["reference.micro_batch_tokens=9"], ["reference.micro_batch_tokens: found 9"]),
    ],
)
def test_what_is_refused(overrides: list[str], parts: list[str]) -> None:
    (line,) = errors(*overrides)
    for part in parts:
        assert part in line


def test_a_reference_exists_where_it_is_needed() -> None:
    assert parse_config(VALUES).roles == {}
    for overrides in (
        ["algorithm.kl=loss"],
        ["algorithm.kl=reward"],
        ["algorithm.loss=dpo", "algorithm.correction=none"],
    ):
        assert list(parse_config(VALUES, overrides).roles) == ["reference"]


# ---------------------------------------------------------------------- in the reward, by token


def test_rewards_by_token_lose_the_kl_where_it_arises() -> None:
    share, name, gamma = step(advantage="reinforce_plus_plus"), "reinforce_plus_plus", 0.9
    rng = np.random.default_rng(0)

    def penalised(sample: Any) -> Any:
        mask = sample.trajectory.loss_mask
        return replace(sample, kl=np.where(mask, rng.standard_normal(len(mask)), 0.0).astype(np.float32))

    samples = tuple(map(penalised, share.samples))
    found = batch_wide(samples, name, gamma, lambda _: None, CPU, kl_coef=0.3)
    width = max(len(s.trajectory.token_ids) for s in samples)
    returns, mask = torch.zeros(len(samples), width), torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        following, last = 0.0, True
        for t in reversed(np.flatnonzero(sample.trajectory.loss_mask)):
            following = (sample.advantage if last else 0.0) - 0.3 * sample.kl[t] + gamma * following
            returns[row, t], mask[row, t], last = float(following), True, False
    expected = whiten(returns, mask)
    for row, sample in enumerate(found):
        n = len(sample.token_advantages)
        np.testing.assert_allclose(sample.token_advantages, expected[row, :n], atol=1e-5)
    plain = batch_wide(share.samples, name, gamma, lambda _: None, CPU, kl_coef=0.3)
    assert not np.allclose(plain[0].token_advantages, found[0].token_advantages, atol=1e-2)


# ---------------------------------------------------------------------- the controller's part


def kl_of(sample: int, ordinal: int) -> float:
    return 2.0 + sample + 0.5 * (ordinal % 3)


def findings(group: Group) -> Findings:
    return Findings({}, {"kl": tuple(kl_of(t.sample, group.ordinal) for t in group.trajectories)})


def run_with_reference(*overrides: str, learner: ScriptedLearner | None = None) -> Outcome:
    settings = config("run.steps=4", *overrides)
    member = ScriptedRoleMember(role="reference", annotate_s=0.1, findings=findings)
    role = RoleGroup("reference", [member], restart=None, timeout_s=100.0, setting="reference.timeout_s")
    generator = ScriptedGenerator(length=log_normal_length(20.0, 0.8))
    return run(settings, [generator], learner, roles=[role])


def test_kl_comes_off_the_rewards_that_advantages_are_made_of() -> None:
    outcome = run_with_reference(
        "algorithm.kl=reward", "algorithm.kl_coef=0.2", "algorithm.advantage=dr_grpo"
    )
    for batch in outcome.learner.batches:
        for item in batch.items:
            answers, ordinal = item.meta.trajectories, item.meta.ordinal
            rewards = [a.reward - 0.2 * kl_of(a.sample, ordinal) for a in answers]
            assert item.advantages == pytest.approx(group_advantages("dr_grpo", rewards))
            assert set(item.meta.rewards) <= {0.0, 1.0}  # logs keep what was scored
    for line, batch in zip(outcome.log.lines[1:], outcome.learner.batches, strict=True):
        tokens = sum(item.meta.loss_tokens for item in batch.items)
        total = sum(kl_of(a.sample, i.meta.ordinal) for i in batch.items for a in i.meta.trajectories)
        assert line["actor/reference_kl"] == pytest.approx(total / tokens)
        assert line["actor/kl_coef"] == 0.2


def test_by_token_the_controller_leaves_rewards_alone_and_sends_the_coefficient() -> None:
    outcome = run_with_reference("algorithm.kl=reward", "algorithm.preset=reinforce_plus_plus")
    for batch in outcome.learner.batches:
        assert batch.kl_coef == 1e-3
        assert all(item.advantages == item.meta.rewards for item in batch.items)


def test_groups_of_equal_rewards_are_filtered_whatever_their_kl() -> None:
    outcome = run_with_reference("algorithm.kl=reward", "algorithm.filter_zero_variance=refill")
    assert outcome.summary.counts["filtered"] > 0
    assert all(len(set(i.meta.rewards)) == 2 for b in outcome.learner.batches for i in b.items)


def test_the_kl_a_token_is_of_the_tokens_that_were_scored_whatever_is_masked_later() -> None:
    def half_a_token(group: Group) -> Findings:
        return Findings({}, {"kl": tuple(0.5 * len(t.token_ids) for t in group.trajectories)})

    settings = config(
        "run.steps=12",
        "algorithm.kl=reward",
        "schedule.pipeline_depth=1",
        "schedule.max_staleness=1",
        "schedule.at_bound=mask",
        "rollout.max_new_tokens=100",
    )
    # Ordinal 3 takes so long that most of its tokens are too old when it is trained.
    straggler = ScriptedGenerator(length=lambda request: 75 if request.key.ordinal == 3 else 10, token_s=0.1)
    member = ScriptedRoleMember(role="reference", findings=half_a_token)
    role = RoleGroup("reference", [member], restart=None, timeout_s=100.0, setting="reference.timeout_s")
    outcome = run(settings, [straggler], roles=[role])
    lines = outcome.log.lines[1:]
    assert max(line["staleness/masked_tokens"] for line in lines) > 50
    assert [line["actor/reference_kl"] for line in lines] == pytest.approx([0.5] * 12)


class MeasuringLearner(ScriptedLearner):
    """Reports a KL a token of its own choice; its second step is not finite."""

    async def step(self, batch: Batch) -> StepResult:
        result = await super().step(batch)
        return replace(result, metrics={**result.metrics, "actor/reference_kl": 0.5})


def test_the_coefficient_follows_the_kl_that_steps_measure() -> None:
    learner = MeasuringLearner(max_staleness=2, step_s=1.0, bad_steps=[1])
    overrides = [
        "algorithm.kl=loss",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_target=0.1",
        "algorithm.kl_horizon=40",
    ]
    outcome = run_with_reference(*overrides, learner=learner)
    # Four answers a step, five times the target: 0.2 * 4 / 40 a step, but for the skipped one.
    coefficients = [batch.kl_coef for batch in outcome.learner.batches]
    growth = 1.02
    assert coefficients == pytest.approx([0.1, 0.1 * growth, 0.1 * growth, 0.1 * growth**2, 0.1 * growth**3])
    assert [line["actor/kl_coef"] for line in outcome.log.lines[1:]] == pytest.approx(coefficients)


class WarmingUp(ScriptedLearner):
    """Leaves the policy as it is in its first two steps, as a critic's warm-up does."""

    async def step(self, batch: Batch) -> StepResult:
        result = await super().step(batch)
        return replace(result, metrics={"critic/warmup": float(batch.version < 2)})


def test_the_coefficient_stands_while_the_policy_does() -> None:
    learner = WarmingUp(max_staleness=2, step_s=1.0)
    outcome = run_with_reference(
        "algorithm.kl=reward",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_target=100",
        "algorithm.kl_horizon=40",
        learner=learner,
    )
    coefficients = [batch.kl_coef for batch in outcome.learner.batches]
    assert coefficients == pytest.approx([0.1, 0.1, 0.1, 0.098])


# ---------------------------------------------------------------------- the reference itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    tiny_llama(seed=3).save_pretrained(folder)
    return folder


def reference(
    folder: Path, wanted: Wanted, kl_form: str = "k1", micro_batch_tokens: int = 70
) -> ReferencePolicy:
    policy = ReferencePolicy(
        ReferenceSettings(
            path=str(folder),
            dtype="float32",
            device="cpu",
            threads=1,
            temperature=0.7,
            micro_batch_tokens=micro_batch_tokens,
            wanted=wanted,
            kl_form=kl_form,
        )
    )
    policy.start()
    return policy


def plain_logprobs(group: Group) -> list[Float32Array]:
    model, found = tiny_llama(seed=3).eval(), []
    for t in group.trajectories:
        tokens = torch.tensor([*t.prompt_ids.tolist(), *t.token_ids.tolist()])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1] / 0.7
        row = logits.log_softmax(-1).gather(-1, tokens[1:, None])[len(t.prompt_ids) - 1 :, 0]
        found.append(np.where(t.loss_mask, row.numpy(), 0.0).astype(np.float32))
    return found


def one_group() -> Group:
    """One of its answers has nothing that is trained."""
    (group,) = record_batch(2, groups=1)
    first, *rest = group.trajectories
    blank = replace(first, loss_mask=np.zeros_like(first.loss_mask))
    return replace(group, trajectories=(blank, *rest))


@pytest.mark.parametrize("micro_batch_tokens", [10, 70, 10_000])
def test_the_reference_gives_the_log_probs_of_a_plain_forward_pass(
    folder: Path, micro_batch_tokens: int
) -> None:
    group = one_group()
    found = reference(folder, "reference", micro_batch_tokens=micro_batch_tokens).annotate(group)
    assert found.scalars == {}
    for ours, plain in zip(found.arrays["reference"], plain_logprobs(group), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)
    assert not found.arrays["reference"][0].any()


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_reference_gives_the_kl_of_each_answer(folder: Path, form: str) -> None:
    group = one_group()
    by_token = reference(folder, "token_penalty", form).annotate(group)
    whole = reference(folder, "penalty", form).annotate(group)
    assert whole.arrays == {}
    assert whole.scalars == by_token.scalars
    for i, (t, log_ref) in enumerate(zip(group.trajectories, plain_logprobs(group), strict=True)):
        difference = np.where(t.loss_mask, t.logprobs - log_ref, 0.0).astype(np.float64)
        kl = difference if form == "k1" else np.exp(-difference) - 1 + difference
        np.testing.assert_allclose(by_token.arrays["kl"][i], kl, atol=1e-4)
        assert whole.scalars["kl"][i] == pytest.approx(kl.sum(), abs=1e-3)
    assert whole.scalars["kl"][0] == 0.0
