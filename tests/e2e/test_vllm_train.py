"""Whole runs with vLLM generators: train, and nothing left behind when the controller is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.queues.codec import decode_group, read_records

from .deaths import generators, kill, run_to_strike, strike
from .runs import assert_sound, finish
from .vllm_models import require_vllm

require_vllm()
pytestmark = pytest.mark.timeout(900)
VLLM = (
    "generators.backend=vllm",
    "generators.vllm.enforce_eager=true",  # to compile would take longer than the run
    "generators.start_timeout_s=600",
    "model.create.hidden_size=64",  # vLLM's attention on CPU takes heads of 32 channels and more
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-train")


def test_three_steps_with_overlap_evaluation_and_a_stop_string(folder: Path) -> None:
    from transformers import AutoTokenizer

    run = finish(
        folder,
        *VLLM,
        "run.steps=3",
        'rollout.stop=["7"]',
        "log.rollouts_every=1",
        # The model's head is its embedding: weights that stayed behind anywhere would show at these steps.
        "weight_sync.canary_every=1",
        "learner.lr=0.01",
        name="vllm",
    )
    assert_sound(run, max_staleness=2, capacity=4)
    last = run.metrics[-1]
    assert last["policy_version"] == 3
    assert last["ledger/trained"] == 6
    assert all(line["timing_s/weight_sync"] > 0 for line in run.metrics[1:])
    assert all(line["perf/generator_busy"] > 0 for line in run.metrics[1:])
    assert all(line["weight_sync/canary_diff_mean"] < 1e-4 for line in run.metrics[1:])
    assert "eval/reward_mean" in last
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "checkpoints" / "step_3" / "hf")
    texts, versions = [], set()
    for file in sorted((run.folder / "rollouts").glob("*.msgpack")):
        with file.open("rb") as records:
            for group in map(decode_group, read_records(records)):
                for trajectory in group.trajectories:
                    versions |= set(trajectory.versions.tolist())
                    texts.append(tokenizer.decode(trajectory.token_ids))
    assert len(texts) == 3 * 2 * 4
    assert any("7" in text for text in texts), "no answer was stopped: the test shows nothing"
    assert all("7" not in text[:-1] for text in texts)
    assert versions <= {0, 1, 2}


def test_a_killed_replica_comes_back_at_the_live_version_and_a_killed_controller_takes_all_with_it(
    folder: Path,
) -> None:
    with run_to_strike(
        folder, *VLLM, name="vllm-deaths", first_steps=2, more_steps=2, gone_within_s=30, killed=True
    ) as run:
        strike(run, generators(run)[:1], kill, expected=1)
        commands = [" ".join(process.cmdline()) + process.name() for process in run.processes()]
        assert sum("EngineCore" in command for command in commands) == 2, commands
