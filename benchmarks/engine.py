"""The embedded engine against ``model.generate`` and vLLM: tokens a second, even and long-tailed lengths.

    python benchmarks/engine.py [--slots 1 16 64] [--engines torch generate vllm] [--threads 1] [--json FILE]

A Llama of 2.7 million parameters with random weights answers four times as many requests as there are slots,
with a length of its own each, by ``max_new_tokens``; nothing ends earlier. "even": all 64 tokens.
"long": log-normal, sigma 1, median 32, at most 256. ``generate`` takes a batch of ``slots`` at a time, in
order of arrival, and goes on until its longest is done, as a loop over ``generate`` does. Only wanted tokens
count. Engines are measured in turn, three times each; the median and the spread are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.generators.vllm_engine import VLLMEngine
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams

PROMPT = 16
LONGEST = 256
ROUNDS = 3
Measure = Callable[[Sequence[int]], Awaitable[float]]
"""Lengths -> seconds until all answers are there."""
Started = tuple[Measure, Callable[[], Awaitable[None]]]
"""An engine that answers, and what closes it."""


def make_model(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def lengths_of(kind: str, count: int) -> list[int]:
    if kind == "even":
        return [64] * count
    drawn = np.random.default_rng(0).lognormal(np.log(32), 1.0, count)
    return [int(n) for n in np.clip(np.round(drawn), 1, LONGEST)]


def prompt_of(index: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(index).integers(0, 512, PROMPT))


def asking(engine: TorchEngine | VLLMEngine) -> Measure:
    """Requests with draws of their own in each round, all at once."""
    rounds = iter(range(1_000_000))

    async def measure(lengths: Sequence[int]) -> float:
        this = next(rounds)
        requests = [
            GenerationRequest(
                f"{this}-{i}", prompt_of(i), SamplingParams(n, ignore_eos=True), DrawKey(this, i, 0)
            )
            for i, n in enumerate(lengths)
        ]
        start = time.perf_counter()
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        took = time.perf_counter() - start
        assert [len(answer.token_ids) for answer in answers] == list(lengths)
        return took

    return measure


async def torch_engine(folder: Path, slots: int, threads: int) -> Started:
    engine = TorchEngine(
        str(folder), slots=slots, max_sequence=PROMPT + LONGEST, device="cpu", threads=threads
    )
    await engine.start()
    return asking(engine), engine.close


async def hugging_face(folder: Path, slots: int, threads: int) -> Started:
    model = LlamaForCausalLM.from_pretrained(folder).eval()

    def all_of_them(lengths: Sequence[int]) -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        for first in range(0, len(lengths), slots):
            wanted = lengths[first : first + slots]
            ids = torch.tensor([prompt_of(first + i) for i in range(len(wanted))])
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=max(wanted),
                    min_new_tokens=max(wanted),
                    pad_token_id=0,
                )
        return time.perf_counter() - start

    async def measure(lengths: Sequence[int]) -> float:
        return await asyncio.to_thread(all_of_them, lengths)

    async def close() -> None:
        """Nothing to close."""

    return measure, close


async def vllm(folder: Path, slots: int, threads: int) -> Started:
    from asyncrl.generators.vllm_settings import VLLMSettings

    engine = VLLMEngine(
        VLLMSettings(
            str(folder), "float32", slots, PROMPT + LONGEST, device="cpu", threads=threads, cores=None,
            trust_remote_code=False, seed=0, options={"skip_tokenizer_init": True},
        )
    )  # fmt: skip
    await engine.start()
    return asking(engine), engine.close


ENGINES = {"torch": torch_engine, "generate": hugging_face, "vllm": vllm}


async def compare(folder: Path, names: Sequence[str], slots: int, threads: int) -> list[dict[str, Any]]:
    started = {name: await ENGINES[name](folder, slots, threads) for name in names}
    rows = []
    try:
        for kind in ("even", "long"):
            lengths = lengths_of(kind, 4 * slots)
            rates: dict[str, list[float]] = {name: [] for name in names}
            for name in names:  # compiles, warms caches
                await started[name][0](lengths[: max(2, slots // 4)])
            for _ in range(ROUNDS):
                for name in names:
                    rates[name].append(sum(lengths) / await started[name][0](lengths))
            rows += [
                {
                    "engine": name,
                    "slots": slots,
                    "lengths": kind,
                    "tokens_per_s": statistics.median(of),
                    "least": min(of),
                    "most": max(of),
                }
                for name, of in rates.items()
            ]
    finally:
        for _, close in started.values():
            await close()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| engine | slots | lengths | tok/s | least to most |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {r['engine']} | {r['slots']} | {r['lengths']} | {r['tokens_per_s']:,.0f} "
        f"| {r['least']:,.0f} to {r['most']:,.0f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["torch", "generate"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for slots in args.slots:
            rows += asyncio.run(compare(Path(folder), args.engines, slots, args.threads))
    sys.stdout.write(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
