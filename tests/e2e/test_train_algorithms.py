"""Whole runs with an algorithm other than the default."""

from __future__ import annotations

from pathlib import Path

from .runs import assert_sound, finish, start

# The reward is a share of characters, so that groups differ; one in three gets the same for all.
MINE = """
from dataclasses import replace
from asyncrl.algorithms.losses import ppo_clip

def reward(completion, question):
    number = int(question[0]) % 3
    return 0.5 if number == 0 else sum(c.isdigit() for c in completion) / max(len(completion), 1)

def advantage(rewards, lengths):
    middle = sorted(rewards)[len(rewards) // 2]
    return [reward - middle for reward in rewards]

def loss(inputs, settings):
    found = ppo_clip(inputs, settings)
    return replace(found, loss=2.0 * found.loss)
"""


def test_users_functions_several_updates_and_groups_without_signal(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    file = tmp_path / "mine.py"
    run = finish(
        tmp_path,
        f"reward.functions=['{file}:reward']",
        f"algorithm.advantage={file}:advantage",
        f"algorithm.loss={file}:loss",
        "algorithm.epochs=2",
        "algorithm.mini_batches=2",
        "algorithm.filter_zero_variance=drop",
        "rollout.groups_per_step=4",
        "learner.ranks=2",
        "data.eval=null",
        name="mine",
    )
    assert_sound(run, max_staleness=2, capacity=8)
    lines = run.metrics[1:]
    assert len(lines) == 4
    # Two mini-batches twice, unless a single group was left.
    assert {line["actor/updates"] for line in lines} <= {2.0, 4.0}
    assert any(line["actor/updates"] == 4.0 for line in lines)
    filtered = [end for end in run.ledger if end["state"] == "filtered"]
    assert filtered
    assert all((end["reason"], end["reward_mean"]) == ("zero_variance", 0.5) for end in filtered)
    assert lines[-1]["ledger/filtered"] == len([e for e in filtered if e["step"] <= 4])
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def test_what_a_learner_finds_out_about_its_model_is_the_users_to_fix(tmp_path: Path) -> None:
    run = start(tmp_path, "model.dtype=bfloat16", "learner.attention=flash_attention_2", name="attention")
    assert run.wait() == 2, run.text
    assert "learner.attention: found 'flash_attention_2', with which" in run.text
    run.assert_nothing_left(within_s=15)
