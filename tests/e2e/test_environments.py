"""Whole runs through an environment: two turns with a calculator, and one that fails in every way."""

from __future__ import annotations

from pathlib import Path

from asyncrl.examples.calculator import calculate
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues.codec import decode_group, read_records
from asyncrl.types import Group

from .runs import assert_sound, finish

CALCULATOR = """\
run: {name: calculator, steps: 4}
model:
  create:
    {hidden_size: 32, intermediate_size: 64, layers: 2, heads: 2, kv_heads: 1, warm_start: {steps: 150}}
data:
  train: {python: "asyncrl.examples.calculator:rows", args: {digits: 1, count: 30}}
  eval: {holdout: 4}
  max_prompt_tokens: 8
rollout: {group_size: 4, groups_per_step: 2, max_new_tokens: 24, stop: ["]"]}
environment: {path: "asyncrl.examples.calculator:Calculator", max_turns: 2}
eval: {every: 2}
generators: {slots: 8}
learner: {lr: 1.0e-3, micro_batch_tokens: 64}
log: {rollouts_every: 1}
"""

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
    run = finish(tmp_path, config=CALCULATOR, name="calculator")
    assert_sound(run, max_staleness=2, capacity=4)
    tokenizer = character_tokenizer(256)
    answers = [t for group in trained_groups(run.folder) for t in group.trajectories]
    assert len(answers) == 4 * 2 * 4
    two_turns = [t for t in answers if not t.loss_mask.all()]
    assert two_turns, "no answer had a second turn"
    for answer in answers:
        assert (answer.logprobs[answer.loss_mask] < 0).all()
        assert (answer.logprobs[~answer.loss_mask] == 0).all()
        assert set(answer.rewards) == {"environment"}
    for answer in two_turns:
        seen = str(tokenizer.decode(answer.token_ids[~answer.loss_mask]))
        call = str(tokenizer.decode(answer.token_ids[: int(answer.loss_mask.argmin())]))
        assert seen == f"={calculate(call)}#", "what the environment said, and nothing else, is masked"


def test_every_fault_is_counted_against_its_trajectory_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    run = finish(
        tmp_path,
        f"environment.path={tmp_path / 'faulty.py'}:Faulty",
        f"environment.args.folder={tmp_path}",
        "environment.timeout_s=5",
        "reward.on_error=drop",
        "rollout.min_group=2",
        "rollout.group_size=8",
        "data.eval=null",
        "model.create.warm_start.steps=0",
        config=CALCULATOR,
        name="faulty",
    )
    last = run.metrics[-1]
    assert (last["policy_version"], last["ledger/trained"]) == (4, 8)
    assert (tmp_path / "hung").is_dir()
    assert (tmp_path / "died").is_dir()
    answers = [len(group.trajectories) for group in trained_groups(run.folder)]
    assert all(2 <= count <= 8 for count in answers)
    assert min(answers) < 8, "no answer failed"
