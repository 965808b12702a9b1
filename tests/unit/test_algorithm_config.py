"""Names, presets and users' own functions: what ``algorithm`` takes, refuses and resolves to."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from asyncrl.algorithms.advantages import ADVANTAGES, UNBASELINED
from asyncrl.algorithms.aggregation import AGGREGATIONS
from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings
from asyncrl.algorithms.names import (
    ADVANTAGE_NAMES,
    COMPARING,
    CORRECTING,
    KL_ESTIMATOR_NAMES,
    LOSS_NAMES,
    NEEDING_GREEDY,
    PREFERENCE_NAMES,
    PRESETS,
)
from asyncrl.algorithms.registry import policy_loss, user_advantage
from asyncrl.check import require_algorithm
from asyncrl.config import AlgorithmSection
from asyncrl.config_load import dump_config, load_config, parse_config
from asyncrl.errors import ConfigError
from asyncrl.plan import algorithm_text
from tests.unit.test_config import VALUES, errors

RUNNING = sorted(PRESETS)


def choices(key: str) -> set[str]:
    return set(get_args(AlgorithmSection.model_fields[key].annotation))


def test_the_config_knows_the_names_of_the_registries() -> None:
    assert set(ADVANTAGE_NAMES) == ADVANTAGES.keys() | NEEDING_GREEDY
    assert ADVANTAGES.keys() - UNBASELINED == COMPARING
    assert set(LOSS_NAMES) == LOSSES.keys()
    assert LOSSES.keys() > CORRECTING
    assert choices("correction") == CORRECTIONS.keys()
    assert choices("aggregation") == AGGREGATIONS.keys()
    assert choices("preset") == PRESETS.keys()


def test_the_default_is_what_it_has_always_been() -> None:
    algorithm = parse_config(VALUES).algorithm
    assert algorithm == parse_config(VALUES, ["algorithm.preset=grpo"]).algorithm
    assert (algorithm.advantage, algorithm.loss, algorithm.aggregation) == ("grpo", "ppo_clip", "token-mean")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.clip_dual) == (0.2, 0.2, 3.0)
    assert (algorithm.old_logprobs, algorithm.correction, algorithm.tis_cap) == ("recompute", "tis", 2.0)
    assert (algorithm.entropy_coef, algorithm.filter_zero_variance) == (0.0, "none")


@pytest.mark.parametrize("preset", RUNNING)
def test_a_preset_sets_its_keys_and_no_other(preset: str, tmp_path: Path) -> None:
    config = parse_config(VALUES, [f"algorithm.preset={preset}"])
    expected = {**AlgorithmSection().model_dump(), "preset": preset, **PRESETS[preset]}
    assert config.algorithm.model_dump() == expected
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_what_is_set_beside_a_preset_wins() -> None:
    config = parse_config(VALUES, ["algorithm.clip_high=0.5", "algorithm.preset=dapo"])
    assert config.algorithm.clip_high == 0.5
    assert config.algorithm.clip_dual == 10.0
    assert config.overlong_buffer == 13  # a fifth of 64 tokens


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.advantage=gpro", ["advantage: found 'gpro'", "grpo", "file.py:function"]),
        ("algorithm.loss=ppo", ["loss: found 'ppo'", "ppo_clip", "file.py:function"]),
        ("algorithm.loss=aipo", ["correction: found 'tis'", "'aipo'", "by itself", "expected none"]),
        ("algorithm.icepop_low=6", ["icepop_low: found 6", "less than icepop_high = 5"]),
        ("algorithm.mask_high=0.1", ["mask_low: found 0.5", "less than mask_high = 0.1"]),
        ("algorithm.reward_clip=[1,-1]", ["reward_clip: found 1", "-1"]),
        ("learner.attention=flash_attention_2", ["learner.attention: found", "float32", "bfloat16"]),
        ("algorithm.mini_batches=9", ["groups_per_step: found 8", "1 * 9 = 9"]),
        ("algorithm.preset=drgrpo", ["preset: found 'drgrpo'", "'dr_grpo'"]),
    ],
)
def test_what_is_refused(override: str, parts: list[str]) -> None:
    (line,) = errors(override)
    for part in parts:
        assert part in line


def test_losses_that_correct_by_themselves_are_not_uncorrected() -> None:
    for loss in sorted(CORRECTING):
        parse_config(VALUES, [f"algorithm.loss={loss}", "algorithm.correction=none"])
    (line,) = errors("algorithm.loss=gspo", "algorithm.correction=none")
    assert "allow_uncorrected" in line


def test_advantages_that_compare_need_a_group() -> None:
    alone = ["rollout.group_size=1", "rollout.min_group=1"]
    for name in sorted(COMPARING):
        (line,) = errors(*alone, f"algorithm.advantage={name}")
        assert f"because the {name} advantage compares" in line
    parse_config(VALUES, [*alone, "algorithm.preset=reinforce_plus_plus"])
    parse_config(VALUES, [*alone, "algorithm.advantage=remax"])


def test_the_plan_shows_the_whole_block() -> None:
    config = parse_config(VALUES, ["algorithm.preset=dapo", "algorithm.clip_dual=null"])
    heading, block = algorithm_text(config).split(": ", 1)
    assert heading == "preset dapo, but for clip_dual"
    assert yaml.safe_load(block) == {**config.algorithm.model_dump(mode="json"), "length_norm": 64.0}


# ---------------------------------------------------------------------- users' own functions

MINE = """
import torch
from asyncrl.algorithms.losses import TokenLoss, log_ratio

def advantage(rewards, lengths):
    best = max(rewards)
    return [float(r == best) * n for r, n in zip(rewards, lengths)]

def loss(inputs, settings):
    u = log_ratio(inputs.logprobs, inputs.proximal, inputs.mask).exp()
    loss = torch.where(inputs.mask, -inputs.advantages * u, 0.0)
    return TokenLoss(loss, torch.zeros_like(inputs.mask), torch.zeros_like(u))

def one_argument(rewards): return rewards
def short(rewards, lengths): return rewards[1:]
def unfinished(rewards, lengths): return None
def infinite(rewards, lengths): return [float("inf")] * len(rewards)
def text(rewards, lengths): return ["a"] * len(rewards)
def tensor(rewards, lengths): return torch.tensor(rewards) * 2
def bare(inputs, settings): return inputs.logprobs
def scalar(inputs, settings): return TokenLoss(inputs.logprobs.sum(), inputs.mask, inputs.logprobs)
def broken(rewards, lengths): raise KeyError("no")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def some_inputs() -> LossInputs:
    ones = torch.ones(1, 2, dtype=torch.float64)
    return LossInputs((0.5 * ones).requires_grad_(), 0 * ones, 0 * ones, ones, torch.tensor([[True, False]]))


def test_a_users_functions_by_file_and_by_dotted_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_advantage("mine.py:advantage", folder)([0.0, 1.0], [3, 5]) == (0.0, 5.0)
    assert user_advantage("mine.py:tensor", folder)([0.0, 1.0], [3, 5]) == (0.0, 2.0)
    found = policy_loss("mine.py:loss", folder)(some_inputs(), LossSettings()).loss
    expected = LOSSES["ppo_clip"](some_inputs(), LossSettings(clip_high=10.0)).loss
    assert torch.equal(found, expected)
    monkeypatch.syspath_prepend(str(folder))
    assert user_advantage("mine:advantage", folder)([0.0, 1.0], [3, 5]) == (0.0, 5.0)
    assert policy_loss("gspo", folder) is LOSSES["gspo"]


@pytest.mark.parametrize(
    ("key", "path", "text"),
    [
        ("advantage", "mine.py:one_argument", "cannot be called with the two arguments (rewards, lengths)"),
        ("advantage", "mine.py:short", "returned 1 values for 2 rewards"),
        ("advantage", "mine.py:unfinished", "returned 1 values for 2 rewards"),
        ("advantage", "mine.py:infinite", "returned inf for sample 0"),
        ("advantage", "mine.py:text", "expected numbers"),
        ("advantage", "mine.py:broken", "raised KeyError"),
        ("advantage", "mine.py:nothing", "found no 'nothing'"),
        ("advantage", "absent.py:f", "found no file"),
        ("loss", "mine.py:one_argument", "cannot be called with the two arguments (inputs, settings)"),
        ("loss", "absent:f", "found no module 'absent'"),
    ],
)
def test_check_finds_what_is_wrong_with_a_users_function(
    folder: Path, key: str, path: str, text: str
) -> None:
    config = parse_config(VALUES, [f"algorithm.{key}={path}"])
    with pytest.raises(ConfigError) as caught:
        require_algorithm(config, folder)
    assert str(caught.value).startswith(f"algorithm.{key}: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text"), [("mine.py:bare", "returned Tensor"), ("mine.py:scalar", "shape ()")]
)
def test_a_users_loss_is_held_to_its_signature(folder: Path, path: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_loss(path, folder)(some_inputs(), LossSettings())
    assert text in str(caught.value)


def test_a_config_with_users_functions_is_valid(folder: Path) -> None:
    overrides: list[Any] = ["algorithm.advantage=mine.py:advantage", "algorithm.loss=mine.py:loss"]
    require_algorithm(parse_config(VALUES, overrides), folder)


def test_the_functions_in_the_docs_work(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    configs = [parse_config({**VALUES, **block}) for block in blocks]  # each is valid
    (config,) = [c for c, block in zip(configs, blocks, strict=True) if "mine.py" in str(block)]
    require_algorithm(config, tmp_path)
    assert user_advantage(config.algorithm.advantage, tmp_path)([0.0, 1.0, 5.0], [1, 1, 1]) == (-1, 0, 4)
    inputs = replace(some_inputs(), advantages=torch.tensor([[1.0, float("nan")]], dtype=torch.float64))
    found = policy_loss(config.algorithm.loss, tmp_path)(inputs, LossSettings()).loss
    assert torch.equal(found, LOSSES["ppo_clip"](inputs, LossSettings(clip_high=10.0)).loss)


def test_the_docs_name_everything_there_is() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for name in (
        *ADVANTAGE_NAMES,
        *LOSS_NAMES,
        *PREFERENCE_NAMES,
        *KL_ESTIMATOR_NAMES,
        *CORRECTIONS,
        *PRESETS,
    ):
        assert f"`{name}`" in text
    for preset, values in PRESETS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{preset}` | ") and ":" in line]
        stated = {
            k: v for block in re.findall(r"`(\w+: [^`]+)`", row) for k, v in yaml.safe_load(block).items()
        }
        assert {k: float(v) if isinstance(values[k], float) else v for k, v in stated.items()} == values
