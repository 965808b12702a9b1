"""Whole runs with real parts: Ray actors, the torch engine, DeepSpeed, gloo pushes, reward workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from .runs import REWARDS, TINY, assert_sound, finish, start

SYNC = ("run.deterministic=true", "schedule.pipeline_depth=0", "run.steps=3", "eval.every=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


def test_synchronous_runs_end_with_equal_bits_whatever_bound_replicas_and_placement(folder: Path) -> None:
    one = finish(folder, *SYNC, "schedule.max_staleness=0", name="sync-a")
    others = [
        finish(folder, *SYNC, "schedule.max_staleness=3", "generators.replicas=2", name="sync-b"),
        finish(folder, *SYNC, "schedule.max_staleness=0", "placement.mode=colocated", name="sync-colocated"),
    ]
    checksums = [run.metrics[-1]["model/checksum"] for run in (one, *others)]
    assert len(set(checksums)) == 1
    for other in others:
        assert [line["reward/mean"] for line in one.metrics[1:]] == [
            line["reward/mean"] for line in other.metrics[1:]
        ]
    assert checksums[0] in one.text, "the summary names the checksum"
    seeded = finish(folder, *SYNC, "schedule.max_staleness=0", "run.seed=1", name="sync-c")
    assert seeded.metrics[-1]["model/checksum"] != checksums[0]


def test_two_ranks_and_two_replicas_overlap_within_the_bound_and_count_failed_rewards(folder: Path) -> None:
    run = finish(
        folder,
        "run.steps=6",
        "learner.ranks=2",
        "learner.zero_stage=3",
        "generators.replicas=2",
        "weight_sync.canary_every=2",
        "schedule.max_staleness=2",
        f'reward.functions=["{REWARDS}:digits_but_no_threes"]',
        "data.eval=null",
        name="wide",
    )
    assert_sound(run, max_staleness=2, capacity=4)
    last = run.metrics[-1]
    assert last["policy_version"] == 6
    assert last["ledger/trained"] == 12
    assert any(line["staleness/max"] >= 1 for line in run.metrics[1:]), "nothing overlapped"
    failed = [end for end in run.ledger if end["state"] == "failed"]
    assert failed
    assert all("no reward for threes" in end["reason"] for end in failed)
    # Scored by two ranks with a shard each, and by both replicas.
    checked = [line["policy_version"] for line in run.metrics if "weight_sync/canary_diff_max" in line]
    assert checked == [0, 2, 4, 6]
    assert all(line.get("weight_sync/canary_diff_max", 0) < 1e-3 for line in run.metrics)
    # Every push was echoed by both replicas with the learner's checksum, or the run had ended.
    assert all(line["timing_s/weight_sync"] > 0 for line in run.metrics[1:])


def test_pushes_overlap_the_updates_of_two_ranks_and_old_tokens_are_masked(folder: Path) -> None:
    run = finish(
        folder,
        "run.steps=6",
        "learner.ranks=2",
        "learner.zero_stage=3",
        "weight_sync.overlap=true",
        "weight_sync.bucket_mb=0.02",
        "weight_sync.canary_every=2",
        "schedule.at_bound=mask",
        "schedule.max_staleness=1",
        "eval.every=3",
        name="beside",
    )
    assert_sound(run, max_staleness=1, capacity=4)
    lines = run.metrics[1:]
    assert [line["step"] for line in lines if "eval/reward_mean" in line] == [3, 6]
    assert all(line["staleness/token_mean"] <= line["staleness/max"] for line in lines)
    assert all(line["timing_s/weight_sync_stall"] > 0 for line in lines)
    # A push lasts several times as long as the copy that the learner waits for.
    assert sum(line["timing_s/weight_sync"] for line in lines) > sum(
        line["timing_s/weight_sync_stall"] for line in lines
    )
    assert any("rollout_corr/kl_age0" in line for line in lines)
    assert not any(name.endswith("_age2") for line in lines for name in line)
    assert "logprob_diff_alarm" not in run.text
    # By the learner at the step's boundary, by the replica when the next update is under way.
    differences = [line.get("weight_sync/canary_diff_max") for line in lines]
    assert len(differences) - differences.count(None) >= 2
    assert all(difference is None or difference < 1e-3 for difference in differences)


def test_a_run_leaves_its_files(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl.config_load import load_config
    from asyncrl.queues.codec import decode_group, read_records

    run = finish(folder, "log.rollouts_every=2", name="files")
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in run.metrics if "eval/reward_mean" in line] == [0, 2, 4]
    assert load_config(run.folder / "config.yaml").run.name == "files"
    hf = run.folder / "checkpoints" / "step_4" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(hf)
    model = AutoModelForCausalLM.from_pretrained(hf)
    assert model.config.vocab_size == len(tokenizer)
    with (run.folder / "rollouts" / "step_000002.msgpack").open("rb") as file:
        groups = [decode_group(record) for record in read_records(file)]
    assert len(groups) == 2
    assert all(len(group.trajectories) == 4 for group in groups)
    assert list((run.folder / "tb").glob("events.out.tfevents.*"))
    assert "eval reward after" in run.text


def test_a_taken_run_name_is_refused(folder: Path) -> None:
    taken = folder / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "metrics.jsonl").write_text('{"step": 0}\n')
    again = start(folder, "checkpoint.resume=never", config=TINY, name="taken")
    assert again.wait(60) == 2
    assert "choose another run.name" in again.text


def test_two_ranks_on_fsdp2_learn_and_go_on_on_one_of_deepspeed(folder: Path) -> None:
    settings = (
        "learner.zero_stage=3",
        "weight_sync.overlap=true",
        "weight_sync.bucket_mb=0.02",
        "weight_sync.canary_every=1",
        "eval.every=0",
    )
    first = finish(
        folder, *settings, "run.steps=3", "learner.backend=fsdp2", "learner.ranks=2", name="engines"
    )
    assert_sound(first, max_staleness=2, capacity=4)
    run = finish(folder, *settings, "run.steps=5", name="engines")
    assert "going on from" in run.text
    assert [line["policy_version"] for line in run.metrics] == list(range(6))
    # The parameters are the same function on both sides of every push, under either engine.
    differences = [line.get("weight_sync/canary_diff_max") for line in run.metrics]
    assert len(differences) - differences.count(None) >= 4
    assert all(difference is None or difference < 1e-3 for difference in differences)
