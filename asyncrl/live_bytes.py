"""Memory of a process that holds a generator and a learner rank, by who owns it.

Sides that take turns on the same devices have to leave each other room: keys and values are gone before an
update, gradients after it. This is how that is seen, in tests and in ``benchmarks/colocated.py``.

Invariants:
- Memory under several tensors counts once: for parameters, then gradients, then the optimizer.
- Only what can be named is counted. Activations live and die within a forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from asyncrl.generators.torch_engine import TorchEngine
    from asyncrl.learners.engines import TrainingEngine


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes held at one moment."""

    parameters: int
    """Of both sides where these are the same."""
    gradients: int
    """On parameters and masters, and in the buffers that they are averaged in."""
    optimizer: int
    """Masters and moments."""
    kv: int
    """Keys and values of the generator's slots."""
    staging: int
    """Where the generator receives the weights of a push; only once there was one."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.kv + self.staging


def live_bytes(learner: TrainingEngine, generator: TorchEngine) -> LiveBytes:
    """What both hold now. Not while the learner is within a forward or backward pass, or an update."""
    parameters = storages(learner.module.parameters())
    gradients = _others(storages(_gradients(learner)), parameters)
    optimizer = _others(storages(_optimizer_state(learner)), parameters | gradients)
    return LiveBytes(
        parameters=sum(parameters.values()),
        gradients=sum(gradients.values()),
        optimizer=sum(optimizer.values()),
        kv=generator.kv_bytes,
        staging=generator.staging_bytes,
    )


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the memory under the tensors, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def _others(found: dict[int, int], known: dict[int, int]) -> dict[int, int]:
    return {address: size for address, size in found.items() if address not in known}


def _optimizer_state(learner: TrainingEngine) -> Iterator[Tensor]:
    inner = getattr(learner.optimizer, "optimizer", learner.optimizer)
    for group in inner.param_groups:
        yield from group["params"]  # the masters, or parameters that have none
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(learner: TrainingEngine) -> Iterator[Tensor]:
    """Wherever DeepSpeed has put them: it moves them from parameters through buckets to its masters."""
    optimizer = learner.optimizer
    holders = [*learner.module.parameters(), *_optimizer_state(learner)]
    yield from (holder.grad for holder in holders if holder.grad is not None)
    for averaged in getattr(optimizer, "averaged_gradients", {}).values():
        yield from averaged or ()
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from bucket.buffer
