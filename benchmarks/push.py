"""GB/s of a push between two processes on this machine, beside a bare broadcast of as many bytes.

    python benchmarks/push.py [--megabytes 512] [--tensors 200] [--bucket-mb 64 256] [--json FILE]

- bare: one flat float32 tensor, broadcast over the same kind of process group and nothing else: the ceiling.
- into a staging area that lies in buckets, as vLLM's does: what a push adds is packing and checksums.
- into tensors by name, as the torch engine's: and a copy of each.

Sender and receiver have a thread and a core each. Rates are medians over the pushes, in 10**9 bytes/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.weight_sync.base import Manifest, PushGroupSpec, TensorSpec
from asyncrl.weight_sync.broadcast import PushGroup, Staging, create_store, make_staging

TIMEOUT_S = 120.0
HOST = "127.0.0.1"
KINDS = ("bare", "into buckets", "into tensors")


@dataclass(frozen=True)
class Job:
    manifest: Manifest
    bucket_bytes: int
    kind: str
    pushes: int
    port: int

    def spec(self, rank: int) -> PushGroupSpec:
        prefix = f"{self.kind}-{self.bucket_bytes}"
        return PushGroupSpec(
            HOST, self.port, prefix, rank, 2, "gloo", self.bucket_bytes, TIMEOUT_S, self.manifest
        )

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.manifest)


def pin(core: int) -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def timed(group: PushGroup, times: int, push: Callable[[int], object]) -> list[float]:
    """Seconds of each push, from when both are ready until both are done."""
    meeting = torch.zeros(1)
    found = []
    for version in range(1, times + 1):
        group._broadcast(meeting).wait()
        start = time.perf_counter()
        push(version)
        found.append(time.perf_counter() - start)
    return found


def send(job: Job) -> list[float]:
    pin(0)
    group = PushGroup(job.spec(0))
    weights = {spec.name: torch.randn(spec.shape) for spec in job.manifest}
    flat = torch.randn(job.numel) if job.kind == "bare" else torch.empty(0)
    if job.kind == "bare":
        return timed(group, job.pushes, lambda _: group._broadcast(flat).wait())

    def gather(bucket: object) -> torch.Tensor:
        specs: list[TensorSpec] = list(bucket)  # type: ignore[call-overload]
        return torch.cat([weights[spec.name].flatten() for spec in specs])

    return timed(group, job.pushes, lambda version: group.send(version, gather))


def receive(job: Job) -> list[float]:
    pin(1)
    group = PushGroup(job.spec(1))
    if job.kind == "bare":
        flat = torch.zeros(job.numel)
        return timed(group, job.pushes, lambda _: group._broadcast(flat).wait())
    staging: Staging | dict[str, torch.Tensor]
    if job.kind == "into buckets":
        staging = make_staging(group.buckets, group.device)
    else:
        staging = {spec.name: torch.zeros(spec.shape) for spec in job.manifest}
    return timed(group, job.pushes, lambda version: group.receive(version, staging))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=512.0, help="of all weights (10**6 bytes)")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[64.0, 256.0])
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    numel = int(args.megabytes * 1e6 / 4 / args.tensors)
    manifest = tuple(TensorSpec(f"layers.{i}.weight", (numel,), "float32") for i in range(args.tensors))
    store = create_store(HOST, TIMEOUT_S)
    nbytes = 4 * numel * args.tensors
    report: dict[str, float] = {}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for bucket_mb in args.bucket_mb:
            for kind in KINDS:
                job = Job(manifest, int(bucket_mb * 1e6), kind, args.pushes, store.port)
                ends = pool.submit(send, job), pool.submit(receive, job)
                slower = [max(pair) for pair in zip(*(end.result(600) for end in ends), strict=True)]
                name = kind if kind == "bare" else f"{kind} of {bucket_mb:g} MB"
                report[name] = nbytes / statistics.median(slower[1:]) / 1e9
    sys.stdout.write("".join(f"{rate:8.2f} GB/s  {name}\n" for name, rate in report.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
