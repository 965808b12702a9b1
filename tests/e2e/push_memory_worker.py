"""What the tests of a push's memory run: real ranks, and a receiver in a process of its own, all measured."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.generators.weights import DoubleBufferedWeights
from asyncrl.learners.policy import manifest_of
from asyncrl.learners.sender import PushSender
from asyncrl.weight_sync.base import Manifest, PushGroupSpec, plan_buckets
from asyncrl.weight_sync.broadcast import PushGroup, Staging, make_staging
from tests.e2e.deepspeed_worker import Rank, learner, share_of

WAIT_S = 120.0
CLEAR_REFS = Path("/proc/self/clear_refs")
LARGEST = 8 << 20
"""Bytes of the largest tensor of ``save_wide_policy``'s model, the embedding."""
MODEL = 38 << 20
"""Bytes of all of them, and a little less."""


@dataclass(frozen=True)
class Push:
    """How one push is made."""

    overlap: bool
    bucket_bytes: int
    in_place: bool = False
    """Whether the receiver's staging area lies in buckets, as vLLM's does, or in tensors."""

    def spec(self, port: int, prefix: str, rank: int, manifest: Manifest) -> PushGroupSpec:
        return PushGroupSpec("127.0.0.1", port, prefix, rank, 2, "gloo", self.bucket_bytes, WAIT_S, manifest)


def save_wide_policy(folder: Path) -> Path:
    """Large enough for a bucket more or less to be seen in what the process holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Appends the bytes that the process held at the block's peak, beside those that it held before.

    By the kernel's own count of resident pages, which sees every allocation of every library and thread.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what is allocated might have been held already, free
    CLEAR_REFS.write_text("5")  # the peak starts again from now
    before, found = _resident("VmRSS"), []
    yield found
    found.append(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name} in /proc/self/status")


def meter(sizes: Sequence[int]) -> list[int]:
    """What the meter says of tensors that are gone when it looks."""
    found = []
    for size in sizes:
        with peak_memory() as peak:
            torch.zeros(size, dtype=torch.uint8).add_(1)
        found += peak
    return found


def send_and_measure(at: Rank, port: int, pushes: list[Push]) -> list[int]:
    """For each push, this rank's peak, beside its shard and the shard's copy."""
    with learner(at) as (rank, manifest):
        rank.step(share_of(at, 0))
        store = None
        if at.rank == 0:
            store = TCPStore(
                "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False
            )
        found = []
        for number, push in enumerate(pushes):
            buckets = plan_buckets(manifest, push.bucket_bytes)
            sharded = rank._engine.is_sharded
            sender = PushSender(
                rank, buckets, rank=at.rank, ranks=at.ranks, sharded=sharded, overlap=push.overlap
            )
            sender.open(push.spec(port, f"push{number}", 0, manifest), store)
            if push.overlap:
                sender.copy_out(1)
            with peak_memory() as peak:
                sender.send(1)
            found += peak
            sender.close()
        return found


def receive_and_measure(folder: Path, port: int, pushes: list[Push]) -> list[int]:
    """For each push, the receiver's peak, beside its weights and its staging area."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    manifest = manifest_of(model)
    tensors = DoubleBufferedWeights(model).staging()
    found = []
    for number, push in enumerate(pushes):
        group = PushGroup(push.spec(port, f"push{number}", 1, manifest))
        staging: Staging | dict[str, torch.Tensor] = tensors
        if push.in_place:
            staging = make_staging(group.buckets, group.device)
        for tensor in staging.flats if isinstance(staging, Staging) else staging.values():
            tensor.zero_()  # its pages are held from now on
        with peak_memory() as peak:
            group.receive(1, staging)
        found += peak
        group.close()
        live = dict(model.named_parameters())
        received = staging.tensors if isinstance(staging, Staging) else staging
        assert any(not torch.equal(received[name], live[name]) for name in live), "the update changed nothing"
    return found
