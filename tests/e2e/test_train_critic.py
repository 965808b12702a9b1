"""PPO from the command line: the critic learns, and stands by itself in its warm-up."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from .runs import assert_sound, finish

# Known from the prompt alone, so that a critic that reads it explains all of the variance.
REWARD = """
def large(completion, question):
    return float(int(question[0]) >= 5)
"""


def test_explained_variance_rises_and_the_policy_waits_for_the_warm_up(tmp_path: Path) -> None:
    file = tmp_path / "large.py"
    file.write_text(REWARD)
    run = finish(
        tmp_path,
        "algorithm.preset=ppo",
        f"reward.functions=['{file}:large']",
        "run.steps=24",
        # A critic compares no answers with each other: one of each prompt will do.
        "rollout.group_size=1",
        "rollout.min_group=1",
        "rollout.groups_per_step=16",
        "generators.slots=32",
        "learner.micro_batch_tokens=256",
        "critic.micro_batch_tokens=256",
        "critic.ranks=2",
        "critic.lr=1.0e-2",
        "critic.warmup_steps=2",
        "data.eval=null",
        name="ppo",
    )
    assert_sound(run, max_staleness=2, capacity=32)
    lines = run.metrics[1:]
    assert [line["critic/warmup"] for line in lines] == [1.0] * 2 + [0.0] * 22
    assert [line["policy_version"] for line in lines] == list(range(1, 25))
    assert ["actor/grad_norm" in line for line in lines] == [False] * 2 + [True] * 22
    # The first groups landed when the critic knew nothing: all their values are 0.
    explained = [line["critic/explained_variance"] for line in lines]
    assert explained[0] == 0.0
    assert fmean(explained[-4:]) > 0.3 > fmean(explained[:4]), explained
    for line in lines:
        assert line["critic/grad_norm"] > 0
        assert line["critic/lr"] == 1.0e-2
        assert line["critic/nonfinite_grads"] == 0.0
        assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"} <= line.keys()
        assert line["timing_s/critic_update"] > 0
    assert sum(line["timing_s/critic"] for line in lines) > 0
