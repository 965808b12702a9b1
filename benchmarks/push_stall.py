"""How long a push holds the learner up: with ``weight_sync.overlap`` and without, on plain processes.

    python benchmarks/push_stall.py                        ZeRO 2 with 1 rank, ZeRO 3 with 2 ranks
    python benchmarks/push_stall.py --hidden 768 --layers 12 --pushes 20 --json

A small random Llama is trained by real DeepSpeed ranks, and pushed over loopback to a receiver in a
process of its own. Each figure is the median over the pushes, in milliseconds, of the slowest rank:

    one copy     the tensors of the rank's shard, copied one after the other into memory that is in use
    flat         as many bytes as one tensor, likewise: no model lies like that in memory
    stall        what the learner stands still for: the copy with overlap, the whole push without
    step alone   an update with no push beside it
    step beside  an update beside a push
    push         from the first byte to the receiver's last, beside an update and between two
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection
from asyncrl.inherited import set_inherited
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.types import Trajectory
from asyncrl.weight_sync.base import PushGroupSpec, plan_buckets

VOCABULARY = 4096
ROWS, LENGTH = 8, 64
TIMEOUT_S = 120.0
DEADLINE_S = 1800.0
SETTINGS = ((2, 1), (3, 2))
"""(ZeRO stage, ranks)."""


@dataclass(frozen=True)
class Job:
    """One measurement, as every rank and the receiver get it."""

    folder: str
    stage: int
    ranks: int
    pushes: int
    bucket_mb: float
    master: int
    store: int


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds; ``shard_mb`` is what the rank with the most copies out."""

    stage: int
    ranks: int
    shard_mb: float
    one_copy_ms: float
    flat_copy_ms: float
    stall_ms: float
    stall_without_overlap_ms: float
    step_alone_ms: float
    step_beside_ms: float
    push_beside_ms: float
    push_between_ms: float

    @property
    def copies(self) -> float:
        """The stall in units of one copy."""
        return self.stall_ms / self.one_copy_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=8, help="its blocks")
    parser.add_argument("--pushes", type=int, default=20, help="of each kind")
    parser.add_argument("--bucket-mb", type=float, default=8.0, help="weight_sync.bucket_mb")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    set_inherited()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, args.hidden, args.layers)
        results = [measure(folder, stage, ranks, args.pushes, args.bucket_mb) for stage, ranks in SETTINGS]
    out = sys.stdout.write
    if args.json:
        out(json.dumps({"results": [{**asdict(r), "copies": r.copies} for r in results]}) + "\n")
        return 0
    titles = ("ZeRO", "ranks", "shard MiB", "flat", "one copy", "stall", "copies", "no overlap")
    titles += ("step alone", "beside", "push beside", "between")
    out("  ".join(titles) + "\n")
    for r in results:
        values = (r.shard_mb, r.flat_copy_ms, r.one_copy_ms, r.stall_ms, r.copies, r.stall_without_overlap_ms)
        values += (r.step_alone_ms, r.step_beside_ms, r.push_beside_ms, r.push_between_ms)
        cells = [str(r.stage), str(r.ranks), *(f"{value:.2f}" for value in values)]
        out("  ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True)) + "\n")
    return 0


def save_model(folder: str, hidden: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=4 * LENGTH,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(folder: str, stage: int, ranks: int, pushes: int, bucket_mb: float) -> Result:
    """Ranks and receiver in processes of their own, because DeepSpeed keeps one engine a process."""
    job = Job(folder, stage, ranks, pushes, bucket_mb, free_port(), free_port())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ranks + 1, mp_context=context) as pool:
        receiver = pool.submit(receive_all, job)
        futures = [pool.submit(run_rank, job, rank) for rank in range(ranks)]
        found = [future.result(DEADLINE_S) for future in futures]
        receiver.result(DEADLINE_S)
    first = found[0]

    def slowest(name: str) -> float:
        """Median over the pushes of the slowest rank's time, in ms."""
        return 1e3 * statistics.median(max(times) for times in zip(*(f[name] for f in found), strict=True))

    return Result(
        stage=stage,
        ranks=ranks,
        shard_mb=max(f["shard_bytes"] for f in found) / 2**20,
        one_copy_ms=slowest("one_copy"),
        flat_copy_ms=slowest("flat_copy"),
        stall_ms=slowest("stall"),
        stall_without_overlap_ms=slowest("push_between"),
        step_alone_ms=slowest("step_alone"),
        step_beside_ms=slowest("step_beside"),
        push_beside_ms=1e3 * statistics.median(first["push_beside"]),
        push_between_ms=1e3 * statistics.median(first["push_between"]),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run_rank(job: Job, rank: int) -> dict[str, Any]:
    from asyncrl.learners.policy_rank import PolicyRank
    from asyncrl.learners.sender import PushSender

    learner = PolicyRank(
        model=ModelSection(path=job.folder),
        learner=LearnerSection(ranks=job.ranks, zero_stage=job.stage, device="cpu", lr=1e-5),
        algorithm=AlgorithmSection(),
        model_path=job.folder,
        temperature=1.0,
        max_staleness=0,
        total_steps=10**6,
        rank=rank,
        world_size=job.ranks,
        master=("127.0.0.1", job.master),
    )
    manifest = learner.start().manifest
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", job.store, is_master=rank == 0, wait_for_workers=False
    )
    spec = push_spec(job, manifest)
    buckets = plan_buckets(manifest, spec.bucket_bytes)
    senders = {
        overlap: PushSender(
            learner, buckets, rank=rank, ranks=job.ranks, sharded=job.stage == 3, overlap=overlap
        )
        for overlap in (True, False)
    }
    for overlap, sender in senders.items():
        if rank == 0:
            store.set(f"manifest-{overlap}", json.dumps([asdict(tensor) for tensor in manifest]))
        sender.open(replace(spec, prefix=f"push-{overlap}"), store)
    shard_bytes = senders[True].shard_bytes
    source, target = (torch.ones(max(shard_bytes, 1), dtype=torch.uint8) for _ in range(2))
    share = make_share(job, rank)
    names = ("one_copy", "flat_copy", "stall", "step_alone", "step_beside", "push_beside", "push_between")
    times: dict[str, list[float]] = {name: [] for name in names}
    copies = [torch.zeros_like(shard) for bucket in buckets for shard in learner.shards(bucket)]

    def copy_shard() -> None:
        for copy, shard in zip(
            copies, (s for bucket in buckets for s in learner.shards(bucket)), strict=True
        ):
            copy.copy_(shard)

    learner.step(share)
    with ThreadPoolExecutor(1) as thread:
        for version in range(job.pushes):
            times["step_alone"].append(timed(lambda: learner.step(share)))
            times["one_copy"].append(timed(copy_shard))
            learner.step(share)
            times["flat_copy"].append(timed(lambda: target.copy_(source)))
            times["push_between"].append(timed(lambda v=version: senders[False].send(v)))  # type: ignore[misc]
            learner.step(share)
            times["stall"].append(senders[True].copy_out(version))
            push = thread.submit(timed, lambda v=version: senders[True].send(v))  # type: ignore[misc]
            times["step_beside"].append(timed(lambda: learner.step(share)))
            times["push_beside"].append(push.result(TIMEOUT_S))
    for sender in senders.values():
        sender.close()
    torch.distributed.barrier()
    learner.close()
    return {"shard_bytes": shard_bytes, **times}


def receive_all(job: Job) -> None:
    """The receiver: takes every push as it comes, first one between two updates, then one beside."""
    from asyncrl.weight_sync.base import TensorSpec
    from asyncrl.weight_sync.broadcast import PushGroup

    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", job.store, is_master=False)  # type: ignore[attr-defined]
    groups = {}
    for overlap in (True, False):
        found = json.loads(store.get(f"manifest-{overlap}"))
        manifest = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"]) for t in found)
        groups[overlap] = PushGroup(
            replace(push_spec(job, manifest), prefix=f"push-{overlap}", rank=1), store
        )
    staging = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in manifest}
    for version in range(job.pushes):
        for overlap in (False, True):
            groups[overlap].receive(version, staging)


def push_spec(job: Job, manifest: Any) -> PushGroupSpec:
    return PushGroupSpec(
        "127.0.0.1", job.store, "push", 0, 2, "gloo", int(job.bucket_mb * 2**20), TIMEOUT_S, manifest
    )


def make_share(job: Job, rank: int) -> RankStep:
    """A rank's part of an update on random answers."""
    rng = np.random.default_rng(rank)

    def sample(i: int) -> TrainSample:
        ids = rng.integers(0, VOCABULARY, 2 * LENGTH).astype(np.int32)
        trajectory = Trajectory(
            sample=i,
            attempt=0,
            prompt_ids=ids[:LENGTH],
            token_ids=ids[LENGTH:],
            loss_mask=np.ones(LENGTH, np.bool_),
            logprobs=np.full(LENGTH, -np.log(VOCABULARY), np.float32),
            versions=np.zeros(LENGTH, np.int32),
            reward=0.0,
            finish_reason="stop",
        )
        return TrainSample(rank * ROWS + i, trajectory, float(rng.standard_normal()))

    rows = ROWS * job.ranks
    return RankStep(0, tuple(sample(i) for i in range(ROWS)), (tuple(range(ROWS)),), rows * LENGTH, rows)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
