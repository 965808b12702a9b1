"""The config: what it refuses, and how it says so."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from asyncrl.config import Config
from asyncrl.config_load import dump_config, load_config, parse_config
from asyncrl.errors import ConfigError

VALUES: dict[str, Any] = {
    "model": {"create": {}},
    "data": {"train": "rows.jsonl", "eval": {"holdout": 5}, "max_prompt_tokens": 64},
    "reward": {"functions": ["exact_match"]},
}


def errors(*overrides: str, values: dict[str, Any] | None = None) -> list[str]:
    """The lines of the ConfigError, without its heading."""
    with pytest.raises(ConfigError) as caught:
        parse_config(values or VALUES, overrides)
    heading, *lines = str(caught.value).split("\n")
    assert len(lines) == int(heading.split()[0])
    return [line.strip() for line in lines]


def test_plain_strings_are_paths() -> None:
    config = parse_config(VALUES)
    assert config.data.train.path == "rows.jsonl"
    assert config.reward.functions[0].path == "exact_match"
    assert config.run.folder == Path("runs/run")


def test_overrides_have_types_and_an_order() -> None:
    overrides = ["run.steps=7", "run.name=2024", "learner.lr=1e-4", "eval.max_prompts=null", "run.steps=9"]
    overrides += ["generators.cpu_cores=[0,1]", "reward.functions=[{path: a.py:f, weight: 2}]"]
    config = parse_config(VALUES, [*overrides, "reward.functions.0.weight=3"])
    assert (config.run.steps, config.run.name, config.learner.lr) == (9, "2024", 1e-4)
    assert config.generators.cpu_cores == (0, 1)
    assert config.reward.functions[0].weight == 3.0


def test_an_override_sets_its_key_whatever_was_there() -> None:
    config = parse_config(VALUES, ["data.train.size=5", "data.eval={path: b.jsonl}"])
    assert (config.data.train.path, config.data.train.size) == ("rows.jsonl", 5)
    assert config.data.eval is not None
    assert (config.data.eval.path, config.data.eval.holdout) == ("b.jsonl", None)


@pytest.mark.parametrize(
    "override", ["run.steps", "=3", "run..steps=3", "run.steps.x=3", "run.name=${nothing}"]
)
def test_overrides_that_make_no_sense(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse_config(VALUES, [override])


def test_a_dumped_config_loads_again(tmp_path: Path) -> None:
    config = parse_config(VALUES, ["run.steps=7", "rollout.stop=[a]", "generators.cpu_cores=[0]"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.nmae=x", "run.nmae: unknown key; did you mean run.name?"),
        ("schedule.group_size=4", "schedule.group_size: unknown key; did you mean rollout.group_size?"),
        ("data.train.pth=4", "data.train.pth: unknown key; did you mean data.train.path?"),
        ("rnu.steps=4", "rnu: unknown key; did you mean run?"),
        ("run.steps=many", "run.steps: found 'many' (text); expected a whole number"),
        ("run.steps=0", "run.steps: found 0; expected more than 0"),
        ("run.steps=1.5", "run.steps: found 1.5; expected a whole number"),
        ("run.deterministic=maybe", "run.deterministic: found 'maybe' (text); expected true or false"),
        ("learner.lr=.inf", "learner.lr: found inf; expected a finite number"),
        ("learner.zero_stage=4", "learner.zero_stage: found 4; expected at most 3"),
        ("rollout=3", "rollout: found 3; expected a block of keys"),
        ("generators.cpu_cores=0", "generators.cpu_cores: found 0; expected a list"),
        ("generators.cpu_cores=[]", "generators.cpu_cores: found 0 entries; expected at least 1"),
        (
            "data.over_long=cut",
            "data.over_long: found 'cut' (text); expected 'drop', 'truncate_left' or 'error'",
        ),
        ("reward.functions=[]", "reward.functions: found 0 entries; expected at least 1"),
        ("reward.functions=[{path: a, wieght: 1}]", "did you mean reward.functions[0].weight?"),
        ("run.name=a/b", "run.name: found 'a/b' (text); expected letters"),
        ("run.name=..", "run.name: found '..' (text); expected letters"),
    ],
)
def test_one_wrong_value(override: str, expected: str) -> None:
    (line,) = errors(override)
    assert expected in line


@pytest.mark.parametrize(
    ("overrides", "key", "parts"),
    [
        (["schedule.max_staleness=0"], "schedule.max_staleness", ["found 0", "1 + 1 - 1 = 1", "raise"]),
        (
            ["schedule.at_bound=mask", "schedule.in_flight_updates=false"],
            "schedule.at_bound",
            ["found 'mask'", "in_flight_updates false", "wait or drop"],
        ),
        (["schedule.publish_every=3"], "schedule.max_staleness", ["found 2", "1 + 3 - 1 = 3"]),
        (["learner.micro_batch_tokens=100"], "learner.micro_batch_tokens", ["found 100", "64 + 64 = 128"]),
        (["rollout.max_new_tokens=200"], "rollout.max_new_tokens", ["64 + 200 = 264", "max_positions = 256"]),
        (["eval.max_new_tokens=200"], "eval.max_new_tokens", ["64 + 200 = 264", "max_positions = 256"]),
        (["algorithm.correction=none"], "algorithm.correction", ["max_staleness 2", "allow_uncorrected"]),
        (["algorithm.old_logprobs=behaviour"], "algorithm.correction", ["twice", "recompute"]),
        (["rollout.top_p=0.9"], "rollout.top_p", ["0.9", "eval.top_p"]),
        (["rollout.top_k=5"], "rollout.top_k", ["found 5", "eval.top_k"]),
        (["rollout.group_size=1", "rollout.min_group=1"], "rollout.group_size", ["found 1", "at least 2"]),
        (["rollout.min_group=1"], "rollout.min_group", ["found 1", "at least 2"]),
        (["rollout.min_group=9"], "rollout.min_group", ["found 9", "rollout.group_size = 8"]),
        (["learner.ranks=9"], "rollout.groups_per_step", ["found 8", "learner.ranks = 9"]),
        (["learner.lora.dropout=0.1"], "learner.lora.dropout", ["found 0.1", "expected 0"]),
        (
            ["learner.backend=fsdp2", "learner.zero_stage=1"],
            "learner.zero_stage",
            ["found 1", "expected 2 or 3", "learner.backend deepspeed"],
        ),
        (
            ["algorithm.advantage=gae", "critic.backend=fsdp2", "critic.zero_stage=0"],
            "critic.zero_stage",
            ["found 0", "expected 2 or 3", "critic.backend deepspeed"],
        ),
        (
            ["learner.backend=fsdp2", "learner.ranks=2", "learner.tensor_parallel=2"],
            "learner.tensor_parallel",
            ["found 2", "expected 1", "learner.backend deepspeed"],
        ),
        (
            ["learner.backend=fsdp2", "learner.lora.rank=4"],
            "learner.lora",
            ["found it set", "expected null", "learner.backend deepspeed"],
        ),
        (
            ["learner.lora.target_modules=[all-linear,q_proj]"],
            "learner.lora.target_modules",
            ["2 names", "alone"],
        ),
        (["weight_sync.adapter_only=true"], "weight_sync.adapter_only", ["learner.lora null"]),
        (
            ["weight_sync.adapter_only=true", "learner.lora={}", "generators.backend=vllm"],
            "weight_sync.adapter_only",
            ["'vllm'", "backend torch"],
        ),
        (
            [
                "weight_sync.adapter_only=true",
                "learner.lora={}",
                "reference.refresh_every=2",
                "algorithm.kl=loss",
            ],
            "weight_sync.adapter_only",
            ["refresh_every 2", "expected refresh_every 0"],
        ),
        (
            [
                "reference.place=lora_base",
                "learner.lora={}",
                "reference.refresh_every=2",
                "algorithm.kl=loss",
            ],
            "reference.place",
            ["refresh_every 2", "never moves"],
        ),
        (["reference.place=lora_base"], "reference.place", ["learner.lora null"]),
        (
            ["reference.place=learner", "learner.lora={}", "algorithm.kl=loss"],
            "reference.place",
            ["lora set", "lora_base"],
        ),
        (["reference.place=learner", "algorithm.kl=reward"], "reference.place", ["'learner'", "kl loss"]),
        (
            ["reference.place=lora_base", "learner.lora={}", "reference.path=x"],
            "reference.place",
            ["'x'"],
        ),
        (
            ["reference.place=lora_base", "learner.lora={}", "reference.dtype=bfloat16"],
            "reference.place",
            ["'bfloat16'", "model.dtype = 'float32'"],
        ),
        (
            ["reference.place=lora_base", "learner.lora={}", "algorithm.kl=reward"],
            "reference.place",
            ["'reward'", "kl loss"],
        ),
        (["model.path=x"], "model", ["both", "'x'"]),
        (["model.create=null"], "model", ["neither"]),
        (["data.train.hub=x"], "data.train", ["path and hub", "exactly one"]),
        (["data.train.path=null"], "data.train", ["none", "exactly one"]),
        (["data.eval.path=x"], "data.eval", ["path and holdout"]),
        (["data.train={holdout: 5}"], "data.train.holdout", ["data.eval alone"]),
        (
            ["weight_sync.backend=nccl", "learner.device=cpu"],
            "weight_sync.backend",
            ["learner.device 'cpu'", "gloo"],
        ),
        (["weight_sync.backend=nccl", "generators.device=mps"], "weight_sync.backend", ["generators.device"]),
        (["learner.warmup_steps=101"], "learner.warmup_steps", ["found 101", "run.steps = 100"]),
        (["model.create.hidden_size=190"], "model.create.hidden_size", ["found 190", "= 8"]),
        (["model.create.kv_heads=3"], "model.create.kv_heads", ["found 3", "heads = 4"]),
        (
            ["reward.functions=[{path: a.b, name: n}, {path: a.c, name: n}]"],
            "reward.functions",
            ["'n' 2 times"],
        ),
    ],
)
def test_values_that_contradict(overrides: list[str], key: str, parts: list[str]) -> None:
    (line,) = errors(*overrides)
    assert line.startswith(f"{key}: found")
    for part in [*parts, "expected"]:
        assert part in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.pipeline_depth=0", "schedule.max_staleness=0"],
        ["schedule.pipeline_depth=2", "schedule.publish_every=3", "schedule.max_staleness=4"],
        ["algorithm.correction=none", "schedule.max_staleness=1"],
        ["algorithm.correction=none", "algorithm.allow_uncorrected=true"],
        ["algorithm.correction=none", "algorithm.old_logprobs=behaviour", "schedule.max_staleness=1"],
        ["eval.top_p=0.5", "eval.top_k=3"],
        ["rollout.max_new_tokens=192", "learner.micro_batch_tokens=256"],
        ["eval.max_new_tokens=200", "data.eval=null"],
        ["weight_sync.backend=nccl"],
    ],
)
def test_values_at_the_edge_of_what_is_allowed(overrides: list[str]) -> None:
    parse_config(VALUES, overrides)


def test_a_reference_that_is_the_base_of_the_adapters_has_no_actors() -> None:
    config = parse_config(VALUES, ["algorithm.kl=loss", "learner.lora={}"])
    assert set(config.roles) == {"reference"}
    assert not parse_config(
        VALUES, ["algorithm.kl=loss", "learner.lora={}", "reference.place=lora_base"]
    ).roles


def test_a_reward_model_is_a_role_and_may_be_all_of_the_reward() -> None:
    config = parse_config(VALUES, ["reward_model={path: x, replicas: 2}", "reward.functions=[]"])
    assert config.roles == {"reward_model": config.reward_model}
    assert config.reward_model.actors == ("replicas", 2)
    (line,) = errors("reward_model={path: x}", "reward.functions=[{path: a.py:f, name: reward_model}]")
    assert line.startswith("reward.functions: found a function with the name 'reward_model'")
    assert errors("reward_model={weight: 2}") == [
        "reward_model.path: found nothing; expected this key to be set"
    ]


def test_all_errors_come_at_once() -> None:
    lines = errors("run.steps=0", "foo=1", "model.path=x", "learner.lr=-1", "data.train.hub=y")
    keys = [line.partition(":")[0] for line in lines]
    assert sorted(keys) == ["data.train", "foo", "learner.lr", "model", "run.steps"]
    lines = errors("schedule.max_staleness=0", "rollout.top_p=0.5", "learner.ranks=100")
    keys = [line.partition(":")[0] for line in lines]
    assert keys == ["schedule.max_staleness", "rollout.groups_per_step", "rollout.top_p"]


def test_missing_blocks_are_named() -> None:
    lines = errors(values={"run": {"steps": 3}})
    assert lines == [f"{key}: found nothing; expected this key to be set" for key in ("model", "data")]
    (line,) = errors(values={key: VALUES[key] for key in ("model", "data")})
    assert line.startswith("reward.functions: found 0 entries; expected at least 1, or a reward_model")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1", "expected sections"),
        ("a: 1\na: 2", "not valid YAML"),
        ("", "model"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=part) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no file"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def _sections(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        found.append((prefix + name, field))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += _sections(inner, f"{prefix}{name}.")
    return found


def test_every_field_is_documented() -> None:
    assert [path for path, field in _sections(Config) if not field.description] == []


def test_a_run_has_one_length() -> None:
    """Nothing beside ``run.steps`` says how long it is; the others are of parts of it."""
    lengths = [
        path
        for path, _ in _sections(Config)
        if re.search(r"(^|_)(epochs?|steps?|iterations|episodes|total)(_(?!timeout)|$)", path.split(".")[-1])
    ]
    of_parts = {"model.create.warm_start.steps", "learner.warmup_steps", "critic.warmup_steps"}
    of_a_step = {"rollout.groups_per_step", "algorithm.epochs", "learner.max_bad_steps"}
    assert set(lengths) - of_parts - of_a_step == {"run.steps"}


LEAVES = [path for path, field in _sections(Config) if not isinstance(field.annotation, type(BaseModel))]
JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JUNK |= st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)


@given(st.sampled_from(LEAVES), JUNK)
def test_any_value_anywhere_is_accepted_or_refused_with_its_path(path: str, value: Any) -> None:
    values = copy.deepcopy(VALUES)
    *sections, key = path.split(".")
    place = values
    for section in sections:
        place[section] = (
            {"path": place[section]} if isinstance(place.get(section), str) else place.get(section, {})
        )
        place = place[section]
    place[key] = value
    try:
        config = parse_config(values)
    except ConfigError as error:
        first = str(error).split("\n")[1].strip()
        assert "expected" in first or "did you mean" in first
    else:
        assert parse_config(yaml.safe_load(dump_config(config))) == config


VLLM = ("generators.backend=vllm",)


def test_vllm_options_pass_under_their_own_names_and_count_workers() -> None:
    config = parse_config(
        VALUES, [*VLLM, "generators.vllm.tensor_parallel_size=2", "generators.vllm.block_size=32"]
    )
    assert config.generators.vllm == {"tensor_parallel_size": 2, "block_size": 32}
    assert config.generators.workers == 2
    assert parse_config(VALUES).generators.workers == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*VLLM, "generators.vllm.max_num_seqs=8"), "vllm.max_num_seqs: found it set.*set generators.slots"),
        ((*VLLM, "generators.vllm.logprobs_mode=raw_logprobs"), "logprobs_mode: found it set.*remove it"),
        ((*VLLM, "generators.vllm.max_model_len=100"), "found 100; expected at least.*128 tokens"),
        ((*VLLM, "generators.vllm.tensor_parallel_size=0"), "tensor_parallel_size: found 0; expected"),
        (
            (*VLLM, "generators.vllm.pipeline_parallel_size=2"),
            "pipeline_parallel_size: found 2; expected it left out.*use tensor_parallel_size",
        ),
        (
            (*VLLM, "generators.vllm.data_parallel_size=2"),
            "data_parallel_size: found 2; expected it left out.*set generators.replicas",
        ),
        (
            (*VLLM, "generators.vllm.enable_expert_parallel=true"),
            "enable_expert_parallel: found True; expected it left out",
        ),
        (
            (*VLLM, "run.deterministic=true"),
            "run.deterministic: found true.*expected generators.backend torch",
        ),
        ((*VLLM, "generators.device=mps"), "generators.device: found 'mps'"),
        (("generators.vllm.block_size=32",), "found block_size with generators.backend 'torch'"),
    ],
)
def test_what_vllm_cannot_be_asked_is_refused_without_it(overrides: tuple[str, ...], words: str) -> None:
    (line,) = errors(*overrides)
    assert re.search(words, line), line
