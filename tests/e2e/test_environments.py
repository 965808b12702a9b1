"""Whole runs through an environment: one of two turns, and one that fails in every way."""

from __future__ import annotations

from pathlib import Path

from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues.codec import decode_group, read_records
from asyncrl.types import Group

from .runs import assert_sound, finish

TWO_TURNS = """\
run: {name: turns, steps: 3}
model:
  create:
    {hidden_size: 32, intermediate_size: 64, layers: 2, heads: 2, kv_heads: 1, warm_start: {steps: 0}}
data:
  train: {python: "asyncrl.examples.calculator:rows", args: {digits: 1, count: 30}}
  eval: {holdout: 4}
  max_prompt_tokens: 8
rollout: {group_size: 4, groups_per_step: 2, max_new_tokens: 40}
environment: {path: asker.py:Asker, args: {word: " and?"}, max_turns: 2, max_turn_tokens: 12}
eval: {every: 0}
generators: {slots: 8}
learner: {lr: 1.0e-3, micro_batch_tokens: 64}
log: {rollouts_every: 1}
"""

ASKER = '''
class Asker:
    """Asks once more, whatever it was told."""

    def __init__(self, word):
        self.word = word

    def reset(self, task):
        self.said = []

    def step(self, message):
        self.said.append(message["content"])
        if len(self.said) == 1:
            return self.word
        return {"done": True, "reward": float(len(self.said[0]) > len(self.said[1]))}
'''

FAULTY = '''
import itertools, os, time

class Faulty:
    """Goes wrong in every way: some of them often, and what takes others with it once."""
    numbers = itertools.count()

    def __init__(self, folder):
        self.folder = folder

    def once(self, what):
        try:
            os.mkdir(os.path.join(self.folder, what))
        except FileExistsError:
            return False
        return True

    def reset(self, task):
        self.fault = next(Faulty.numbers) % 8

    def step(self, message):
        if self.fault == 1: raise RuntimeError("on purpose")
        if self.fault == 2: return "x" * (10 << 20)
        if self.fault == 3 and self.once("hung"): time.sleep(1000)
        if self.fault == 4 and self.once("died"): os._exit(7)
        if self.fault == 5: return "again"
        return {"done": True, "reward": float(len(message["content"]) % 2)}
'''


def trained_groups(folder: Path) -> list[Group]:
    found = []
    for path in sorted((folder / "rollouts").iterdir()):
        with path.open("rb") as file:
            found += [decode_group(record) for record in read_records(file)]
    return found


def test_two_turns_are_trained_without_the_environments_tokens(tmp_path: Path) -> None:
    (tmp_path / "asker.py").write_text(ASKER)
    run = finish(tmp_path, f"environment.path={tmp_path / 'asker.py'}:Asker", config=TWO_TURNS, name="turns")
    assert_sound(run, max_staleness=2, capacity=4)
    assert run.metrics[-1]["ledger/failed"] == 0
    tokenizer = character_tokenizer(256)
    answers = [t for group in trained_groups(run.folder) for t in group.trajectories]
    assert len(answers) == 3 * 2 * 4
    for answer in answers:
        assert str(tokenizer.decode(answer.token_ids[~answer.loss_mask])) == " and?", "that alone is masked"
        first = int(answer.loss_mask.argmin())
        assert 1 <= first <= 12
        assert 1 <= len(answer.token_ids) - first - len(" and?") <= 12
        assert (answer.logprobs[answer.loss_mask] < 0).all()
        assert (answer.logprobs[~answer.loss_mask] == 0).all()
        assert dict(answer.rewards) == {"environment": answer.reward}


def test_every_fault_is_counted_against_its_trajectory_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    run = finish(
        tmp_path,
        f"environment.path={tmp_path / 'faulty.py'}:Faulty",
        f"environment.args={{folder: {tmp_path}}}",
        "environment.timeout_s=5",
        "reward.on_error=drop",
        "rollout.min_group=2",
        "rollout.group_size=8",
        "data.eval=null",
        config=TWO_TURNS,
        name="faulty",
    )
    last = run.metrics[-1]
    assert (last["policy_version"], last["ledger/trained"]) == (3, 6)
    assert (tmp_path / "hung").is_dir()
    assert (tmp_path / "died").is_dir()
    answers = [len(group.trajectories) for group in trained_groups(run.folder)]
    assert all(2 <= count <= 8 for count in answers)
    assert min(answers) < 8, "no answer failed"
