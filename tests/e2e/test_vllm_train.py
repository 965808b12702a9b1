"""Whole runs with vLLM generators: train, and nothing left behind when the controller is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .runs import assert_sound, finish, start
from .vllm_models import require_vllm

require_vllm()
pytestmark = pytest.mark.timeout(900)
VLLM = ("generators.backend=vllm", "generators.vllm.enforce_eager=true", "generators.start_timeout_s=600")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-train")


def test_three_steps_with_overlap_and_evaluation(folder: Path) -> None:
    run = finish(folder, *VLLM, "run.steps=3", "model.create.heads=4", name="vllm")
    assert_sound(run, max_staleness=2, capacity=4)
    last = run.metrics[-1]
    assert last["policy_version"] == 3
    assert last["ledger/trained"] == 6
    assert all(line["timing_s/weight_sync"] > 0 for line in run.metrics[1:])
    assert all(line["perf/generator_busy"] > 0 for line in run.metrics[1:])
    assert "eval/reward_mean" in last


def test_a_killed_controller_takes_vllm_with_it(folder: Path) -> None:
    run = start(folder, *VLLM, "run.steps=100000", name="vllm-killed")
    run.wait_for_steps(1)
    commands = [" ".join(process.cmdline()) + process.name() for process in run.processes()]
    assert any("EngineCore" in command for command in commands), commands
    run.interrupt(signal.SIGKILL)
    run.wait(10)
    run.assert_nothing_left(within_s=30)
