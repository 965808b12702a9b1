"""Trained tokens a second of an update by how its micro-batches are laid out: padded, packed, shared prompts.

    python benchmarks/learner.py [--model FOLDER] [--dtype float32] [--threads 1] [--json FILE]

One DeepSpeed rank without Ray, 8 groups of 8 random answers. Workloads: prompts of 16 and 128 tokens, with
answers all of 32 tokens, and log-normal ones (sigma 1, median 32, at most 256). Trained tokens are those of
the answers. Layouts take turns; the median of the rounds is reported, and its ratio to padded rows.

The default model is a Llama of 2.7 million parameters; ``--model models/SmolLM2-135M-Instruct`` takes
another.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection
from asyncrl.inherited import set_inherited
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.learners.layout import Layout
from asyncrl.learners.packing import plan_step
from asyncrl.types import Batch, BatchItem, GroupMeta, Trajectory

GROUPS, SIZE = 8, 8
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")
PROMPTS = (16, 128)
MICRO_BATCH_TOKENS = 4096


def save_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answers(tails: bool) -> list[int]:
    rng = np.random.default_rng(0)
    count = GROUPS * SIZE
    return (
        np.clip(rng.lognormal(np.log(32), 1.0, count), 1, 256).astype(int).tolist() if tails else [32] * count
    )


def share_of(prompt: int, lengths: list[int], layout: Layout, vocabulary: int) -> RankStep:
    """An update on random tokens; groups share their prompt."""
    rng = np.random.default_rng(1)
    items = []
    for g in range(GROUPS):
        ids = rng.integers(0, vocabulary, prompt).astype(np.int32)
        group = tuple(
            Trajectory(
                sample=s,
                attempt=0,
                prompt_ids=ids,
                token_ids=rng.integers(0, vocabulary, n).astype(np.int32),
                loss_mask=np.ones(n, np.bool_),
                logprobs=np.full(n, -np.log(vocabulary), np.float32),
                versions=np.zeros(n, np.int32),
                reward=float(s % 2),
                finish_reason="stop",
            )
            for s, n in enumerate(lengths[g * SIZE : (g + 1) * SIZE])
        )
        meta = GroupMeta(g, f"g{g}", 0, tuple(t.meta() for t in group), checksum=0, nbytes=0)
        items.append(BatchItem(meta, group, tuple(1.0 if s % 2 else -1.0 for s in range(SIZE))))
    batch = Batch(0, tuple(items))
    (plan,) = plan_step(batch, 1, MICRO_BATCH_TOKENS, layout=layout)
    samples = tuple(
        TrainSample(item.meta.ordinal, trajectory, advantage)
        for item in items
        for trajectory, advantage in zip(item.payload, item.advantages, strict=True)
    )
    return RankStep(0, samples, plan.micro_batches, plan.loss_tokens, plan.sequences)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_inherited()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        report = measure(args.model or save_model(Path(scratch)), args.dtype, args.rounds)
    for name, rates in report.items():
        shown = ", ".join(
            f"{layout} {rate:,.0f} ({rate / rates['padded']:.2f}x)" for layout, rate in rates.items()
        )
        sys.stdout.write(f"{name}: {shown} trained tokens/s\n")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(folder: Path, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    from asyncrl.learners.policy_rank import PolicyRank

    vocabulary = int(AutoConfig.from_pretrained(folder).vocab_size)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    rank = PolicyRank(
        model=ModelSection.model_validate({"path": str(folder), "dtype": dtype}),
        learner=LearnerSection(device="cpu", zero_stage=1, lr=1e-8, shared_prompts=True),
        algorithm=AlgorithmSection(),
        model_path=str(folder),
        temperature=1.0,
        max_staleness=0,
        total_steps=10**6,
        master=("127.0.0.1", port),
    )
    rank.start()
    report: dict[str, dict[str, float]] = {}
    try:
        for tails in (False, True):
            lengths = answers(tails)
            for prompt in PROMPTS:
                seconds: dict[Layout, list[float]] = {layout: [] for layout in LAYOUTS}
                for _ in range(rounds + 1):
                    for layout in LAYOUTS:
                        # One engine for all: a layout is between the plan and ``collate``.
                        rank._settings = LearnerSection(
                            device="cpu", packing=layout == "packed", shared_prompts=layout == "shared"
                        )
                        share = share_of(prompt, lengths, layout, vocabulary)
                        start = time.perf_counter()
                        rank.step(share)
                        seconds[layout].append(time.perf_counter() - start)
                name = f"prompts of {prompt}, {'long-tailed' if tails else 'even'} answers"
                report[name] = {
                    layout: sum(lengths) / statistics.median(found[1:]) for layout, found in seconds.items()
                }
    finally:
        rank.close()
    return report


if __name__ == "__main__":
    main()
