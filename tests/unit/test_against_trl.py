"""benchmarks/against_trl.py: both sides are asked for the same, and measured by the same definitions."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config_load import load_config
from asyncrl.models.tokenizer import character_tokenizer

from .tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from against_trl import COMMON, WORKLOADS, job_of, perform, planned, settings_of  # noqa: E402
from against_trl_page import Run, as_json, markdown, of_json, pairs_of, ratios  # noqa: E402
from trl_side import Meter, grpo_arguments, held_out_reward, require_same_encoding, reward_named  # noqa: E402


def run(side: str = "trl", seed: int = 0, *, seconds: float = 2.0, steps: int = 30, **figures: Any) -> Run:
    measured = {
        "samples_a_step": 64,
        "step_s": [seconds] * steps,
        "rewards": [0.5] * steps,
        "lengths": [10.0] * steps,
        "evals": [(0, 0.1), (steps, 0.7)],
    }
    return Run("smollm2", side, seed, "c.yaml", ["a=1"], **{**measured, **figures})


def test_every_workload_is_a_valid_config_that_differs_from_its_file_by_its_settings() -> None:
    for workload in WORKLOADS.values():
        settings = settings_of(workload, 20, 3)
        config = load_config(ROOT / "configs" / workload.config, settings)
        assert set(COMMON) < set(settings)
        assert (config.run.steps, config.run.seed, config.eval.temperature) == (20, 3, 0.0)
        assert config.data.eval is not None
        assert config.eval.max_prompts is None
        samples = config.rollout.groups_per_step * config.rollout.group_size
        assert samples % workload.micro_batch == 0 == workload.micro_batch % config.rollout.group_size


def test_trl_is_asked_for_what_the_config_says(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.save_pretrained(tmp_path)
    settings = [
        *settings_of(WORKLOADS["even"], 12, 0),
        "data.train.args.count=300",
        "data.eval.holdout=20",
    ]
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*settings, "eval.every=5"])
    job = job_of(config, tmp_path, 32)
    assert job["evaluated"] == [0, 5, 10, 12]
    assert job["rates"][:2] == pytest.approx([5e-5, 1e-4])
    assert job["rates"][-1] == pytest.approx(5e-4 / 2)
    assert len(job["prompts"]) == 12 * 16
    assert len(job["held_out"]) == 20
    assert not {row["prompt"] for row in job["prompts"]} & {row["prompt"] for row in job["held_out"]}
    asked = grpo_arguments(job)
    assert asked["per_device_train_batch_size"] * asked["gradient_accumulation_steps"] == 16 * 8
    assert (asked["max_steps"], asked["learning_rate"]) == (12, 5e-4)
    assert reward_named(job["reward"])("7+5=12#12", "12") == 1.0
    require_same_encoding(tokenizer, job["prompts"])
    job["prompts"][0]["prompt_ids"][0] += 1
    with pytest.raises(ValueError, match="expected"):
        require_same_encoding(tokenizer, job["prompts"])


def test_the_clock_stands_still_for_evaluations() -> None:
    moment = 0.0

    def evaluate() -> float:
        nonlocal moment
        moment += 100
        return 0.5

    meter = Meter(evaluate, [0, 2], lambda: moment)
    meter.on_train_begin(None, None, None)
    for step in range(1, 4):
        moment += step
        meter.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert meter.step_s == [1, 2, 3]
    assert meter.evals == [(0, 0.5), (2, 0.5)]


def test_held_out_answers_do_not_depend_on_their_neighbours() -> None:
    model = tiny_llama(vocab_size=100)
    tokenizer = character_tokenizer(64)
    tokenizer.padding_side = "left"
    rows = [{"prompt_ids": tokenizer(text=text)["input_ids"], "answer": text} for text in ("1+1=", "12+345=")]
    said: dict[str, list[str]] = {}

    def remember(completion: str, answer: str) -> float:
        said.setdefault(answer, []).append(completion)
        return float(len(answer))

    together = held_out_reward(model, tokenizer, {"held_out": rows, "max_new_tokens": 6}, remember)
    for row in rows:
        held_out_reward(model, tokenizer, {"held_out": [row], "max_new_tokens": 6}, remember)
    assert together == (4 + 7) / 2
    assert all(first == second for first, second in said.values())


def test_steps_count_that_neither_a_start_an_evaluation_nor_the_end_touches() -> None:
    found = run(steps=14, evals=[(0, 0.0), (7, 0.0), (14, 0.0)], step_s=[float(s) for s in range(1, 15)])
    assert found.timed == [6, 7, 11]
    assert found.step_mean_s == 8
    assert found.samples_per_s == 64 / 8
    assert found.tokens_per_s == 640 / 8
    assert run(steps=8).samples_per_s is None


def test_the_time_to_a_reward_is_that_of_training_alone() -> None:
    assert run(evals=[(0, 0.1), (5, 0.59), (10, 0.6), (30, 0.5)]).target_s == 20
    assert run(evals=[(0, 0.1), (30, 0.5)]).target_s is None


def test_ratios_are_of_pairs() -> None:
    runs = [run(), run("asyncrl", seconds=1.0), run("asyncrl", 1), run("trl", 2), run("asyncrl", 2)]
    pairs = pairs_of(runs, "smollm2")
    assert [trl.seed for trl, _ in pairs] == [0, 2]
    assert ratios(pairs, lambda found: found.samples_per_s) == [2.0, 1.0]
    page = markdown(runs, None)
    assert "| smollm2 | samples/s | 32 (32, 32) | 48 (64, 32) | 1.50 (1.00 to 2.00) |" in page
    assert "| smollm2 | 1920 | 0.700 | 0.700 |" in page


def test_sides_take_turns_and_what_is_there_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    plans = list(planned(["even", "smollm2"], [0, 1], 20))
    assert [(p.workload, p.seed, p.side) for p in plans[:4]] == [
        ("even", 0, "trl"),
        ("even", 0, "asyncrl"),
        ("even", 1, "trl"),
        ("even", 1, "asyncrl"),
    ]
    kept: list[str] = []

    def measure(plan: Run) -> Run:
        return plan.with_figures(step_s=[1.0], samples_a_step=1)

    def keep(runs: list[Run]) -> None:
        kept.append(as_json(None, runs))

    first = perform(plans[:3], [], measure, keep)
    _, stored = of_json(kept[-1])
    assert stored == first
    made: list[str] = []

    def measure_again(plan: Run) -> Run:
        made.append(plan.name)
        return plan

    perform(plans, stored, measure_again, keep)
    assert made == [plan.name for plan in plans[3:]]
    longer = list(planned(["even"], [0], 30))
    perform(longer, stored, measure_again, keep)
    assert made[-2:] == ["even-trl-0", "even-asyncrl-0"]
