"""The shipped files: configs that load and say how to run them, and versions that agree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config_load import load_config
from asyncrl.simulate.workload import load_simulation

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
WORKLOADS = sorted((ROOT / "configs" / "workloads").glob("*.yaml"))


def blocks(name: str) -> dict[str, Any]:
    values = yaml.safe_load((ROOT / "configs" / name).read_text())
    del values["run"]["name"]
    return values  # type: ignore[no-any-return]


def assert_says_how(file: Path, command: str) -> None:
    header = [line for line in file.read_text().split("\n\n")[0].splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert command in text
    assert "Hardware:" in text
    assert "Duration:" in text


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_a_shipped_config_loads_and_starts_with_how_to_run_it(file: Path) -> None:
    load_config(file)
    verb = "bench" if file.name.startswith("bench") else "train"
    assert_says_how(file, f"asyncrl {verb} --config configs/{file.name}")


@pytest.mark.parametrize("file", WORKLOADS, ids=lambda file: file.name)
def test_a_shipped_workload_loads_and_starts_with_how_to_run_it(file: Path) -> None:
    load_simulation(file)
    assert_says_how(file, f"asyncrl simulate --workload configs/workloads/{file.name}")


@pytest.mark.parametrize("name", ["sync.yaml", "overlap.yaml"])
def test_these_differ_from_the_quickstart_in_the_schedule_alone(name: str) -> None:
    quickstart, other = blocks("quickstart.yaml"), blocks(name)
    assert other.pop("schedule") != quickstart.pop("schedule")
    assert other == quickstart


def test_chain_sum_differs_from_the_quickstart_in_data_and_reward_alone() -> None:
    quickstart, other = blocks("quickstart.yaml"), blocks("chain-sum.yaml")
    for block in ("data", "reward"):
        assert other.pop(block) != quickstart.pop(block)
    assert other == quickstart


def test_the_ppo_quickstart_differs_from_the_quickstart_in_algorithm_and_critic_alone() -> None:
    quickstart, other = blocks("quickstart.yaml"), blocks("quickstart-ppo.yaml")
    assert (other.pop("algorithm"), "critic" in other) == ({"preset": "ppo"}, True)
    del other["critic"]
    assert other == quickstart


def test_the_colocated_quickstart_differs_from_the_quickstart_in_what_shares_cores_alone() -> None:
    quickstart, other = blocks("quickstart.yaml"), blocks("colocated.yaml")
    assert other.pop("placement") == {"mode": "colocated"}
    assert other["schedule"].pop("kv_after_swap") == "recompute"
    for section in ("generators", "learner"):
        assert len(quickstart[section].pop("cpu_cores")) == 1
        assert other[section].pop("threads") == 2
    assert other == quickstart


def test_the_gsm8k_configs_differ_in_the_schedule_alone() -> None:
    overlapped, synchronous = blocks("gsm8k-qwen-async.yaml"), blocks("gsm8k-qwen-sync.yaml")
    assert overlapped.pop("schedule") != synchronous.pop("schedule")
    assert overlapped == synchronous


def test_the_smollm2_configs_differ_in_the_generators_alone() -> None:
    vllm, torch = blocks("smollm2-arithmetic.yaml"), blocks("smollm2-arithmetic-torch.yaml")
    assert (vllm.pop("generators")["backend"], torch.pop("generators")["backend"]) == ("vllm", "torch")
    assert vllm == torch


@pytest.mark.parametrize("name", ["sync.yaml", "gsm8k-qwen-sync.yaml"])
def test_sync_is_synchronous(name: str) -> None:
    schedule = yaml.safe_load((ROOT / "configs" / name).read_text())["schedule"]
    assert (schedule["pipeline_depth"], schedule["max_staleness"]) == (0, 0)


def test_constraints_pin_every_direct_dependency_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    names = {re.split(r"[<>=!~\[]", requirement)[0] for requirement in wanted}
    assert names == set(pins)
    for name, pin in pins.items():
        # A local label such as +cpu names a build of the same release.
        assert version(name).partition("+")[0] == pin, name


def test_make_explains_itself_and_knows_each_target() -> None:
    output = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    for target in ("quickstart", "smollm2", "check", "test", "bench", "clean"):
        assert f"make {target}" in output
        plan = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        )
        assert plan.returncode == 0, plan.stderr
