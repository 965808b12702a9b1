"""PPO from the command line: the critic learns, and stands by itself in its warm-up."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from .runs import assert_sound, finish


def test_explained_variance_rises_and_the_policy_waits_for_the_warm_up(tmp_path: Path) -> None:
    run = finish(
        tmp_path,
        "algorithm.preset=ppo",
        "algorithm.gae_lambda=0.95",
        "run.steps=16",
        "rollout.groups_per_step=4",
        "critic.ranks=2",
        "critic.lr=3.0e-3",
        "critic.warmup_steps=2",
        "critic.micro_batch_tokens=256",
        "data.eval=null",
        name="ppo",
    )
    assert_sound(run, max_staleness=2, capacity=8)
    lines = run.metrics[1:]
    assert [line["critic/warmup"] for line in lines] == [1.0, 1.0] + [0.0] * 14
    assert [line["policy_version"] for line in lines] == list(range(1, 17))
    assert [("actor/grad_norm" in line) for line in lines] == [False] * 2 + [True] * 14
    # The first groups landed when the critic knew nothing: all their values are 0.
    explained = [line["critic/explained_variance"] for line in lines]
    assert explained[0] == 0.0
    assert fmean(explained[-4:]) > 0.1, explained
    for line in lines:
        assert line["critic/grad_norm"] > 0
        assert line["critic/lr"] == 3.0e-3
        assert line["critic/nonfinite_grads"] == 0.0
        assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"} <= line.keys()
        assert min(line["timing_s/critic"], line["timing_s/critic_update"]) > 0
    # Values of groups that land later in a run are those of a critic that has learned.
    assert lines[-1]["critic/vpred_mean"] > 0
