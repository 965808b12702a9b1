"""A whole run of an agent that plays with OpenAI's client, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from asyncrl.models.tokenizer import character_tokenizer

from .runs import assert_sound, finish
from .test_environments import TWO_TURNS, trained_groups

STEPS = 21
"""So many pushes, each beside calls of agents: none of these may fail."""
AGENT = '''
import itertools
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1")
played = itertools.count()

def play(task, base_url, word):
    """Asks twice, the second time in pieces; forgets what was said before where a number is even."""
    number = next(played)
    if number == 1: raise RuntimeError("on purpose")
    if number == 2: return 1.0  # without a call
    policy = client.with_options(base_url=base_url)
    messages = [{"role": "user", "content": task["question"]}]
    first = policy.chat.completions.create(model="policy", messages=messages, max_tokens=12)
    said = first.choices[0].message.content
    if number % 2:
        messages += [{"role": "assistant", "content": said}]
    messages += [{"role": "user", "content": word}]
    pieces = policy.chat.completions.create(model="policy", messages=messages, max_tokens=12, stream=True)
    again = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    return float(len(said) > len(again))
'''


def test_an_agents_calls_are_trained_token_by_token(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    config = TWO_TURNS.replace(
        '{path: asker.py:Asker, args: {word: " and?"}, max_turns: 2, max_turn_tokens: 12}',
        f"{{kind: agent, path: '{tmp_path / 'agent.py'}:play', args: {{word: ' and?'}}, max_turns: 2}}",
    )
    assert config != TWO_TURNS
    run = finish(
        tmp_path,
        "reward.on_error=drop",
        "rollout.min_group=2",
        "data.eval=null",
        f"run.steps={STEPS}",
        config=config,
        name="agents",
    )
    assert_sound(run, max_staleness=2, capacity=4)
    last = run.metrics[-1]
    assert (last["policy_version"], last["ledger/trained"]) == (STEPS, 2 * STEPS)
    assert last["ledger/failed"] == 0
    tokenizer = character_tokenizer(256)
    answers = [t for group in trained_groups(run.folder) for t in group.trajectories]
    samples = {(group.ordinal, t.sample) for group in trained_groups(run.folder) for t in group.trajectories}
    assert len(samples) == STEPS * 2 * 4 - 2, "the two that failed"
    foreign = [str(tokenizer.decode(t.token_ids[~t.loss_mask])) for t in answers]
    assert set(foreign) == {" and?", ""}
    for answer, between in zip(answers, foreign, strict=True):
        assert (answer.logprobs[answer.loss_mask] < 0).all()
        assert (answer.logprobs[~answer.loss_mask] == 0).all()
        assert dict(answer.rewards) == {"environment": answer.reward}
        if between:
            assert 1 <= int(answer.loss_mask.argmin()) <= 12
    rewritten = [a for a, between in zip(answers, foreign, strict=True) if not between]
    assert [a.row for a in rewritten] == [0, 1] * (len(rewritten) // 2), "each such history is two rows"
    assert all(a.reward == b.reward for a, b in zip(rewritten[::2], rewritten[1::2], strict=True))
    assert len(answers) == len(samples) + len(rewritten) // 2
    assert any(line.get("response_length/rows_mean", 0) > 1 for line in run.metrics)
