"""Prompts: sources, templates, the split by text, and the endless stream."""

from __future__ import annotations

import datetime
import decimal
import json
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config, SourceSection
from asyncrl.config_load import parse_config
from asyncrl.data import Prompts, load_prompts
from asyncrl.data.order import permutation
from asyncrl.data.sources import open_source, plain
from asyncrl.errors import ConfigError, DataError
from asyncrl.models.tokenizer import character_tokenizer

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(20)]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(*overrides: str, **data: Any) -> Config:
    values = {"model": {"create": {}}, "data": data, "reward": {"functions": ["exact_match"]}}
    return parse_config(values, ["data.max_prompt_tokens=64", *overrides])


def load(
    tmp_path: Path, rows: list[Any] = ROWS, *overrides: str, chat_template: str | None = None, **data: Any
) -> Prompts:
    write_jsonl(tmp_path / "rows.jsonl", rows)
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = chat_template
    return load_prompts(config_of(*overrides, **{"train": "rows.jsonl", **data}), tokenizer, tmp_path)


# --- sources ---


def test_every_kind_of_source_gives_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=7)
    (tmp_path / "made.py").write_text(f"def rows(n): return ({ROWS!r}[i] for i in range(n))")
    for source in (
        SourceSection(path="rows.jsonl"),
        SourceSection(path="rows.parquet"),
        SourceSection(python="made.py:rows", args={"n": 20}),
        SourceSection(python="made:rows", args={"n": 20}),
    ):
        rows = open_source(source, tmp_path)
        assert [rows[i] for i in range(len(rows))] == ROWS
        assert rows[13] == ROWS[13]
        few = open_source(source.model_copy(update={"size": 3}), tmp_path)
        assert [few[i] for i in range(len(few))] == ROWS[:3]


def test_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own loader, on a data set folder instead of the network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    rows = open_source(SourceSection(hub=str(tmp_path / "set")), tmp_path)
    assert [rows[i] for i in range(len(rows))] == ROWS
    with pytest.raises(DataError, match=r"split 'nope'\) cannot be loaded"):
        open_source(SourceSection(hub=str(tmp_path / "set"), split="nope"), tmp_path)


def test_a_reasoning_gym_family(tmp_path: Path) -> None:
    section = SourceSection(reasoning_gym="chain_sum", args={"min_terms": 2, "max_terms": 2}, size=30, seed=3)
    rows, again = open_source(section, tmp_path), open_source(section, tmp_path)
    assert len(rows) == 30
    assert [rows[i] for i in range(30)] == [again[i] for i in range(30)]
    assert {"question", "answer", "metadata"} <= set(rows[0])
    msgpack.packb(rows[0])
    with pytest.raises(DataError, match="chain_sum"):
        open_source(SourceSection(reasoning_gym="chainsum"), tmp_path)
    with pytest.raises(DataError, match="refuses args"):
        open_source(SourceSection(reasoning_gym="chain_sum", args={"terms": 2}), tmp_path)


def test_blank_lines_keep_the_numbers_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\n{"prompt": "a"}\r\n  \n\n{"prompt": "\xc3\xa9"}')
    rows = open_source(SourceSection(path="rows.jsonl"), tmp_path)
    assert [rows[i] for i in range(len(rows))] == [{"prompt": "a"}, {"prompt": "é"}]
    assert [rows.where(i) for i in range(2)] == ["rows.jsonl line 2", "rows.jsonl line 5"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.jsonl", None, "no such file"),
        ("rows.parquet", None, "no such file"),
        ("rows.csv", b"a,b", "suffix '.csv'"),
        ("rows.jsonl", b"", "found 0 rows"),
        ("rows.jsonl", b"\n \n", "found 0 rows"),
        ("rows.parquet", b"PAR1 this is not", "not a readable parquet"),
    ],
)
def test_sources_that_cannot_be_opened(tmp_path: Path, name: str, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=text):
        open_source(SourceSection(path=name), tmp_path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b"[1]", "found list"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'"a"', "found str"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, text: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl line 3.*{text}"):
        load_prompts(config_of(train="rows.jsonl"), character_tokenizer(256), tmp_path)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("def rows(): return 3", "found int; expected an iterable"),
        ("def rows(): raise OSError('disk')", "OSError: disk"),
        ("def rows(a): return []", "missing 1 required"),
        ("def rows(): return []", "found 0 rows"),
        ("def rows(): return [3]", "found int; expected an object"),
        ("def rows(): return [{'prompt': object()}]", "found a object"),
    ],
)
def test_functions_that_give_no_rows(tmp_path: Path, code: str, text: str) -> None:
    (tmp_path / "made.py").write_text(code)
    with pytest.raises(DataError, match=text):
        load_prompts(config_of(train={"python": "made.py:rows"}), character_tokenizer(256), tmp_path)


def test_a_function_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no file"):
        open_source(SourceSection(python="made.py:rows"), tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner)
    ),
)


@given(VALUES)
def test_plain_values_can_be_packed_and_stay_as_they_are(value: Any) -> None:
    made = plain(value, "here")
    unpacked = msgpack.unpackb(
        msgpack.packb(made, unicode_errors="surrogatepass"),
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )
    assert unpacked == made
    assert plain(made, "here") == made


def test_values_of_libraries_become_plain() -> None:
    made = plain(
        {
            "a": np.arange(3),
            "b": np.float32(0.5),
            "c": datetime.date(2024, 5, 6),
            "d": decimal.Decimal("1.50"),
        },
        "x",
    )
    assert made == {"a": [0, 1, 2], "b": 0.5, "c": "2024-05-06", "d": "1.50"}


# --- templates ---


def test_plain_prompts(tmp_path: Path) -> None:
    data = {"prompt_format": "Q{level}: {prompt} A:", "system": "Add.", "shuffle": False}
    task = load(tmp_path, **data).train.task(3)
    assert task.prompt == "Add.\nQ3: 3+3= A:"
    assert character_tokenizer(256).decode(task.prompt_ids) == task.prompt
    assert (task.ordinal, task.uid, task.row) == (3, "train-3", ROWS[3])


def test_chat_prompts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    data = {"prompt_key": "p", "system": "Add.", "shuffle": False}
    prompts = load(tmp_path, [{"p": "text"}, {"p": messages}], chat_template=TEMPLATE, **data)
    assert prompts.train.task(0).prompt == "[system]Add.[user]text[assistant]"
    assert prompts.train.task(1).prompt == "[system]s[user]u[assistant]"
    prompts = load(tmp_path, [{"p": messages}], "data.template=plain", chat_template=TEMPLATE, **data)
    assert prompts.train.task(0).prompt == "s\nu"


@pytest.mark.parametrize(
    ("rows", "data", "text"),
    [
        (ROWS, {"template": "chat"}, "no chat template"),
        (ROWS, {"prompt_key": "quesion"}, "columns question, answer, level; expected a column quesion"),
        ([{"text": "a"}], {}, "prompt or question or input or problem"),
        ([{"prompt": "a"}, {"text": "b"}], {}, r"line 2: found the columns text; expected 'prompt'"),
        ([{"prompt": 3}], {}, "found int; expected text"),
        ([{"prompt": []}], {}, "found list; expected text"),
        ([{"prompt": ""}], {}, "line 1: found an empty prompt"),
        (ROWS, {"prompt_format": "{promt}"}, "names 'promt'; expected prompt or one of the columns"),
        (ROWS, {"prompt_format": "{"}, "cannot be filled in"),
    ],
)
def test_prompts_that_cannot_be_made(
    tmp_path: Path, rows: list[Any], data: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        load(tmp_path, rows, **data)


# --- over-long prompts ---

LENGTHS = [{"prompt": "x" * n} for n in (3, 9, 5, 12, 1)]


def test_over_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    prompts = load(tmp_path, LENGTHS, "data.max_prompt_tokens=5")
    assert {prompts.train.task(i).uid for i in range(3)} == {"train-0", "train-2", "train-4"}
    report = prompts.report
    assert (report.train_rows, report.trainable, report.over_long, report.longest_prompt) == (5, 3, 2, 5)
    assert "2 over-long dropped" in str(report)


def test_over_long_prompts_lose_their_beginning(tmp_path: Path) -> None:
    data = {"over_long": "truncate_left", "shuffle": False}
    prompts = load(tmp_path, [{"prompt": "abcdefgh"}, {"prompt": "ab"}], "data.max_prompt_tokens=5", **data)
    assert [prompts.train.task(i).prompt for i in range(2)] == ["defgh", "ab"]
    assert len(prompts.train.task(0).prompt_ids) == 5
    assert prompts.report.over_long == 1


@pytest.mark.parametrize(
    ("limit", "policy", "text"),
    [(5, "error", r"2 of 5 prompts.*= 5, the first at rows.jsonl line 2 with 9"), (0, "drop", "more than 0")],
)
def test_over_long_prompts_can_be_an_error(tmp_path: Path, limit: int, policy: str, text: str) -> None:
    with pytest.raises((DataError, ConfigError), match=text):
        load(tmp_path, LENGTHS, f"data.max_prompt_tokens={limit}", over_long=policy)


def test_nothing_that_fits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 2 prompts.*= 5, the shortest with 9"):
        load(tmp_path, [LENGTHS[1], LENGTHS[3]], "data.max_prompt_tokens=5")


# --- the split ---


def test_held_out_prompts_are_never_trained_on(tmp_path: Path) -> None:
    rows = [{"question": f"q{i % 12}", "answer": str(i)} for i in range(30)]
    prompts = load(tmp_path, rows, eval={"holdout": 5})
    held = {task.prompt for task in prompts.eval}
    trained = {task.prompt for task in islice(prompts.train.iterate(), len(prompts.train))}
    assert len(prompts.eval) == len(held) == 5
    assert held | trained == {f"q{i}" for i in range(12)}
    assert not held & trained
    report = prompts.report
    assert report.trainable + report.held_for_eval == 30
    assert [task.ordinal for task in prompts.eval] == list(range(5))


def test_the_held_out_prompts_do_not_depend_on_the_run_seed(tmp_path: Path) -> None:
    first, other, moved = (
        [task.uid for task in load(tmp_path, ROWS, f"run.seed={run}", eval={"holdout": 5, "seed": data}).eval]
        for run, data in ((0, 0), (1, 0), (0, 1))
    )
    assert first == other != moved


def test_an_eval_source_takes_its_prompts_from_training(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "eval.jsonl", [ROWS[3], {"question": "new"}, ROWS[7]])
    prompts = load(tmp_path, eval="eval.jsonl")
    assert [task.prompt for task in prompts.eval] == ["3+3=", "new", "7+7="]
    assert [task.uid for task in prompts.eval] == ["eval-0", "eval-1", "eval-2"]
    assert (prompts.report.trainable, prompts.report.held_for_eval) == (18, 2)
    few = load(tmp_path, ROWS, "eval.max_prompts=1", eval="eval.jsonl")
    assert (len(few.eval), few.report.trainable) == (1, 18)


@pytest.mark.parametrize("count", [20, 21, 1000])
def test_more_held_out_than_there_is(tmp_path: Path, count: int) -> None:
    with pytest.raises(DataError, match=rf"found {count}, with 20 distinct prompts.*at most 19"):
        load(tmp_path, eval={"holdout": count})


def test_eval_may_not_take_everything(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"20 have a prompt that is in data\.eval"):
        load(tmp_path, eval="rows.jsonl")


# --- the stream ---


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    stream = load(tmp_path).train
    epochs = [[stream.task(e * 20 + i).uid for i in range(20)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [task.ordinal for task in islice(stream.iterate(17), 6)] == list(range(17, 23))


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_task_is_a_function_of_its_ordinal(
    tmp_path_factory: pytest.TempPathFactory, ordinals: list[int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    one, other = load(folder).train, load(folder).train
    expected = {ordinal: other.task(ordinal) for ordinal in sorted(ordinals)}
    assert [one.task(ordinal) for ordinal in ordinals] == [expected[ordinal] for ordinal in ordinals]


def test_the_order_depends_on_the_run_seed_alone(tmp_path: Path) -> None:
    orders = [
        [load(tmp_path, ROWS, f"run.seed={seed}").train.task(i).uid for i in range(20)] for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


@given(st.integers(1, 500), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_a_permutation_has_every_index(length: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(length, seed, epoch)) == list(range(length))


def test_the_permutation_is_pinned() -> None:
    """A resumed run must see the same order whatever it was updated to in between."""
    assert permutation(10, 7, 3).tolist() == PINNED


PINNED = [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]
