"""The weights of a reference that follows: a real push group between threads, real arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncrl.checkpoint.files import measure
from asyncrl.errors import CheckpointError, ConfigError, WeightSyncError
from asyncrl.learners.policy import manifest_of
from asyncrl.learners.sender import PushSender
from asyncrl.roles.following import FollowingWeights
from asyncrl.weight_sync.base import PushGroupSpec, plan_buckets
from asyncrl.weight_sync.broadcast import create_store

BUCKET_BYTES = 400


def model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)).to(dtype)


@dataclass
class Arrived:
    """What a push left, for weights that no push group is around."""

    tensors: dict[str, torch.Tensor]


class Policy:
    """As much of a learner rank as a sender asks for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def gather_bucket(self, bucket, into=None, *, everywhere=False):
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[s.name].detach().reshape(-1) for s in bucket])


class Pair:
    """A policy, the sender beside it, and references that follow."""

    def __init__(self, dtype: torch.dtype, references: int = 1) -> None:
        self.policy = Policy(model(1, dtype))
        self.models = [model(2, dtype) for _ in range(references)]
        self.weights = [FollowingWeights(m) for m in self.models]
        manifest = manifest_of(self.policy.module)
        self.sender = PushSender(
            self.policy, plan_buckets(manifest, BUCKET_BYTES), rank=0, ranks=1, sharded=False, overlap=False
        )
        self.store = create_store("127.0.0.1", 20.0)
        self.spec = PushGroupSpec(
            "127.0.0.1", self.store.port, "r1", 0, 1 + references, "gloo", BUCKET_BYTES, 20.0, manifest
        )
        self.threads = ThreadPoolExecutor(1 + references)

    def join(self) -> None:
        joining = [
            self.threads.submit(w.join, replace(self.spec, rank=i)) for i, w in enumerate(self.weights, 1)
        ]
        self.sender.open(self.spec, self.store, "reference")
        for future in joining:
            future.result(20)

    def push(self, version: int) -> None:
        receiving = [self.threads.submit(w.receive, version) for w in self.weights]
        report = self.sender.send(version, "reference")
        assert {future.result(20).checksum for future in receiving} == {report.checksum}

    def close(self) -> None:
        for weights in self.weights:
            weights.leave()
        self.sender.close()
        self.threads.shutdown()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_refresh_is_the_policy_bit_for_bit_once_it_is_taken(pairs: list[Pair], dtype: torch.dtype) -> None:
    pair = Pair(dtype, references=2)
    pairs.append(pair)
    pair.join()
    before = tensors(pair.models[0])
    pair.push(4)
    assert all(map(torch.equal, before, tensors(pair.models[0])))
    assert [w.version for w in pair.weights] == [0, 0]
    for weights, module in zip(pair.weights, pair.models, strict=True):
        weights.take(4, 0.0)
        assert weights.version == 4
        assert all(map(torch.equal, tensors(pair.policy.module), tensors(module)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_are_kept_in_float32(pairs: list[Pair], dtype: torch.dtype) -> None:
    pair = Pair(dtype)
    pairs.append(pair)
    pair.join()
    decay, (weights,) = 0.999, pair.weights
    expected = [p.double() for p in tensors(pair.models[0])]
    for version in range(1, 41):
        pair.push(version)
        weights.take(version, decay)
        policy = [p.double() for p in tensors(pair.policy.module)]
        expected = [decay * e + (1 - decay) * p for e, p in zip(expected, policy, strict=True)]
    # In bfloat16 each of these steps would round to nothing: what is computed with is rounded once.
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
    start = [p.double() for p in tensors(model(2, dtype))]
    for found, exact, first in zip(tensors(pair.models[0]), expected, start, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-7)
        moved = (found.double() - first).norm() / (exact - first).norm()
        assert moved == pytest.approx(1.0, abs=0.05)


def test_a_second_call_for_a_version_mixes_nothing_in(pairs: list[Pair]) -> None:
    pair = Pair(torch.float32)
    pairs.append(pair)
    pair.join()
    (weights,) = pair.weights
    pair.push(1)
    weights.take(1, 0.5)
    once = tensors(pair.models[0])
    pair.push(1)
    weights.take(1, 0.5)
    assert all(map(torch.equal, once, tensors(pair.models[0])))
    # Starting over does away with the average.
    weights.take(1, 0.0)
    assert all(map(torch.equal, tensors(pair.policy.module), tensors(pair.models[0])))


def test_only_what_lies_ready_is_taken(pairs: list[Pair]) -> None:
    pair = Pair(torch.float32)
    pairs.append(pair)
    (weights,) = pair.weights
    with pytest.raises(WeightSyncError, match="receive version 1 before joining"):
        weights.receive(1)
    with pytest.raises(WeightSyncError, match="take version 1, but nothing lies ready"):
        weights.take(1, 0.0)
    pair.join()
    pair.push(1)
    with pytest.raises(WeightSyncError, match="take version 2, but version 1 lies ready"):
        weights.take(2, 0.0)


def test_another_architecture_is_refused_with_what_differs() -> None:
    weights = FollowingWeights(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5)))
    manifest = manifest_of(model(1))
    spec = PushGroupSpec("127.0.0.1", 1, "r1", 1, 2, "gloo", BUCKET_BYTES, 20.0, manifest)
    message = r"2 tensors differ, the first is 1.bias with shape \(5,\) in the reference and \(3,\)"
    with pytest.raises(ConfigError, match=message):
        weights.join(spec)


def test_channels_come_and_go_without_each_other(pairs: list[Pair]) -> None:
    pair = Pair(torch.float32)
    pairs.append(pair)
    pair.join()
    # The generators' group, of the sender alone, is built twice.
    for prefix in ("push1", "push2"):
        pair.sender.open(replace(pair.spec, prefix=prefix, world_size=1), pair.store)
        assert pair.sender.send(3).version == 3
    pair.push(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_and_averages_survive_a_checkpoint_to_the_bit(
    pairs: list[Pair], tmp_path: Path, dtype: torch.dtype
) -> None:
    pair = Pair(dtype)
    pairs.append(pair)
    pair.join()
    for version in (1, 2):
        pair.push(version)
        pair.weights[0].take(version, 0.9)
    pair.weights[0].copy_state()
    pair.push(3)
    pair.weights[0].take(3, 0.9)  # after the copy, and before it is written
    (entry,) = pair.weights[0].write_state(tmp_path)
    assert measure(tmp_path, entry.path) == entry

    resumed = FollowingWeights(other := model(5, dtype))
    resumed.load_state(tmp_path, 2)
    assert resumed.version == 2
    # The next refresh is the one that would have come.
    resumed._staged = 3, Arrived(dict(pair.policy.module.named_parameters()))  # type: ignore[assignment]
    resumed.take(3, 0.9)
    for name, parameter in pair.models[0].named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], parameter), name


def test_a_checkpoint_of_another_reference_is_refused(tmp_path: Path) -> None:
    weights = FollowingWeights(model(1))
    weights.copy_state()
    weights.write_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"2 tensors differ, the first is 0\.bias with shape \(16,\)"):
        FollowingWeights(nn.Sequential(nn.Linear(8, 4), nn.Linear(16, 3))).load_state(tmp_path, 1)
