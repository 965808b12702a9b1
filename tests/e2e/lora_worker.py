"""What the adapter tests run in the ranks' processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import deepspeed
import torch

from asyncrl.config import AlgorithmSection, LearnerSection, LoraSection, ModelSection, ReferenceSection
from asyncrl.learners.lora import LoraAdapter
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.weight_sync.base import Manifest
from asyncrl.weight_sync.verify import state_checksum
from tests.e2e.deepspeed_worker import LENGTH_NORM, TEMPERATURE, Arrays, Rank, share_of, to_arrays
from tests.e2e.push_worker import WAIT_S, Pushes, make_sender
from tests.unit.recorded_batches import KL_COEF, MAX_AGE

LORA = LoraSection(rank=4, alpha=8)


@contextmanager
def adapted(at: Rank) -> Iterator[tuple[PolicyRank, LoraAdapter, Manifest]]:
    """A learner with an adapter, which adds nothing yet, and the KL to its base in the loss."""
    rank = PolicyRank(
        model=ModelSection.model_validate({"path": str(at.folder), "dtype": at.dtype}),
        learner=LearnerSection(
            ranks=at.ranks,
            zero_stage=at.stage,
            lr=at.lr,
            device="cpu",
            lora=LORA,
            packing=at.packing,
            sequence_parallel=at.sequence_parallel,
            gradient_checkpointing=at.stage == 1,
        ),
        algorithm=AlgorithmSection(kl="loss"),
        model_path=str(at.folder),
        temperature=TEMPERATURE,
        max_staleness=MAX_AGE,
        total_steps=20,
        rank=at.rank,
        world_size=at.ranks,
        master=("127.0.0.1", at.port),
        deterministic=True,
        length_norm=LENGTH_NORM,
        reference=ReferenceSection(place="lora_base"),
    )
    try:
        manifest = rank.start().manifest
        assert rank._adapter is not None
        yield rank, rank._adapter, manifest
    finally:
        rank.close()


def whole(rank: PolicyRank, tensors: dict[str, Any]) -> Arrays:
    """Copies of whole parameters; collective for ZeRO-3."""
    found: Arrays = {}
    for name, parameter in tensors.items():
        with rank._engine.gathered([parameter]):
            found |= to_arrays({name: parameter})
    return found


def train_adapter(at: Rank, versions: int) -> dict[str, Any]:
    """Updates; then the weights that they led to in every form, a gradient there, and pushes."""
    with adapted(at) as (rank, adapter, manifest):
        module = rank._engine.module
        start, start_checksum = whole(rank, adapter.base(module)), rank.checksum()
        found = {
            "metrics": [rank.step(share_of(at, version)).metrics for version in range(versions)],
            "manifest": manifest,
            "start": start,
            "start_checksum": start_checksum,
            "base": whole(rank, adapter.base(module)),
            "adapter": whole(rank, adapter.trained),
            "optimizer": optimizer_size(rank),
            "named": {name: tensor.clone() for name, tensor in rank.named_parameters()},
            "checksum": rank.checksum(),
        }
        rank.export(at.folder.parent / f"hf-{at.stage}-{at.ranks}-{at.dtype}")
        rank.accumulate(replace(share_of(at, versions), kl_coef=KL_COEF))
        gradients = {n: deepspeed.utils.safe_get_full_grad(p) for n, p in adapter.trained.items()}
        frozen = [deepspeed.utils.safe_get_full_grad(p) for p in adapter.base(module).values()]
        rank._engine.update(0.0)  # takes the gradient away; a learning rate of 0 leaves the weights
        return found | {
            "gradients": to_arrays(gradients),
            "frozen_gradients": sum(g is not None and bool(g.any()) for g in frozen),
            "sent": [push(at, rank, manifest, overlap=overlap) for overlap in (False, True)],
            "later": rank.checksum(),
            "sent_adapters": [
                (
                    state_checksum(travelling(rank, adapter)),
                    push(at, rank, adapter.manifest, overlap=overlap),
                )
                for overlap in (False, True)
            ],
        }


def push(at: Rank, rank: PolicyRank, manifest: Manifest, *, overlap: bool) -> tuple[str, str] | None:
    """Push to a real receiver, with ``overlap`` after one more update: checksums of both sides."""
    sender = make_sender(at, rank, manifest, overlap=overlap)
    pushes = Pushes(sender, manifest, at.rank, WAIT_S)
    pushes.open()
    if overlap:
        sender.copy_out(2)
        rank.step(share_of(at, 2))
    release = threading.Event()
    release.set()
    sent = pushes.start(2, release).result(WAIT_S)
    sender.close()
    return sent


def travelling(rank: PolicyRank, adapter: LoraAdapter) -> list[tuple[str, torch.Tensor]]:
    """A and B of each weight as they travel alone, whole."""
    found = []
    for name, parameter in adapter.travelling().items():
        with rank._engine.gathered([parameter]):
            found.append((name, parameter.detach().clone()))
    return found


def optimizer_size(rank: PolicyRank) -> int:
    """Elements of the first moments on this rank."""
    inner = getattr(rank._engine.optimizer, "optimizer", rank._engine.optimizer)
    return sum(torch.as_tensor(state["exp_avg"]).numel() for state in inner.state.values())
