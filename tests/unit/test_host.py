"""A generator's process as it is, without Ray: engine, environments and reward workers around one host."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.generators.build import build_host
from asyncrl.models.build import new_model
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues.codec import decode_group
from asyncrl.rollout import GroupRequest
from asyncrl.types import SamplingParams, Task

USER_CODE = '''
class Asker:
    """Asks once more, whatever it was told, and once fails."""

    made = 0

    def reset(self, task):
        Asker.made += 1
        self.fails = Asker.made == 3
        self.said = []

    def step(self, message):
        if self.fails: raise RuntimeError("on purpose")
        self.said.append(message["content"])
        return " and?" if len(self.said) == 1 else {"done": True, "reward": 0.25}

def turns(completion, messages):
    roles = [m["role"] for m in messages]
    return float(roles == ["assistant", "user", "assistant"] and " and?" in completion)

def first_is_best(prompts, completions, log_metric, **kwargs):
    log_metric("size", len(completions))
    return [1.0] + [None] * (len(completions) - 1)
'''


def config_of(folder: Path) -> Config:
    values = {
        "model": {"create": {"hidden_size": 32, "heads": 2, "kv_heads": 2, "layers": 1, "max_positions": 64}},
        "data": {"train": "rows.jsonl", "max_prompt_tokens": 8},
        "rollout": {"group_size": 4, "groups_per_step": 1, "max_new_tokens": 40},
        "environment": {"path": "user.py:Asker", "max_turns": 2, "max_turn_tokens": 8, "reward_weight": 2.0},
        "reward": {
            "functions": ["user.py:turns", {"path": "user.py:first_is_best", "weight": 10.0}],
            "timeout_s": 120,
        },
        "generators": {"slots": 4, "device": "cpu"},
    }
    return parse_config(values)


async def test_a_group_goes_through_environment_and_both_kinds_of_rewards(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER_CODE)
    config = config_of(tmp_path)
    assert config.model.create is not None
    tokenizer = character_tokenizer(64)
    new_model(config.model.create, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    host, close = await build_host(config, str(tmp_path / "model"), tmp_path, ())
    try:
        task = Task(0, "train-0", "1+1=", tuple(tokenizer("1+1=")["input_ids"]), {"prompt": "1+1="})
        request = GroupRequest(task, 0, 4, SamplingParams(max_new_tokens=40), seed=0, deadline_s=300)
        meta, payload = await host.run_group(request)
    finally:
        await close()
    assert [(f.kind, "on purpose" in f.message) for f in meta.failures] == [("EnvironmentRaisedError", True)]
    answers = decode_group(payload).trajectories
    assert len(answers) == 3
    for answer in answers:
        said = str(tokenizer.decode(answer.token_ids[~answer.loss_mask]))
        assert said == " and?"
        assert (answer.logprobs[answer.loss_mask] < 0).all()
        assert answer.finish_reason == "stop"
    first, *others = answers
    assert dict(first.rewards) == {
        "turns": 1.0,
        "environment": 0.25,
        "first_is_best": 1.0,
        "first_is_best/size": 3.0,
    }
    assert first.reward == 1.0 + 2.0 * 0.25 + 10.0
    assert [answer.reward for answer in others] == [1.5, 1.5]
    assert all("first_is_best" not in answer.rewards for answer in others)
    trained = sum(count for t in meta.trajectories for _, count in t.trained)
    assert trained == sum(int(np.count_nonzero(answer.loss_mask)) for answer in answers)
