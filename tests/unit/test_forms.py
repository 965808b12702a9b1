"""Data sets as users of other projects have them: recognised by their columns, read unchanged, mixed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.data import Prompts, load_prompts
from asyncrl.data.order import BLOCK, EpochOrder, WeightedOrder, places
from asyncrl.errors import ConfigError, DataError
from asyncrl.models.tokenizer import character_tokenizer

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(6)
]
TRL = [{"prompt": f"{i}+2=", "solution": str(i + 2)} for i in range(6)]
TRL_CHAT = [{"prompt": [{"role": "user", "content": f"{i}+2="}], "solution": str(i + 2)} for i in range(6)]
OPENRLHF = [{"input": f"{i}+3=", "label": str(i + 3), "datasource": "sums"} for i in range(6)]
SKYRL = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i}+4="}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(i + 4)},
        "extra_info": {"index": i},
    }
    for i in range(6)
]
GYM = [
    {"question": f"{i}+5=", "answer": str(i + 5), "metadata": {"source_dataset": "chain_sum"}}
    for i in range(6)
]
PLAIN = [{"problem": f"{i}+6=", "answer": str(i + 6)} for i in range(6)]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    """As .jsonl or .parquet, by the suffix."""
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def config_of(*overrides: str, **data: Any) -> Config:
    values = {"model": {"create": {}}, "data": data, "reward": {"functions": ["exact_match"]}}
    return parse_config(values, ["data.max_prompt_tokens=64", *overrides])


def load(folder: Path, *overrides: str, **data: Any) -> Prompts:
    return load_prompts(config_of(*overrides, **data), character_tokenizer(256), folder)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("rows", "form", "prompt", "truth"),
    [
        (VERL, "verl rows, prompt in prompt, ground truth in reward_model.ground_truth", "0+1=", "1"),
        (TRL, "trl rows, prompt in prompt", "0+2=", None),
        (TRL_CHAT, "trl rows, prompt in prompt", "0+2=", None),
        (OPENRLHF, "openrlhf rows, prompt in input, ground truth in label", "0+3=", "3"),
        (SKYRL, "skyrl rows, prompt in prompt, ground truth in reward_spec.ground_truth", "0+4=", "4"),
        (GYM, "reasoning_gym rows, prompt in question, ground truth in answer", "0+5=", "5"),
        (PLAIN, "plain rows, prompt in problem", "0+6=", None),
    ],
)
def test_each_form_is_recognised_and_said(
    tmp_path: Path, rows: list[dict[str, Any]], form: str, prompt: str, truth: str | None, suffix: str
) -> None:
    name = write(tmp_path, f"rows.{suffix}", rows)
    prompts = load(tmp_path, "data.shuffle=false", train=name)
    task = prompts.train.task(0)
    assert task.prompt == prompt
    assert task.row.get("ground_truth") == truth
    assert {key: task.row[key] for key in rows[0]} == rows[0], "no column of the user's is changed"
    assert prompts.report.recognised == (f"data.train: 6 {form}",)
    assert form in str(prompts.report)


def test_a_form_can_be_said_outright(tmp_path: Path) -> None:
    name = write(tmp_path, "rows.jsonl", VERL)
    prompts = load(tmp_path, train=name, format="trl")
    assert "ground_truth" not in prompts.train.task(0).row
    prompts = load(tmp_path, "data.shuffle=false", train=name, format="trl", label_key="ability")
    assert prompts.train.task(0).row["ground_truth"] == "math"
    with pytest.raises(DataError, match=r"data.train: .*'skyrl'.*env_class is missing"):
        load(tmp_path, train=name, format="skyrl")
    with pytest.raises(DataError, match=r"expected a column labl for the label: set data\.label_key"):
        load(tmp_path, train=name, label_key="labl")
    with pytest.raises(ConfigError, match="'verl', 'trl', 'openrlhf', 'skyrl', 'reasoning_gym' or 'plain'"):
        config_of(train=name, format="slime")


def test_rows_without_a_ground_truth_stay_as_they_are(tmp_path: Path) -> None:
    judged = [{**row, "reward_model": {"style": "model"}} for row in VERL]
    assert "ground_truth" not in load(tmp_path, train=write(tmp_path, "a.jsonl", judged)).train.task(0).row
    own = [{**row, "ground_truth": "mine"} for row in VERL]
    assert load(tmp_path, train=write(tmp_path, "b.jsonl", own)).train.task(0).row["ground_truth"] == "mine"


# --- mixtures ---


def mixed(folder: Path, *weights: float | None, **data: Any) -> Prompts:
    names = [write(folder, "verl.parquet", VERL), write(folder, "trl.jsonl", TRL[:2])]
    parts = [{"path": n, **({} if w is None else {"weight": w})} for n, w in zip(names, weights, strict=True)]
    return load(folder, train=parts, **data)


def test_a_mixture_without_weights_has_every_row_once_an_epoch(tmp_path: Path) -> None:
    prompts = mixed(tmp_path, None, None)
    assert len(prompts.train) == 8
    epoch = [prompts.train.task(i) for i in range(8)]
    assert sorted(task.prompt for task in epoch) == sorted([f"{i}+1=" for i in range(6)] + ["0+2=", "1+2="])
    assert len({task.uid for task in epoch}) == 8
    assert prompts.report.recognised == (
        "data.train.mixture[0]: 6 verl rows, prompt in prompt, ground truth in reward_model.ground_truth",
        "data.train.mixture[1]: 2 trl rows, prompt in prompt",
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_hold_in_every_block_and_each_source_keeps_its_epochs(tmp_path: Path, shuffle: bool) -> None:
    stream = mixed(tmp_path, 1, 3, shuffle=shuffle).train
    for block in range(2):
        uids = [stream.task(block * BLOCK + i).uid for i in range(BLOCK)]
        counts = Counter(uids)
        first = [counts[f"train-{i}"] for i in range(6)]
        assert sum(first) == 250
        assert max(first) - min(first) <= 1
        assert counts["train-6"] == counts["train-7"] == 375
    assert [stream.task(i).uid for i in (1999, 0, 7)] == [
        mixed(tmp_path, 1, 3, shuffle=shuffle).train.task(i).uid for i in (1999, 0, 7)
    ]


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(0, 3 * BLOCK))
def test_no_source_is_skipped_ahead_or_twice(weights: list[float], ordinal: int) -> None:
    """Up to any ordinal, a source's places are its own stream from the beginning."""
    shares = places(weights)
    assert sum(shares) == BLOCK
    assert all(abs(n - BLOCK * w / sum(weights)) <= 1 for n, w in zip(shares, weights, strict=True))
    size = 10_000
    parts = [
        EpochOrder(np.arange(size * i, size * (i + 1)), seed=1, shuffle=False) for i in range(len(weights))
    ]
    order = WeightedOrder(parts, weights, seed=1, shuffle=True)
    seen = [order.index(i) for i in range(ordinal - ordinal % BLOCK, ordinal + 1)]
    for part, count in enumerate(shares):
        own = [index - size * part for index in seen if index // size == part]
        start = ordinal // BLOCK * count
        assert own == list(range(start, start + len(own)))


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ([{"path": "a", "weight": 1}, {"path": "b"}], "weight in 1 of 2 sources; expected it in all or none"),
        ([{"path": "a", "weight": 1}, {"path": "b", "weight": 1e5}], "weight 1 of 100001"),
        ([{"holdout": 3}], "found a part with holdout"),
        ([{"mixture": [{"path": "a"}]}], "found a part with mixture"),
        (
            [{"path": "a", "wieght": 1}],
            r"data\.train\.mixture\[0\]\.wieght: unknown key",
        ),
        ([], "found none of them"),
    ],
)
def test_mixtures_that_contradict_themselves(train: list[Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(train=train)


def test_a_weighted_source_with_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mixture\[1\]: found no row to train on of 2"):
        mixed(tmp_path, 1, 1, eval={"path": "trl.jsonl"})


# --- several evaluations ---


def test_named_eval_sets_stand_beside_the_one_without_a_name(tmp_path: Path) -> None:
    data = {
        "train": write(tmp_path, "train.jsonl", VERL),
        "eval": {"holdout": 2},
        "eval_sets": {
            "sums": {"path": write(tmp_path, "sums.jsonl", [VERL[0], *TRL])},
            "gym": write(tmp_path, "gym.parquet", GYM),
        },
    }
    prompts = load(tmp_path, "eval.max_prompts=3", **data)
    assert [task.uid for task in prompts.eval_sets["sums"]] == ["eval-sums-0", "eval-sums-1", "eval-sums-2"]
    tasks = [*prompts.eval, *prompts.eval_sets["sums"], *prompts.eval_sets["gym"]]
    assert [task.ordinal for task in tasks] == list(range(8))
    trained = {prompts.train.task(i).prompt for i in range(len(prompts.train))}
    assert not trained & {task.prompt for task in tasks}
    assert prompts.report.eval_prompts == 8
    with pytest.raises(ConfigError, match="found holdout in sums"):
        config_of(train="a", eval_sets={"sums": {"holdout": 3}})
    with pytest.raises(ConfigError, match=r"data\.eval_sets\.sums\.pth: unknown key"):
        config_of(train="a", eval_sets={"sums": {"pth": "b"}})
