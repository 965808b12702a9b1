"""The half of ``benchmarks/colocated.py`` that needs no run: what a push costs, and who holds which bytes.

A small random Llama, a real DeepSpeed rank (ZeRO 2) and a real torch engine, in plain processes. Colocated,
one process holds both and they take turns, with answers unfinished all along; split, the rank pushes over
loopback to an engine in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import push_stall

from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.live_bytes import live_bytes
from asyncrl.types import DrawKey, GenerationRequest, SamplingParams
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets

SLOTS, MAX_SEQUENCE, ANSWER = 16, 256, 224
TOKENS_A_TURN = 4 * SLOTS
BUCKET_BYTES = 32 << 20
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Job:
    """One model, as every process of a measurement gets it."""

    folder: str
    pushes: int
    master: int
    store: int


def make_job(folder: str, hidden: int, layers: int, pushes: int) -> Job:
    push_stall.save_model(folder, hidden, layers)
    return Job(folder, pushes, push_stall.free_port(), push_stall.free_port())


def measure(job: Job) -> dict[str, Any]:
    """Medians over the pushes, in seconds, and the bytes of each phase of a colocated turn."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        together = pool.submit(take_turns, job).result(TIMEOUT_S)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        receiver = pool.submit(receive_all, job)
        split = pool.submit(push_all, job).result(TIMEOUT_S)
        receiver.result(TIMEOUT_S)
    return {**together, **split}


# ---------------------------------------------------------------- colocated


def take_turns(job: Job) -> dict[str, Any]:
    with learner(job) as (rank, _):
        return asyncio.run(_take_turns(job, rank))


async def _take_turns(job: Job, rank: PolicyRank) -> dict[str, Any]:
    from asyncrl.generators.shared import SharedTorchGenerator
    from asyncrl.generators.torch_engine import TorchEngine

    shared = rank.share()
    engine = TorchEngine(shared.model, slots=SLOTS, max_sequence=MAX_SEQUENCE, asleep=True)
    generator = SharedTorchGenerator(engine, shared)
    phases: dict[str, dict[str, int]] = {}

    def sample(phase: str) -> None:
        phases[phase] = asdict(live_bytes(rank._engine, engine))

    apply = rank._engine.update

    def update(lr: float) -> tuple[float, bool]:
        sample("in update")
        return apply(lr)

    rank._engine.update = update  # type: ignore[method-assign]
    share = push_stall.make_share(push_job(job), 0)
    naming, waking = [], []
    await generator.start()
    sample("start")
    await generator.swap(0, in_flight=True, kv="recompute")
    answers = [asyncio.create_task(generator.generate(request(i))) for i in range(SLOTS)]
    addresses = shared.addresses()
    try:
        for version in range(job.pushes):
            await generator.wake()
            while generator.statistics().tokens < (version + 1) * TOKENS_A_TURN:
                await generator.score((1, 2))  # returns between two tokens
            sample("rollout")
            await generator.sleep()
            sample("before update")
            await asyncio.to_thread(rank.step, replace(share, version=version))
            sample("after update")
            start = time.perf_counter()
            await generator.swap(version + 1, in_flight=True, kv="recompute")
            naming.append(time.perf_counter() - start)
            sample("push")
            start = time.perf_counter()
            await generator.wake()
            waking.append(time.perf_counter() - start)
        assert shared.addresses() == shared.learner_addresses() == addresses, "a push moved a tensor"
    finally:
        await generator.close()
        await asyncio.gather(*answers, return_exceptions=True)  # unfinished: they end with the engine
    return {
        "naming_s": statistics.median(naming),
        "waking_s": statistics.median(waking),
        "phases": phases,
    }


def request(i: int) -> GenerationRequest:
    sampling = SamplingParams(ANSWER, ignore_eos=True)
    return GenerationRequest(f"r{i}", tuple(range(1, 17)), sampling, DrawKey(0, i, 0))


# ---------------------------------------------------------------- split


def push_all(job: Job) -> dict[str, Any]:
    """The learner's side: each push lasts from its first byte until the engine has swapped."""
    from asyncrl.learners.sender import PushSender
    from asyncrl.weight_sync.broadcast import dist

    with learner(job) as (rank, manifest):
        store = dist.TCPStore("127.0.0.1", job.store, is_master=True, wait_for_workers=False)
        store.set("manifest", json.dumps([asdict(spec) for spec in manifest]))
        sender = PushSender(
            rank, plan_buckets(manifest, BUCKET_BYTES), rank=0, ranks=1, sharded=False, overlap=False
        )
        store.get("receiver stands")
        sender.open(push_spec(job, manifest, 0), store)
        share = push_stall.make_share(push_job(job), 0)
        seconds, nbytes = [], 0
        for version in range(job.pushes):
            rank.step(replace(share, version=version))
            start = time.perf_counter()
            report = sender.send(version + 1)
            store.get(f"swapped {version + 1}")
            seconds.append(time.perf_counter() - start)
            assert report is not None
            nbytes = report.nbytes
        sender.close()
        return {
            "parameters": sum(spec.numel for spec in manifest),
            "split_s": statistics.median(seconds),
            "split_bytes": nbytes,
        }


def receive_all(job: Job) -> None:
    asyncio.run(_receive_all(job))


async def _receive_all(job: Job) -> None:
    from asyncrl.generators.torch_engine import TorchEngine
    from asyncrl.generators.torch_generator import TorchGenerator
    from asyncrl.weight_sync.broadcast import dist

    generator = TorchGenerator(TorchEngine(job.folder, slots=SLOTS, max_sequence=MAX_SEQUENCE))
    await generator.start()
    store = await asyncio.to_thread(lambda: dist.TCPStore("127.0.0.1", job.store, is_master=False))
    found = json.loads(await asyncio.to_thread(store.get, "manifest"))
    manifest = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"]) for t in found)
    store.set("receiver stands", "")
    try:
        await generator.join(push_spec(job, manifest, 1))
        for version in range(1, job.pushes + 1):
            await generator.receive(version)
            await generator.swap(version, in_flight=True, kv="keep")
            store.set(f"swapped {version}", "")
    finally:
        await generator.close()


# ---------------------------------------------------------------- both


@contextmanager
def learner(job: Job) -> Iterator[tuple[PolicyRank, tuple[TensorSpec, ...]]]:
    rank = PolicyRank(
        model=ModelSection(path=job.folder),
        learner=LearnerSection(zero_stage=2, device="cpu", lr=1e-5),
        algorithm=AlgorithmSection(),
        model_path=job.folder,
        temperature=1.0,
        max_staleness=job.pushes,
        total_steps=job.pushes,
        master=("127.0.0.1", job.master),
    )
    try:
        yield rank, rank.start().manifest
    finally:
        rank.close()


def push_spec(job: Job, manifest: tuple[TensorSpec, ...], rank: int) -> PushGroupSpec:
    return PushGroupSpec("127.0.0.1", job.store, "push", rank, 2, "gloo", BUCKET_BYTES, TIMEOUT_S, manifest)


def push_job(job: Job) -> push_stall.Job:
    return push_stall.Job(job.folder, 2, 1, job.pushes, BUCKET_BYTES / 2**20, job.master, job.store)
