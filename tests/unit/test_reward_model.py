"""The reward model itself: real classifiers against their own forward passes, and what they read."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues.codec import checksum, decode_group, encode_group, group_meta
from asyncrl.roles.reward_model import RewardModel, RewardModelSettings, micro_batches
from asyncrl.roles.reward_text import AnswerEncoder
from asyncrl.roles.scoring import scored
from asyncrl.types import Group, Task, Trajectory

TOKENIZER = character_tokenizer(64)
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_labels": 1,
}
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DATA = parse_config(
    {
        "model": {"path": "none"},
        "data": {"train": "none.jsonl", "system": "Be brief.", "prompt_format": "Q: {prompt}"},
        "reward": {"functions": ["exact_match"]},
    }
).data


def llama(**options: Any) -> Any:
    return LlamaForSequenceClassification(LlamaConfig(**{**SHAPE, "pad_token_id": PAD, **options}))


def bert() -> Any:
    return BertForSequenceClassification(BertConfig(**SHAPE, pad_token_id=PAD))


def gpt2_without_padding() -> Any:
    shape = {"vocab_size": len(TOKENIZER), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2ForSequenceClassification(
        GPT2Config(**shape, num_labels=1, initializer_range=0.3, bos_token_id=EOS, eos_token_id=EOS)
    )


def saved(model: Any, place: Path, tokenizer: Any = TOKENIZER) -> str:
    model.eval().save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def settings_of(path: str, **changes: Any) -> RewardModelSettings:
    values: dict[str, Any] = {
        "path": path,
        "policy_path": path,
        "data": DATA,
        "template": "auto",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "micro_batch_tokens": 100,
        "max_tokens": None,
    }
    return RewardModelSettings(**{**values, **changes})


def started(path: str, **changes: Any) -> RewardModel:
    model = RewardModel(settings_of(path, **changes))
    model.start()
    return model


def answer(sample: int, prompt: str, completion: str, *, ends: bool = True) -> Trajectory:
    prompt_ids = np.asarray(TOKENIZER(prompt)["input_ids"], np.int32)
    ids = np.asarray(TOKENIZER(completion)["input_ids"] + [EOS] * ends, np.int32)
    return Trajectory(
        sample=sample,
        attempt=0,
        prompt_ids=prompt_ids,
        token_ids=ids,
        loss_mask=np.ones(len(ids), np.bool_),
        logprobs=np.full(len(ids), -1.0, np.float32),
        versions=np.zeros(len(ids), np.int32),
        reward=0.0,
        finish_reason="stop" if ends else "length",
    )


def group(ordinal: int, prompt: str, completions: Sequence[str]) -> tuple[Task, Group]:
    answers = tuple(answer(i, prompt, text, ends=i % 2 == 0) for i, text in enumerate(completions))
    task = Task(
        ordinal, f"train-{ordinal}", prompt, tuple(answers[0].prompt_ids.tolist()), {"question": prompt}
    )
    return task, Group(ordinal, task.uid, 0, answers)


GROUPS = [
    group(0, "3+4=", ["7", "I do not know", "seven, I should say", "8"]),
    group(1, "a longer question, 12+30=", ["42", "", "forty-two and nothing else"]),
]


def alone(path: str, answers: Sequence[Trajectory]) -> list[float]:
    """The model's own forward pass of each row by itself."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        rows = [[*t.prompt_ids.tolist(), *t.token_ids.tolist()] for t in answers]
        return [float(model(input_ids=torch.tensor([row])).logits) for row in rows]


@pytest.mark.parametrize("make", [llama, bert, gpt2_without_padding])
def test_scores_are_those_of_the_models_own_forward_pass(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    path = saved(make(), tmp_path)
    with caplog.at_level(logging.WARNING, "asyncrl"):
        model = started(path)
    ratings = model.rate(GROUPS)
    for (_, whole), scores in zip(GROUPS, ratings.scores, strict=True):
        assert scores == pytest.approx(alone(path, whole.answers), abs=1e-5)
        assert len(set(scores)) > 1
    assert ratings.cut == 0
    assert ("names no pad_token_id" in caplog.text) == (make is gpt2_without_padding)


def test_padding_that_is_the_end_of_answers_too_changes_no_score(tmp_path: Path) -> None:
    """Then the model looks at the token before the end, whether or not its row is padded."""
    torch.manual_seed(0)
    path = saved(llama(pad_token_id=EOS, eos_token_id=EOS), tmp_path)
    ((_, whole),) = GROUPS[:1]
    assert started(path).rate(GROUPS[:1]).scores[0] == pytest.approx(alone(path, whole.answers), abs=1e-5)


def test_a_groups_scores_depend_on_its_call_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = saved(llama(), tmp_path)
    first, second = started(path), started(path)
    second.rate(GROUPS[1:])
    assert first.rate(GROUPS[:1]) == second.rate(GROUPS[:1])


def test_micro_batches_hold_as_many_rows_as_fit_the_longest() -> None:
    lengths = {0: 5, 1: 20, 2: 5, 3: 10, 4: 5}
    assert micro_batches(lengths, 20) == [[1], [3, 0], [2, 4]]
    assert micro_batches(lengths, 1) == [[1], [3], [0], [2], [4]]  # longer rows than that run alone
    assert micro_batches({}, 20) == []


def test_the_groups_come_back_with_their_scores_and_what_the_model_cannot_take_fails(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = saved(llama(), tmp_path)
    task, whole = GROUPS[0]
    strange = np.asarray([len(TOKENIZER) + 3], np.int32)  # of a policy whose embedding has spare rows
    answers = list(whole.trajectories)
    answers[1] = Trajectory(
        1, 0, answers[1].prompt_ids, strange, np.ones(1, np.bool_), np.full(1, -1.0, np.float32),
        np.zeros(1, np.int32), 0.0, "stop",
    )  # fmt: skip
    whole = Group(whole.ordinal, whole.uid, 0, tuple(answers))
    payload = encode_group(whole)
    meta, (record,) = scored(started(path), [(task, group_meta(whole, payload))], [payload], 2.0)
    (found,) = meta.metas
    assert [t.sample for t in found.trajectories] == [0, 2, 3]
    (failure,) = found.failures
    assert (failure.sample, failure.kind) == (1, "RewardValueError")
    assert "found nan; expected a finite number" in failure.message
    assert (found.checksum, found.nbytes) == (checksum(record), len(record))
    for t in decode_group(record).trajectories:
        assert t.reward == 2.0 * t.rewards["reward_model"]
        assert math.isfinite(t.reward)


def refusal(path: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        started(path, **changes)
    return str(caught.value)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    two = saved(llama(num_labels=2), tmp_path / "two")
    assert "found 2 labels" in refusal(two)
    headless = LlamaForCausalLM(LlamaConfig(**SHAPE, pad_token_id=PAD))
    assert "no weights for score.weight" in refusal(saved(headless, tmp_path / "headless"))
    assert "has no chat template" in refusal(saved(llama(), tmp_path / "plain"), template="chat")


# ---------------------------------------------------------------- what it reads


def other_tokenizer(*, chat: bool) -> Any:
    """Another vocabulary, with a chat template if asked for."""
    tokenizer = character_tokenizer(64)
    tokenizer.add_tokens(["<system>", "<user>", "<assistant>"])
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def encoder(own: Any, **options: Any) -> AnswerEncoder:
    return AnswerEncoder(own, TOKENIZER, DATA, **{"template": "auto", "limit": None, **options})


def test_one_vocabulary_is_read_token_by_token() -> None:
    task, whole = GROUPS[0]
    reads = encoder(character_tokenizer(64))
    t = whole.trajectories[0]
    assert reads.same_tokens
    assert reads.encode(task, t).ids == (*t.prompt_ids, *t.token_ids)
    assert reads.encode(task, t).ids[-1] == EOS


def test_another_vocabulary_reads_the_text() -> None:
    task, whole = GROUPS[0]
    own = other_tokenizer(chat=False)
    reads = encoder(own)
    assert not reads.same_tokens
    ids = reads.encode(task, whole.trajectories[0]).ids
    assert own.decode(list(ids)) == "3+4=7"  # without the policy's own end


@pytest.mark.parametrize("chat", [True, False])
def test_a_chat_template_gets_the_messages_and_the_answer(chat: bool) -> None:
    task, whole = GROUPS[0]
    own = other_tokenizer(chat=True)
    ids = encoder(own, template="chat" if chat else "none").encode(task, whole.trajectories[0]).ids
    expected = "<system>Be brief.\n<user>Q: 3+4=\n<assistant>7\n" if chat else "3+4=7"
    assert own.decode(list(ids)) == expected


@pytest.mark.parametrize("own", [character_tokenizer(64), other_tokenizer(chat=True)])
def test_what_is_too_long_loses_its_beginning_and_is_counted(own: Any) -> None:
    task, whole = GROUPS[1]
    full, cut = encoder(own), encoder(own, limit=6)
    for t in whole.trajectories:
        found = cut.encode(task, t)
        assert found.cut
        assert found.ids == full.encode(task, t).ids[-6:]
        assert not full.encode(task, t).cut


def test_the_limit_is_the_models_unless_a_lower_one_is_asked_for(tmp_path: Path) -> None:
    path = saved(llama(), tmp_path)
    long = [group(0, "x" * 70, ["1", "22"])]
    assert started(path).rate(long).cut == 2  # of 64 positions
    assert started(path, max_tokens=8).rate(GROUPS).cut == 5  # all but "3+4=7"
    assert started(path, max_tokens=1000).rate(long).cut == 2
