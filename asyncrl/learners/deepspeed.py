"""One learner rank on DeepSpeed, ZeRO 0 to 3, on CPU (gloo) or CUDA (nccl).

Nothing else imports deepspeed. What it does unasked is undone here: it averages gradients over
ranks, so losses are multiplied by the number of ranks; it counts accumulation steps, so it is told
before each forward pass whether this is the last; and its float32 stage 0 checks no gradient.

Invariants:
- A trained token with lag > max_staleness, or of a version that does not exist yet, raises
  StalenessError before anything is computed; with ``mask_stale`` the former is masked out instead.
- The gradient is that of the loss over the whole update (the step, or one of its mini-batches), whatever
  the micro-batches and ranks.
- A loss or gradient that is not finite, on any rank, skips the update on every rank, and those that
  would follow it in the step: parameters and optimizer state keep their bits.
- The learning rate depends on the policy version alone; a rank holds no other scheduler state.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.algorithms.advantages import GroupAdvantage
from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.algorithms.names import is_path
from asyncrl.algorithms.registry import user_advantage
from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection
from asyncrl.errors import ConfigError, StalenessError
from asyncrl.learners.advantages import batch_wide, from_user
from asyncrl.learners.base import LearnerInfo, MiniBatch, RankStep, StepResult, TrainSample
from asyncrl.learners.collate import MicroBatch, collate
from asyncrl.learners.masking import mask_stale
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.packed import require_exact_packing
from asyncrl.learners.policy import load_policy, manifest_of, selected_logits
from asyncrl.learners.schedule import learning_rate
from asyncrl.types import Float32Array, Metrics, token_lag
from asyncrl.weight_sync.base import Manifest, TensorSpec
from asyncrl.weight_sync.verify import state_checksum

log = logging.getLogger(__name__)

_LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default for reduce and all-gather buckets, in elements."""
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


class DeepSpeedLearner:
    """A ``LearnerRank``: every rank gets the same calls in the same order.

    ``master`` is host and port where the ranks meet; rank 0 listens there, on that address alone.
    ``total_steps`` is where the falling learning rate schedules end, ``length_norm`` the divisor of
    seq-mean-token-sum-norm in tokens, ``folder`` where users' own functions are looked up (default: the
    current one).
    """

    def __init__(
        self,
        *,
        model: ModelSection,
        learner: LearnerSection,
        algorithm: AlgorithmSection,
        model_path: str,
        temperature: float,
        max_staleness: int,
        mask_stale: bool = False,
        total_steps: int,
        rank: int = 0,
        world_size: int = 1,
        master: tuple[str, int],
        deterministic: bool = False,
        length_norm: float = 1.0,
        folder: Path | None = None,
    ) -> None:
        self._model_section = model
        self._settings = learner
        self._set_algorithm(algorithm, temperature, max_staleness, folder or Path.cwd())
        self._length_norm = length_norm
        self._model_path = model_path
        self._max_staleness = max_staleness
        self._mask_stale = mask_stale
        self._total_steps = total_steps
        self._rank = rank
        self._world_size = world_size
        self._master = master
        self._deterministic = deterministic
        self._device = torch.device(self._pick_device())
        self._manifest: Manifest = ()
        self._parameters: dict[str, nn.Parameter] = {}
        self._engine: Any = None

    def _set_algorithm(
        self, algorithm: AlgorithmSection, temperature: float, max_staleness: int, folder: Path
    ) -> None:
        self._objective = Objective(algorithm, temperature, max_staleness, folder)
        self._advantage, self._gamma = algorithm.advantage, algorithm.gamma
        self._epochs = algorithm.epochs
        self._user_advantage: GroupAdvantage | None = None
        if is_path(algorithm.advantage):
            self._user_advantage = user_advantage(algorithm.advantage, folder)

    def start(self) -> LearnerInfo:
        """Meet the other ranks, load the model, build the engine; collective."""
        self._prepare_process()
        model = load_policy(
            self._model_path,
            dtype=getattr(torch, self._model_section.dtype),
            trust_remote_code=self._model_section.trust_remote_code,
            checkpointing=self._settings.gradient_checkpointing,
            attention=None if self._settings.attention == "auto" else self._settings.attention,
        )
        self._manifest = manifest_of(model)
        self._join_ranks()
        self._engine = self._build_engine(model)
        self._parameters = dict(self._engine.module.named_parameters())
        if self._settings.packing:
            require_exact_packing(self._engine, self._model_section.dtype, self._device)
        count = sum(spec.numel for spec in self._manifest)
        log.info("learner rank %d of %d: %d parameters", self._rank, self._world_size, count)
        return LearnerInfo(manifest=self._manifest, parameters=count)

    def step(self, share: RankStep) -> StepResult:
        start = time.perf_counter()
        if self._mask_stale:
            share = mask_stale(share, self._max_staleness)
        self._check_staleness(share)
        lr = learning_rate(
            share.version,
            peak=self._settings.lr,
            schedule=self._settings.lr_schedule,
            warmup_steps=self._settings.warmup_steps,
            total_steps=self._total_steps,
        )
        samples = self._with_advantages(share.samples)
        updates = (share.mini_batches or (share.whole,)) * self._epochs
        if len(updates) > 1:
            samples = self._with_proximal(samples, share)
        tally, norms, skipped = Tally(self._device), [], False
        for update in updates:
            self._accumulate(samples, update, share.version, tally)
            grad_norm, skipped = self._update(lr)
            norms.append(grad_norm)
            if skipped:
                break
        metrics = tally.metrics(self._all_sum, self._all_max)
        metrics["actor/pg_loss"] /= len(norms)
        metrics |= {
            "actor/grad_norm": fmean(norms),
            "actor/nonfinite_grads": float(skipped),
            "actor/lr": lr,
            "actor/updates": float(len(norms) - skipped),
        }
        if skipped:
            metrics = _finite(metrics)
            log.warning(
                "update %d of %d in the step of version %d was skipped, not finite: %s",
                len(norms),
                len(updates),
                share.version,
                metrics,
            )
        return StepResult(skipped and len(norms) == 1, metrics, time.perf_counter() - start)

    def accumulate(self, share: RankStep) -> Tally:
        """Forward and backward over all micro-batches: leaves the step's gradient; collective."""
        tally = Tally(self._device)
        self._accumulate(self._with_advantages(share.samples), share.whole, share.version, tally)
        return tally

    def _accumulate(
        self, samples: Sequence[TrainSample], update: MiniBatch, version: int, tally: Tally
    ) -> None:
        """The gradient of one optimizer update; collective."""
        counts = StepCounts(update.loss_tokens, update.sequences, self._length_norm)
        limit = self._limit(samples, update, version) if self._objective.needs_preview else None
        last = len(update.micro_batches) - 1
        for i, rows in enumerate(update.micro_batches):
            batch = self._collate([samples[row] for row in rows], version)
            self._engine.set_gradient_accumulation_boundary(i == last)
            logits = self._logits(batch)
            loss = self._objective(logits, batch, counts, tally, limit)
            self._engine.backward(loss * self._world_size)

    def _collate(self, samples: Sequence[TrainSample], version: int) -> MicroBatch:
        return collate(samples, version, self._device, self._settings.layout)

    def _logits(self, batch: MicroBatch) -> Tensor:
        """(N, V); collective."""
        return selected_logits(self._engine, batch.input_ids, batch.positions, batch.position_ids)

    def _with_advantages(self, samples: tuple[TrainSample, ...]) -> tuple[TrainSample, ...]:
        """The samples with what the learner has to add to their advantages; collective."""
        if self._user_advantage is not None:
            return from_user(samples, self._user_advantage)
        return batch_wide(samples, self._advantage, self._gamma, self._all_sum, self._device)

    @torch.no_grad()
    def _with_proximal(self, samples: tuple[TrainSample, ...], share: RankStep) -> tuple[TrainSample, ...]:
        """The samples with the log-probs of the policy as it is now; collective."""
        found = list(samples)
        for rows in share.micro_batches:
            batch = self._collate([samples[row] for row in rows], share.version)
            logits = self._logits(batch)
            logprobs = self._objective.logprobs(logits, batch).to("cpu", torch.float32).numpy()  # (B, T)
            for row, of_row in zip(rows, logprobs, strict=False):
                length = len(samples[row].trajectory.token_ids)
                found[row] = replace(samples[row], proximal=of_row[:length])
        return tuple(found)

    @torch.no_grad()
    def _limit(self, samples: Sequence[TrainSample], update: MiniBatch, version: int) -> Tensor:
        """What a loss that looks at all tokens of an update has to know of them; collective."""
        previews = []
        for rows in update.micro_batches:
            batch = self._collate([samples[row] for row in rows], version)
            logits = self._logits(batch)
            previews.append(self._objective.preview(logits, batch))
        return self._objective.limit(self._all_gather(torch.cat(previews)))

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Float32Array:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(len(ids) - 1, device=self._device)
        logits = selected_logits(self._engine, ids[None, :-1], positions)
        logprobs, _ = token_logprobs(logits, ids[1:], 1.0)
        found: Float32Array = logprobs.float().cpu().numpy()
        return found

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters in the compute dtype; each is valid until the next is asked for."""
        for name, parameter in self._parameters.items():
            with self._gathered([parameter]):
                yield name, parameter.detach()

    def gather_bucket(self, bucket: Sequence[TensorSpec]) -> Tensor | None:
        if self._settings.zero_stage < 3 and self._rank != 0:
            return None
        parameters = [self._parameters[spec.name] for spec in bucket]
        with self._gathered(parameters):
            if self._rank != 0:
                return None
            dtype = getattr(torch, bucket[0].dtype)
            # A copy: the next update may run before the last of it is on the wire.
            return torch.cat([p.detach().reshape(-1).to(dtype) for p in parameters])

    def shards(self, bucket: Sequence[TensorSpec]) -> list[Tensor]:
        parameters: list[Any] = [self._parameters[spec.name] for spec in bucket]
        if self._settings.zero_stage == 3:
            return [p.ds_tensor.detach() for p in parameters]
        return [p.detach().view(-1) for p in parameters] if self._rank == 0 else []

    def checksum(self) -> str:
        """Checksum of the full parameters; collective for ZeRO-3, the same on every rank."""
        return state_checksum(self.named_parameters())

    def export(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if self._rank == 0:
                state[name] = parameter.to("cpu", copy=True)
        if self._rank != 0:
            return
        trust = self._model_section.trust_remote_code
        self._engine.module.save_pretrained(folder, state_dict=state)
        AutoTokenizer.from_pretrained(self._model_path, trust_remote_code=trust).save_pretrained(folder)

    def close(self) -> None:
        """Leave the process group. Safe to call twice."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _check_staleness(self, share: RankStep) -> None:
        for sample in share.samples:
            trajectory = sample.trajectory
            for version in set(trajectory.versions[trajectory.loss_mask].tolist()):
                lag = token_lag(share.version, version)
                if not 0 <= lag <= self._max_staleness:
                    raise StalenessError(
                        f"sample {trajectory.sample} of ordinal {sample.ordinal} has a trained token of "
                        f"version {version}, lag {lag} in the update of version {share.version}, expected "
                        f"0 to schedule.max_staleness = {self._max_staleness}"
                    )

    def _update(self, lr: float) -> tuple[float, bool]:
        """Apply the accumulated gradient; returns its norm before clipping, and whether it was skipped."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._clips_itself:
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if not norm.isfinite():
                self._engine.zero_grad()
                return norm.item(), True
            parameters = self._engine.module.parameters()
            torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.max_grad_norm, norm)
            self._engine.step()
            return norm.item(), False
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), not self._engine.was_step_applied()

    @property
    def _clips_itself(self) -> bool:
        """Without ZeRO and in float32, DeepSpeed wraps the optimizer in nothing that checks it."""
        return self._settings.zero_stage == 0 and self._model_section.dtype == "float32"

    @contextmanager
    def _gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Whole parameters inside the block; collective for ZeRO-3, nothing to do below."""
        if self._settings.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def _pick_device(self) -> str:
        wanted = self._settings.device
        if wanted == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError("learner.device is cuda, but torch finds 0 CUDA devices: use auto or cpu")
        return wanted

    def _prepare_process(self) -> None:
        torch.set_num_threads(self._settings.threads)
        if self._device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)

    def _join_ranks(self) -> None:
        import deepspeed

        host, port = self._master
        timeout = timedelta(seconds=self._settings.start_timeout_s)
        # Bound by us to that one address: left to itself the store listens on every interface.
        listener = socket.create_server((host, port)).detach() if self._rank == 0 else None
        store = TCPStore(
            host,
            port,
            is_master=self._rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
            use_libuv=True,
        )
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        step_timeout = timedelta(seconds=self._settings.step_timeout_s)
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self._world_size, timeout=step_timeout
        )
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            # One visible device a rank: placement sees to that.
            LOCAL_RANK="0",
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
        # An all-reduce for inference that is compiled on first use, for a minute or more, and that
        # training never calls.
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)

    def _build_engine(self, model: nn.Module) -> Any:
        import deepspeed

        engine, _, _, _ = deepspeed.initialize(model=model, config=self._engine_config())
        return engine

    def _engine_config(self) -> dict[str, Any]:
        settings = self._settings
        bucket = min(_LARGEST_BUCKET, max(sum(spec.numel for spec in self._manifest), 1))
        config: dict[str, Any] = {
            "train_batch_size": self._world_size,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if self._clips_itself else settings.max_grad_norm,
            "steps_per_print": 2**60,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": settings.lr,
                    "betas": list(settings.betas),
                    "eps": settings.eps,
                    "weight_decay": settings.weight_decay,
                    "torch_adam": True,
                },
            },
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": settings.zero_stage,
                # Buffers of this many elements are allocated whole: no larger than the model.
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "overlap_comm": self._device.type == "cuda",
            },
        }
        if self._model_section.dtype == "bfloat16":
            config["bf16"] = {"enabled": True}
            # Micro-batches add up in float32, which DeepSpeed offers from stage 1 on.
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config["zero_optimization"]["stage"] = max(settings.zero_stage, 1)
        return config

    def _all_sum(self, values: Tensor) -> None:
        if self._world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)

    def _all_gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, (N,) each, any N: one tensor, padded with infinity."""
        if self._world_size == 1:
            return values
        longest = torch.tensor(len(values), device=self._device)
        self._all_max(longest)
        padded = values.new_full((int(longest),), torch.inf)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self._world_size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)

    def _all_max(self, values: Tensor) -> None:
        if self._world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)


def _finite(metrics: Metrics) -> Metrics:
    """Metrics without those that are not finite: a file of JSON has no way to write them."""
    return {name: value for name, value in metrics.items() if isfinite(value)}
