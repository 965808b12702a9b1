"""What users get wrong, through the real command: each ends in a clear message and exit code 2.

Most run in this process, for speed; a few of each kind run as a user would run them, as a process of
its own, against the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

import asyncrl
from asyncrl.cli import app
from asyncrl.models.tokenizer import character_tokenizer

LIMIT_S = 5.0

CONFIG = """
run: {name: mine}
model: {create: {}}
data:
  train: rows.jsonl
  eval: {holdout: 5}
  max_prompt_tokens: 64
reward:
  functions: [user.py:good]
  timeout_s: 1
"""

USER_CODE = """

def good(completion, answer): return float(completion == answer)
def raises(completion): raise ValueError("on purpose")
def hangs(completion):
    while True: pass
def nan(completion): return float("nan")
def text(completion): return "1.0"
def many(completion): return [1.0, 0.0]
def unbound(completion, solution_text): return 1.0
"""


@dataclass(frozen=True)
class BadInput:
    """A mistake: the overrides that make it, what is written first, and what the message must say."""

    name: str
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    model: dict[str, object] | None = None
    """Write a model folder whose tokenizer has these attributes, and use it."""
    positions: int = 256


ROWS = "".join(json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(20))

BAD_INPUTS = [
    BadInput("missing data file", ("no.jsonl", "no such file"), ("data.train=no.jsonl",)),
    BadInput(
        "empty data set", ("empty.jsonl", "found 0 rows"), ("data.train=empty.jsonl",), {"empty.jsonl": ""}
    ),
    BadInput(
        "bad line",
        ("bad.jsonl line 21", "not JSON"),
        ("data.train=bad.jsonl",),
        {"bad.jsonl": ROWS + '{"question": \n'},
    ),
    BadInput("missing column", ("columns question, answer", "text"), ("data.prompt_key=text",)),
    BadInput(
        "unknown key in the file",
        ("run.yaml", "rollout.group_sise", "did you mean rollout.group_size?"),
        files={"run.yaml": CONFIG + "rollout: {group_sise: 4}\n"},
    ),
    BadInput("unknown key in an override", ("run.stpes", "did you mean run.steps?"), ("run.stpes=3",)),
    BadInput("wrong type", ("run.steps", "'many' (text)", "a whole number"), ("run.steps=many",)),
    BadInput("no YAML", ("run.yaml", "not valid YAML"), files={"run.yaml": "run: [1"}),
    BadInput(
        "S < D",
        ("schedule.max_staleness", "found 1", "= 3"),
        ("schedule.pipeline_depth=3", "schedule.max_staleness=1"),
    ),
    BadInput("group of one", ("rollout.group_size", "found 1", "at least 2"), ("rollout.group_size=1",)),
    BadInput(
        "micro-batch too small",
        ("learner.micro_batch_tokens", "found 50", "128"),
        ("learner.micro_batch_tokens=50",),
    ),
    BadInput("uncorrected", ("algorithm.correction", "allow_uncorrected"), ("algorithm.correction=none",)),
    BadInput("top_p in training", ("rollout.top_p", "0.9", "eval.top_p"), ("rollout.top_p=0.9",)),
    BadInput("no reward function", ("reward.functions", "found 0 entries"), ("reward.functions=[]",)),
    BadInput("unknown reward function", ("user.py:goood", "good"), ("reward.functions=[user.py:goood]",)),
    BadInput(
        "reward with a parameter from nowhere",
        ("'unbound'", "'solution_text'", "answer"),
        ("reward.functions=[user.py:unbound]",),
    ),
    BadInput(
        "reward that raises", ("'raises'", "on purpose", "user.py"), ("reward.functions=[user.py:raises]",)
    ),
    BadInput(
        "reward that hangs", ("'hangs'", "reward.timeout_s = 1 s"), ("reward.functions=[user.py:hangs]",)
    ),
    BadInput("reward that returns NaN", ("'nan'", "found nan"), ("reward.functions=[user.py:nan]",)),
    BadInput(
        "reward that returns text", ("'text'", "found '1.0' (str)"), ("reward.functions=[user.py:text]",)
    ),
    BadInput(
        "reward that returns two values",
        ("'many'", "found 2 values", "1 number"),
        ("reward.functions=[user.py:many]",),
    ),
    BadInput(
        "holdout larger than the data",
        ("data.eval.holdout", "found 50", "20 distinct"),
        ("data.eval.holdout=50",),
    ),
    BadInput(
        "prompts longer than the model", ("= 300", "max_positions = 256"), ("data.max_prompt_tokens=236",)
    ),
    BadInput("prompts longer than a model folder", ("= 128", "= 100", "model"), model={}, positions=100),
    BadInput(
        "prompts over the limit",
        ("20 of 20 prompts", "= 3"),
        ("data.max_prompt_tokens=3", "data.over_long=error"),
    ),
    BadInput("no EOS", ("no EOS token",), model={"eos_token": None}),
    BadInput("no chat template", ("no chat template", "data.template to plain"), ("data.template=chat",)),
    BadInput("no model folder", ("no such folder", "nowhere"), ("model.create=null", "model.path=./nowhere")),
    BadInput("unwritable run folder", ("run.dir", "/dev/null is no folder"), ("run.dir=/dev/null/x",)),
    BadInput(
        "taken run name",
        ("runs/mine", "another run.name", "delete the folder"),
        files={"runs/mine/metrics.jsonl": "{}\n"},
    ),
    BadInput(
        "colocated with unequal counts",
        ("generators.replicas: found 1 with learner.ranks 2",),
        ("placement.mode=colocated", "schedule.pipeline_depth=0", "learner.ranks=2"),
    ),
    BadInput(
        "colocated with parameters in parts",
        ("learner.zero_stage: found 3", "at most 2"),
        ("placement.mode=colocated", "schedule.pipeline_depth=0", "learner.zero_stage=3"),
    ),
    BadInput(
        "heads that learner ranks cannot share",
        ("learner.tensor_parallel: found 2", "the 3 attention heads"),
        ("learner.ranks=2", "learner.tensor_parallel=2", "model.create.heads=3", "model.create.kv_heads=3"),
    ),
    BadInput(
        "heads that vLLM's workers cannot share",
        ("tensor_parallel_size: found 2", "the 3 attention heads"),
        (
            "generators.backend=vllm",
            "generators.vllm.tensor_parallel_size=2",
            "model.create.heads=3",
            "model.create.kv_heads=3",
        ),
    ),
    BadInput(
        "a way to divide a model that vLLM was never run with",
        ("pipeline_parallel_size: found 2", "tensor_parallel_size"),
        ("generators.backend=vllm", "generators.vllm.pipeline_parallel_size=2"),
    ),
    BadInput("a core that is not there", ("generators.cpu_cores", "7777"), ("generators.cpu_cores=[7777]",)),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "user.py").write_text(USER_CODE)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(bad: BadInput, folder: Path) -> list[str]:
    for name, text in bad.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    overrides = list(bad.overrides)
    if bad.model is not None:
        tokenizer = character_tokenizer(256)
        for name, value in bad.model.items():
            setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder / "model")
        settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        settings["max_position_embeddings"] = bad.positions  # type: ignore[assignment]
        (folder / "model" / "config.json").write_text(json.dumps(settings))
        overrides += ["model.create=null", "model.path=model"]
    return ["--config", "run.yaml", *overrides]


def test_the_config_that_the_others_break_is_good(folder: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--config", "run.yaml"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_bad_input(folder: Path, bad: BadInput, command: str) -> None:
    given = arguments(bad, folder)
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(app, [command, *given])
    assert result.exit_code == 2, result.output
    assert str(Path(asyncrl.__file__).parent) not in result.output  # no traceback but the user's own
    for part in bad.says:
        assert part in result.output
    # Nothing was begun.
    assert [p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts] == before


@pytest.mark.parametrize(
    "name",
    [
        "missing data file",
        "unknown key in the file",
        "reward that hangs",
        "bad line",
        "unwritable run folder",
    ],
)
def test_bad_input_as_a_process(folder: Path, name: str) -> None:
    bad = next(bad for bad in BAD_INPUTS if bad.name == name)
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "train", *arguments(bad, folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = os.times()
    # Processor time: the wall clock belongs to whoever shares the machine.
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert any(line.startswith("error: ") for line in done.stderr.splitlines())
    for part in bad.says:
        assert part in done.stderr
    assert spent < LIMIT_S
