"""How long a checkpoint of 135M parameters holds a run up, beside a plain ``torch.save`` of the same state.

    python benchmarks/checkpoint_stall.py [--checkpoints 5] [--json docs/checkpoint-stall.json]

- The run: ``asyncrl train`` with one rank, a checkpoint every other step, and small batches: its steps are
  shorter than the writing of a checkpoint, which is the worst case. ``timing_s/checkpoint`` is the time in
  which the learner stood still, for the copy of the state, or for the files of the checkpoint before.
  Generators never stand still for one: their tokens/s while they sample are compared with those of a run
  without checkpoints, which tells what the writing takes from them.
- ``torch.save``: float32 parameters and both of Adam's moments, to the same disk, with fsync.

Takes about 5 minutes on 2 CPU cores, 8 GB of memory and 5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from asyncrl.bench.machine import describe_machine
from asyncrl.bench.runs import claim_folder, read_lines
from asyncrl.config_load import load_config

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
EVERY = 2
SETTINGS = (
    "run.name=checkpoint-stall",
    # The layers of SmolLM2-135M, and as many more as its embeddings weigh.
    "model.create={hidden_size: 576, intermediate_size: 1536, layers: 38, heads: 9, kv_heads: 3, "
    "max_positions: 128, warm_start: {steps: 0}}",
    "rollout.group_size=2",
    "rollout.groups_per_step=2",
    "rollout.max_new_tokens=16",
    "generators.slots=4",
    "eval.every=0",
    "eval.max_prompts=1",
    "log.trackers=[]",
    "log.rollouts_every=0",
    "log.display=lines",
    "learner.warmup_steps=0",
    "checkpoint.resume=never",
    "checkpoint.keep_best=false",
    "checkpoint.hf=never",
)


def run(folder: Path, name: str, steps: int, every: int) -> list[dict[str, Any]]:
    """The steps of a run with a checkpoint each ``every`` ones (0: none)."""
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(CONFIG), *SETTINGS]
    command += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}", f"checkpoint.every={every}"]
    command += ["checkpoint.at_end=false"]
    subprocess.run(command, check=True)
    return [dict(line) for line in read_lines(folder / name) if line["step"] > EVERY]


def sampling_rate(lines: list[dict[str, Any]]) -> float:
    """Tokens a second of the time in which the generator sampled, over all steps."""
    tokens = sum(line["generator/tokens_per_s"] * line["timing_s/step"] for line in lines)
    busy_s = sum(line["perf/generator_busy"] * line["timing_s/step"] for line in lines)
    return float(tokens / busy_s)


def saved_plainly(parameters: int, folder: Path, times: int) -> list[float]:
    """Seconds of ``torch.save`` with fsync, of three float32 tensors of that many numbers."""
    state = {name: torch.randn(parameters) for name in ("parameters", "exp_avg", "exp_avg_sq")}
    found = []
    for number in range(times):
        start = time.perf_counter()
        with (folder / f"plain-{number}.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        found.append(time.perf_counter() - start)
        (folder / f"plain-{number}.pt").unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = claim_folder(load_config(CONFIG, SETTINGS), "measurement")
    steps = EVERY * (args.checkpoints + 1)
    with_checkpoints = run(folder, "with", steps, EVERY)
    without = run(folder, "without", steps, 0)
    files = [path.stat().st_size for path in (folder / ".models").glob("*/model.safetensors")]
    parameters = max(files) // 4  # of the largest model that lies there, in float32
    stalls = [line["timing_s/checkpoint"] for line in with_checkpoints if line["timing_s/checkpoint"] > 0]
    report = {
        "machine": describe_machine(),
        "parameters": parameters,
        "stall_s": stalls,
        "stall_median_s": statistics.median(stalls),
        "step_s": {
            "with": statistics.median(line["timing_s/step"] for line in with_checkpoints),
            "without": statistics.median(line["timing_s/step"] for line in without),
        },
        "generator_tokens_per_s": {
            "with": sampling_rate(with_checkpoints),
            "without": sampling_rate(without),
        },
        "wall_s": {
            "with": sum(line["timing_s/step"] for line in with_checkpoints),
            "without": sum(line["timing_s/step"] for line in without),
        },
        "torch_save_s": saved_plainly(parameters, folder, 3),
    }
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if args.json is not None:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
