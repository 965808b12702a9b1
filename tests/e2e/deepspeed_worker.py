"""What the tests of learner ranks run in their processes, and how they start them.

Ranks are forked from a server that has imported everything once; each group of ranks lives for one
job, because DeepSpeed keeps one engine a process.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed

# Otherwise each fork would import these for itself: seconds, with half of the compiler behind them.
import deepspeed.runtime.zero.muon.muon_optimizer
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection, ReferenceSection
from asyncrl.learners.base import RankStep, TrainSample
from asyncrl.learners.layout import Layout
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.weight_sync.base import Manifest, plan_buckets
from asyncrl.weight_sync.verify import state_checksum
from tests.unit.recorded_batches import (
    MAX_AGE,
    one_prompt_a_group,
    record_batch,
    shares,
    with_reference,
    with_values,
)

DEADLINE_S = 300
SCORED = tuple((5 * i + i * i) % 23 for i in range(30))
"""Tokens whose log-probs are asked for."""
TEMPERATURE = 0.9
LENGTH_NORM = 24.0
PRELOADED = (AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM)
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Rank:
    """Which learner a job runs on."""

    folder: Path
    stage: int
    rank: int
    ranks: int
    port: int
    backend: str = "deepspeed"
    lr: float = 1e-3
    dtype: str = "float32"
    packing: bool = False
    shared_prompts: bool = False
    """And groups of one prompt each."""
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    checkpointing: bool = False
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    learns: AlgorithmSection = field(default_factory=AlgorithmSection)

    @property
    def shared(self) -> int:
        """Ranks with the same samples."""
        return self.sequence_parallel * self.tensor_parallel


@contextmanager
def learner(at: Rank) -> Iterator[tuple[PolicyRank, Manifest]]:
    rank = PolicyRank(
        model=ModelSection.model_validate({"path": str(at.folder), "dtype": at.dtype}),
        learner=LearnerSection(
            backend=at.backend,
            ranks=at.ranks,
            zero_stage=at.stage,
            lr=at.lr,
            device="cpu",
            warmup_steps=3,
            max_grad_norm=0.05,
            packing=at.packing,
            shared_prompts=at.shared_prompts,
            sequence_parallel=at.sequence_parallel,
            tensor_parallel=at.tensor_parallel,
            gradient_checkpointing=at.checkpointing,
        ),
        algorithm=at.learns,
        reference=at.reference,
        model_path=str(at.folder),
        temperature=TEMPERATURE,
        max_staleness=MAX_AGE,
        total_steps=20,
        rank=at.rank,
        world_size=at.ranks,
        master=("127.0.0.1", at.port),
        deterministic=True,
        length_norm=LENGTH_NORM,
    )
    try:
        yield rank, rank.start().manifest
    finally:
        rank.close()


def share_of(
    at: Rank, version: int, groups: int = 4, micro_batch_tokens: int = 80, advantage: str = "grpo"
) -> RankStep:
    batch = record_batch(version, groups=groups)
    layout: Layout = "packed" if at.packing else "padded"
    if at.shared_prompts:
        batch, layout = one_prompt_a_group(batch), "shared"
    replicas = at.ranks // at.shared
    return shares(batch, version, replicas, micro_batch_tokens, advantage, layout=layout)[
        at.rank // at.shared
    ]


def gradients(at: Rank, splits: list[tuple[int, int]]) -> list[tuple[list[int], Arrays]]:
    """For each (groups, micro_batch_tokens): this rank's rows a micro-batch, and the full gradient."""
    found = []
    with learner(replace(at, lr=1e-30)) as (rank, manifest):
        for groups, micro_batch_tokens in splits:
            share = share_of(at, 2, groups, micro_batch_tokens)
            rank.accumulate(share)
            found.append(([len(rows) for rows in share.micro_batches], whole_gradient(rank, manifest)))
            # Takes the gradient away; a learning rate of 0 leaves the weights as they are.
            rank._engine.update(0.0)
    return found


def whole_gradient(rank: PolicyRank, manifest: Manifest) -> Arrays:
    """The gradient of the step, whole, whoever has which part of it."""
    parameters = dict(rank._engine.module.named_parameters())
    full = {}
    for spec in manifest:
        gradient = full_gradient(parameters[spec.name])
        tensors = rank._engine.tensors
        full[spec.name] = gradient if tensors is None else tensors.whole(spec.name, gradient)
    return to_arrays(full)


def lone_gradient(at: Rank, advantage: float) -> tuple[int, Arrays]:
    """Of a step that has one sample in all: this rank's samples, and the full gradient."""
    groups = record_batch(2, groups=1, group_size=1)
    share = shares(groups, 2, at.ranks, 80)[at.rank]
    # By itself it has nothing that its advantage could be taken against.
    share = replace(share, samples=tuple(replace(s, advantage=advantage) for s in share.samples))
    with learner(replace(at, lr=1e-30)) as (rank, manifest):
        rank.accumulate(share)
        return len(share.samples), whole_gradient(rank, manifest)


@dataclass(frozen=True)
class Referred:
    """One step of a learner that holds its reference itself."""

    reference: list[np.ndarray[Any, Any]]
    """Log-probs of this rank's samples."""
    kept: bool
    """Whether the policy's parameters had their bits afterwards."""
    policy: list[np.ndarray[Any, Any]]
    """Log-probs of the policy before its update."""
    metrics: dict[str, float]
    checksum: str
    """Of the parameters after it."""


def steps_with_a_reference(at: Rank, steps: int) -> list[Referred]:
    """Updates, each with a look at the reference before; and one that breaks while it is in place."""
    found = []
    with learner(at) as (rank, _):
        for version in range(steps):
            share = share_of(at, version)
            policy = [s.proximal for s in rank._with_logprobs("proximal", share.samples, share)]
            before = state_checksum(rank.named_parameters())
            reference = [s.reference for s in rank._with_reference(share.samples, share)]
            kept = state_checksum(rank.named_parameters()) == before
            assert rank._resident is not None
            with suppress(ZeroDivisionError), rank._resident.held():
                raise ZeroDivisionError
            kept = kept and state_checksum(rank.named_parameters()) == before
            result = rank.step(share)
            checksum = state_checksum(rank.named_parameters())
            found.append(Referred(reference, kept, policy, result.metrics, checksum))
    return found


def algorithm_gradients(
    at: Rank, algorithms: list[dict[str, Any]], splits: list[tuple[int, bool]]
) -> list[list[tuple[int, Arrays]]]:
    """For each algorithm, and (micro_batch_tokens, packing): number of micro-batches, and full gradient."""
    found = []
    with learner(replace(at, lr=1e-30, packing=True)) as (rank, manifest):
        parameters = dict(rank._engine.module.named_parameters())
        for values in algorithms:
            algorithm = AlgorithmSection.model_validate(values)
            rank._set_algorithm(algorithm, TEMPERATURE, MAX_AGE, Path.cwd())
            of_algorithm = []
            for micro_batch_tokens, packing in splits:
                rank._settings = rank._settings.model_copy(update={"packing": packing})
                share = share_of(replace(at, packing=packing), 2, 4, micro_batch_tokens, algorithm.advantage)
                share = with_values(share) if algorithm.advantage == "gae" else share
                rank.accumulate(share)
                full = {s.name: deepspeed.utils.safe_get_full_grad(parameters[s.name]) for s in manifest}
                of_algorithm.append((len(share.micro_batches), to_arrays(full)))
                rank._engine.update(0.0)
            found.append(of_algorithm)
    return found


def reference_gradients(
    at: Rank, algorithms: list[dict[str, Any]], splits: list[int]
) -> list[list[tuple[dict[str, float], Arrays]]]:
    """For each algorithm and micro_batch_tokens: metrics and gradient of a step with a reference."""
    found = []
    with learner(replace(at, lr=1e-30)) as (rank, manifest):
        parameters = dict(rank._engine.module.named_parameters())
        for values in algorithms:
            rank._set_algorithm(AlgorithmSection.model_validate(values), TEMPERATURE, MAX_AGE, Path.cwd())
            of_algorithm = []
            for micro_batch_tokens in splits:
                share = with_reference(share_of(at, 2, 4, micro_batch_tokens), values)
                tally = rank.accumulate(share)
                metrics = tally.metrics(rank._engine.all_sum, rank._engine.all_max)
                full = {s.name: deepspeed.utils.safe_get_full_grad(parameters[s.name]) for s in manifest}
                of_algorithm.append((metrics, to_arrays(full)))
                rank._engine.update(0.0)
            found.append(of_algorithm)
    return found


def several_updates(at: Rank, algorithm: dict[str, Any]) -> tuple[bool, dict[str, float], Arrays]:
    """One step with the epochs and mini-batches of ``algorithm``: skipped, metrics, parameters."""
    section = AlgorithmSection.model_validate(algorithm)
    with learner(at) as (rank, _):
        rank._set_algorithm(section, TEMPERATURE, MAX_AGE, Path.cwd())
        batch = record_batch(2)
        layout: Layout = "packed" if at.packing else "padded"
        share = shares(batch, 2, at.ranks, 80, section.advantage, section.mini_batches, layout)[at.rank]
        result = rank.step(share)
        return result.skipped, result.metrics, to_arrays(dict(rank.named_parameters()))


def train(at: Rank, versions: int) -> dict[str, Any]:
    """Train on the recorded batches, then look at the weights in every way that a learner offers."""
    with learner(at) as (rank, manifest):
        norms, lrs, digests = [], [], []
        for version in range(versions):
            # Between all updates: what is compared with runs that score nothing must not notice.
            rank.score(SCORED)
            result = rank.step(share_of(at, version))
            assert not result.skipped
            norms.append(result.metrics["actor/grad_norm"])
            lrs.append(result.metrics["actor/lr"])
            digests.append(state_digest(rank))
        buckets = plan_buckets(manifest, 1 << 16)
        flat = [rank.gather_bucket(bucket) for bucket in buckets]
        rank.export(at.folder.parent / f"export-{at.backend}-{at.stage}-{at.ranks}")
        return {
            "metrics": result.metrics,
            "norms": norms,
            "lrs": lrs,
            "digests": digests,
            "checksum": rank.checksum(),
            "scores": rank.score(SCORED),
            "parameters": to_arrays(dict(rank.named_parameters())),
            "buckets": None if flat[0] is None else [b.float().numpy() for b in flat if b is not None],
            "bucket_names": [[spec.name for spec in bucket] for bucket in buckets],
        }


def skip(at: Rank, kinds: list[str]) -> dict[str, Any]:
    """Good, then bad ones of the given kinds on the last rank alone, then good again."""
    with learner(at) as (rank, _):
        assert not rank.step(share_of(at, 0)).skipped
        digests, results = [state_digest(rank)], []
        for kind in kinds:
            share = share_of(at, 1)
            # All that have the same samples have the bad one too.
            is_last = at.rank // at.shared == at.ranks // at.shared - 1
            results.append(rank.step(spoil(share, kind) if is_last else share))
            digests.append(state_digest(rank))
        assert not rank.step(share_of(at, 1)).skipped
        return {"digests": [*digests, state_digest(rank)], "results": results}


def spoil(share: RankStep, kind: str) -> RankStep:
    """One sample of the share gets a value that is not finite."""
    first, *rest = share.samples
    bad: TrainSample
    if kind == "advantage":
        bad = replace(first, advantage=float("nan"))
    elif kind == "infinite advantage":
        bad = replace(first, advantage=float("inf"))
    else:
        logprobs = np.full_like(first.trajectory.logprobs, np.nan)
        bad = replace(first, trajectory=replace(first.trajectory, logprobs=logprobs))
    return replace(share, samples=(bad, *rest))


def full_gradient(parameter: Tensor) -> Tensor:
    """Over all ranks; collective."""
    if isinstance(parameter, DTensor):
        assert isinstance(parameter.grad, DTensor)
        return parameter.grad.full_tensor()
    found: Tensor = deepspeed.utils.safe_get_full_grad(parameter)
    return found


def state_digest(rank: PolicyRank) -> str:
    """Checksum of parameters and optimizer state, this rank's part of it."""
    return state_checksum([*((n, p.clone()) for n, p in rank.named_parameters()), *optimizer_state(rank)])


def optimizer_state(rank: PolicyRank) -> Iterator[tuple[str, Tensor]]:
    inner = getattr(rank._engine.optimizer, "optimizer", rank._engine.optimizer)
    for i, (parameter, state) in enumerate(inner.state.items()):
        yield f"master {i}", parameter
        for key, value in state.items():
            yield f"{key} {i}", torch.as_tensor(value)


def to_arrays(tensors: dict[str, Tensor]) -> Arrays:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}


Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run_ranks(
    job: Callable[..., Any],
    folder: Path,
    *,
    stage: int,
    ranks: int,
    beside: Job | None = None,
    **options: Any,
) -> list[Any]:
    """Run a job on every rank, in processes of their own; results in the order of the ranks.

    ``beside``: a last one that is of no rank.
    """
    port = free_port()
    own = ("folder", "stage", "rank", "ranks", "port")
    names = [field.name for field in fields(Rank) if field.name not in own]
    settings = {name: options.pop(name) for name in names if name in options}
    bound = partial(job, **options)
    places = [Rank(folder, stage, rank, ranks, port, **settings) for rank in range(ranks)]
    jobs: list[Job] = [(bound, (place,)) for place in places]
    return run_jobs([*jobs, *([beside] if beside is not None else [])])


def run_jobs(jobs: Sequence[Job]) -> list[Any]:
    """Run jobs at the same time, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(len(jobs), mp_context=context) as pool:
        futures = [pool.submit(job, *arguments) for job, arguments in jobs]
        return [future.result(timeout=DEADLINE_S) for future in futures]
