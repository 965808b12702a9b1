"""The small model made on first use: its tokenizer, its warm start, and how it comes to be on disk."""

from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import CreateSection, WarmStartSection
from asyncrl.config_load import parse_config
from asyncrl.data import load_prompts
from asyncrl.errors import ConfigError, DataError, DeadlineError
from asyncrl.models import WarmStartProgress, ensure_model, model_folder
from asyncrl.models.build import new_model, target_text, training_examples
from asyncrl.models.tokenizer import CHARACTERS, character_tokenizer
from asyncrl.models.warm_start import IGNORED, Example, _one_per_prompt, collate, evaluate, warm_start

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "layers": 1,
    "heads": 2,
    "kv_heads": 2,
    "max_positions": 64,
}


def config(folder: Path, *overrides: str, data: dict[str, Any] | None = None, steps: int = 2) -> Any:
    return parse_config(
        {
            "run": {"dir": str(folder)},
            "model": {"create": {**TINY, "warm_start": {"steps": steps, "batch_size": 4}}},
            "data": data
            or {
                "train": {"python": "asyncrl.examples.addition:rows", "args": {"digits": 2, "count": 60}},
                "eval": {"holdout": 20},
                "max_prompt_tokens": 16,
            },
            "rollout": {"max_new_tokens": 32},
            "reward": {"functions": ["asyncrl.examples.addition:reward"]},
        },
        overrides,
    )


@given(st.text(alphabet=CHARACTERS))
@example("<eos><unk>")
def test_known_characters_survive_the_tokenizer(text: str) -> None:
    tokenizer = character_tokenizer(64)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_differ_and_unknown_characters_have_one() -> None:
    tokenizer = character_tokenizer(64)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer("é漢")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_collate_puts_the_loss_on_the_target_and_its_end_alone() -> None:
    examples = [Example((5, 6, 7), (8, 9, 1)), Example((5,), (6, 1))]
    inputs, labels = collate(examples, pad_id=0)
    assert inputs.tolist() == [[5, 6, 7, 8, 9, 1], [5, 6, 1, 0, 0, 0]]
    assert labels.tolist() == [[IGNORED] * 3 + [8, 9, 1], [IGNORED, 6, 1] + [IGNORED] * 3]


def test_accuracy_is_the_probability_of_the_whole_target() -> None:
    tokenizer = character_tokenizer(64)
    model = new_model(CreateSection(**TINY), tokenizer).eval()
    examples = [Example((5, 6, 7), (8, 9, 1)), Example((5,), (6, 1))]
    probabilities, logs = [], []
    for each in examples:  # one at a time, unpadded
        ids = torch.tensor([each.prompt_ids + each.target_ids])
        with torch.no_grad():
            log = model(input_ids=ids).logits.log_softmax(-1)[0]
        start = len(each.prompt_ids)
        picked = [float(log[start + i - 1, token]) for i, token in enumerate(each.target_ids)]
        probabilities.append(math.exp(sum(picked)))
        logs += picked
    loss, accuracy = evaluate(model, *collate(examples, pad_id=0))
    assert accuracy == pytest.approx(sum(probabilities) / 2, rel=1e-4)
    assert loss == pytest.approx(-sum(logs) / len(logs), rel=1e-5)


def last_letters(tokenizer: Any) -> list[Example]:
    """A skill that a tiny model picks up at once: the last letter's capital."""
    pairs = [(first + last, last.upper()) for first in "abcdefghij" for last in "abcdefghij"]
    return [
        Example(tuple(tokenizer(a)["input_ids"]), (*tokenizer(b)["input_ids"], tokenizer.eos_token_id))
        for a, b in pairs
    ]


def test_warm_start_learns_stops_at_its_target_and_repeats_itself() -> None:
    tokenizer = character_tokenizer(64)
    section = WarmStartSection(steps=200, batch_size=16, lr=1e-2, target=0.5)
    before = torch.get_num_threads()

    def train() -> tuple[Any, list[WarmStartProgress]]:
        model, seen = new_model(CreateSection(**TINY), tokenizer), []
        last = warm_start(model, last_letters(tokenizer), section, seed=7, pad_id=0, progress=seen.append)
        assert seen[-1] == last
        return model, seen

    model, seen = train()
    assert seen[0].step == 0
    assert seen[0].accuracy < 0.1
    assert seen[-1].accuracy >= 0.5
    assert seen[-1].step < section.steps
    assert all(report.accuracy < 0.5 for report in seen[:-1])
    again, _ = train()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.get_num_threads() == before


def test_the_probe_has_one_example_a_prompt() -> None:
    examples = [Example((i % 30,), (i, 1)) for i in range(300)]
    for most, expected in ((10, 10), (128, 30)):
        probe = _one_per_prompt(examples, most, torch.Generator().manual_seed(0))
        assert len(probe) == len({each.prompt_ids for each in probe}) == expected


def test_nothing_heavy_is_imported_until_a_model_has_to_be_made() -> None:
    code = "import sys, asyncrl.models; print(*{'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == []


def test_a_created_model_loads_by_its_folder_and_is_made_once(tmp_path: Path) -> None:
    seen: list[WarmStartProgress] = []
    folder = ensure_model(config(tmp_path), seen.append)
    assert folder == model_folder(config(tmp_path))
    assert folder.parent == tmp_path / ".models"
    assert [report.step for report in seen] == [0, 2]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    text = "1 + 2 = 3 <eos>\n"
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert ensure_model(config(tmp_path), seen.append) == folder
    assert len(seen) == 2
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_the_folder_depends_on_the_model_and_the_data_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    data = {"train": str(file), "max_prompt_tokens": 16}
    base = model_folder(config(tmp_path, data=data))
    same = ["run.seed=5", "run.name=other", "learner.lr=1e-3", "schedule.max_staleness=4"]
    assert model_folder(config(tmp_path, *same, data=data)) == base
    others = {
        model_folder(config(tmp_path, override, data=data))
        for override in (
            "model.create.layers=2",
            "model.create.warm_start.lr=0.1",
            "data.max_prompt_tokens=8",
        )
    }
    assert len(others) == 3
    assert base not in others
    file.write_text(json.dumps({"question": "1+1=", "answer": "3"}) + "\n")
    assert model_folder(config(tmp_path, data=data)) != base


def test_held_out_prompts_take_no_part_whatever_the_run_seed(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(64)
    base = config(tmp_path, steps=40)
    examples = training_examples(base, base.model.create, tokenizer)
    prompts = load_prompts(base, tokenizer)
    shown = {each.prompt_ids for each in examples}
    assert len(examples) == len(shown) == 40
    assert shown.isdisjoint(task.prompt_ids for task in prompts.eval)
    task = prompts.train.task(0)
    assert (
        Example(task.prompt_ids, (*tokenizer(task.row["solution"])["input_ids"], tokenizer.eos_token_id))
        in examples
    )
    other = config(tmp_path, "run.seed=9", steps=40)
    assert training_examples(other, other.model.create, tokenizer) == examples


def test_the_target_is_the_solution_or_else_the_answer() -> None:
    assert target_text({"answer": 3, "solution": "1+2=3"}) == "1+2=3"
    assert target_text({"answer": 3, "solution": None}) == "3"
    with pytest.raises(DataError, match=r"columns question.*solution or answer.*warm_start\.steps to 0"):
        target_text({"question": "1+2="})


def test_a_failed_build_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}"}) + "\n" for i in range(9)))
    broken = config(tmp_path, data={"train": str(file), "max_prompt_tokens": 16})
    with pytest.raises(DataError, match="solution or answer"):
        ensure_model(broken)
    assert not model_folder(broken).exists()


def test_rows_too_long_for_the_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}", "answer": "x" * 99}) + "\n" for i in range(9)))
    with pytest.raises(DataError, match="found no training row of at most 64 tokens"):
        ensure_model(config(tmp_path, data={"train": str(file), "max_prompt_tokens": 16}))


def test_a_model_is_built_by_one_process_and_waiting_has_a_deadline(tmp_path: Path) -> None:
    mine = config(tmp_path)
    place = model_folder(mine)
    place.parent.mkdir(parents=True)
    lock = place.with_name(f"{place.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as another process would hold it
        with pytest.raises(DeadlineError, match=lock.name):
            ensure_model(mine, timeout_s=0.05)
        made: list[Path] = []
        waiting = threading.Thread(target=lambda: made.append(ensure_model(mine, timeout_s=60.0)))
        waiting.start()
        place.mkdir()  # the other process finishes: the model is there when the lock is free
    waiting.join(30)
    assert made == [place]
    assert not list(place.iterdir())


def test_models_that_are_not_to_be_created_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.create"):
        model_folder(config(tmp_path, "model.create=null", "model.path=somewhere"))
