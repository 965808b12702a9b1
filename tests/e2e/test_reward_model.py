"""Runs with a reward model: their rewards are what the model says, and its actors may die."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues.codec import decode_group, read_records
from asyncrl.types import Trajectory
from tests.e2e.rewards import digits

from .deaths import wait_until
from .runs import Run, assert_sound, finish, start


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A tiny Llama with a random head, and the run's tokenizer."""
    place, tokenizer = tmp_path / "classifier", character_tokenizer(256)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def recorded(run: Run, steps: slice = slice(None)) -> list[Trajectory]:
    """The answers in ``rollouts/`` of some steps."""
    answers: list[Trajectory] = []
    for path in sorted((run.folder / "rollouts").glob("*.msgpack"))[steps]:
        with path.open("rb") as file:
            answers += [t for record in read_records(file) for t in decode_group(record).trajectories]
    return answers


def own_scores(classifier: Path, answers: list[Trajectory]) -> list[float]:
    """The model's own forward pass of each answer by itself."""
    model = LlamaForSequenceClassification.from_pretrained(classifier).eval()
    with torch.no_grad():
        rows = [torch.tensor([[*t.prompt_ids.tolist(), *t.token_ids.tolist()]]) for t in answers]
        return [float(model(input_ids=row).logits) for row in rows]


def test_a_reward_model_alone_is_the_reward(tmp_path: Path, classifier: Path) -> None:
    run = finish(
        tmp_path,
        "reward.functions=[]",
        f"reward_model={{path: {classifier}}}",
        "log.rollouts_every=1",
        "run.steps=3",
        "schedule.max_staleness=1",
        name="alone",
    )
    assert_sound(run, max_staleness=1, capacity=4)
    answers = recorded(run)
    assert len(answers) == 3 * 8
    scores = own_scores(classifier, answers)
    assert [t.reward for t in answers] == pytest.approx(scores, abs=1e-5)
    assert len(set(scores)) > 12
    lines = run.metrics
    by_step = [sum(scores[8 * i : 8 * i + 8]) / 8 for i in range(3)]
    assert [line["reward/mean"] for line in lines[1:]] == pytest.approx(by_step, abs=1e-5)
    assert sum(line["timing_s/reward_model"] for line in lines[1:]) > 0
    assert all(line["timing_s/annotate_wait"] >= 0 for line in lines[1:])
    assert all("eval/reward_mean" in line for line in (lines[0], lines[-1]))


def test_its_actors_die_beside_a_function_and_nothing_is_lost(tmp_path: Path, classifier: Path) -> None:
    run = start(
        tmp_path,
        f"reward_model={{path: {classifier}, weight: 0.5, replicas: 2}}",
        "log.rollouts_every=1",
        "run.steps=100000",
        "eval.every=0",
        name="deaths",
    )
    try:
        run.wait_for_steps(3)
        for deaths in (1, 2):
            victim = next(p for p in run.processes() if "RoleActor" in " ".join(p.cmdline()))
            victim.kill()
            wait_until(run, "it is back", 180, lambda n=deaths: run.metrics[-1]["reward_model/restarts"] == n)
        lines = len(run.metrics)
        wait_until(run, "three more steps", 180, lambda: len(run.metrics) >= lines + 3)
        run.interrupt(signal.SIGINT)
        assert run.wait(60) == 130, run.text
        run.assert_nothing_left(within_s=15)
    finally:
        for process in run.processes():
            process.kill()
    assert_sound(run, max_staleness=2, capacity=4)
    assert run.metrics[-1]["ledger/failed"] == run.metrics[-1]["ledger/dropped"] == 0
    assert "eval/reward_model_mean" in run.metrics[0]
    tokenizer = character_tokenizer(256)
    for steps in (slice(0, 2), slice(-3, None)):
        answers = recorded(run, steps)
        scores = own_scores(classifier, answers)
        texts = [tokenizer.decode(t.token_ids.tolist(), skip_special_tokens=True) for t in answers]
        assert [t.rewards["reward_model"] for t in answers] == pytest.approx(scores, abs=1e-5)
        expected = [digits(text) + 0.5 * score for text, score in zip(texts, scores, strict=True)]
        assert [t.reward for t in answers] == pytest.approx(expected, abs=1e-5)
