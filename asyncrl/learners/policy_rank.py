"""One learner rank, on any ``TrainingEngine``, on CPU (gloo) or CUDA (nccl).

The engine is what it shares with the critic; here is what is the policy's own.

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import GroupAdvantage
from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.algorithms.names import is_path
from asyncrl.algorithms.registry import user_advantage
from asyncrl.attention.shared_rows import use_shared_rows
from asyncrl.checkpoint.files import FileEntry
from asyncrl.checkpoint.state import REFERENCE
from asyncrl.config import AlgorithmSection, LearnerSection, ModelSection, ReferenceSection
from asyncrl.errors import InvariantError
from asyncrl.learners.advantages import batch_wide, from_user
from asyncrl.learners.base import LearnerInfo, MiniBatch, RankStep, StepResult, TrainSample, finite
from asyncrl.learners.collate import MicroBatch, collate
from asyncrl.learners.engines import make_engine
from asyncrl.learners.lora import LoraAdapter
from asyncrl.learners.masking import check_staleness, mask_stale
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.packed import require_exact_packing, require_exact_sharing
from asyncrl.learners.policy import load_policy, manifest_of, save_policy, select_at_head, selected_logits
from asyncrl.learners.preferences import Preferences
from asyncrl.learners.probe import Probe
from asyncrl.learners.resident import ResidentReference
from asyncrl.learners.schedule import learning_rate
from asyncrl.learners.sequence import SequenceParallel
from asyncrl.learners.weights import PolicyWeights
from asyncrl.types import Float32Array
from asyncrl.weight_sync.base import AdapterSpec, TensorSpec
from asyncrl.weight_sync.sharing import SharedModel
from asyncrl.weight_sync.verify import state_checksum

log = logging.getLogger(__name__)


class PolicyRank:
    """A ``LearnerRank``: every rank gets the same calls in the same order.

    ``master`` is host and port where the ranks meet; rank 0 listens there, on that address alone.
    ``total_steps`` is where the falling learning rate schedules end, ``length_norm`` the divisor of
    seq-mean-token-sum-norm in tokens, ``folder`` where users' own functions are looked up (default: the
    current one). ``reference``: where the reference is, if one is needed, and whether it follows the policy.
    ``push_adapters``: what travels is the adapters alone.
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
        reference: ReferenceSection | None = None,
        push_adapters: bool = False,
    ) -> None:
        self._model_section = model
        self._settings = learner
        self._set_algorithm(algorithm, temperature, max_staleness, folder or Path.cwd())
        self._length_norm = length_norm
        self._model_path = model_path
        self._max_staleness = max_staleness
        self._mask_stale = mask_stale
        self._reference_section = reference or ReferenceSection()
        self._resident: ResidentReference | None = None
        self._push_adapters = push_adapters
        self._total_steps = total_steps
        self._rank = rank
        self._engine = make_engine(
            learner,
            "learner",
            dtype=model.dtype,
            rank=rank,
            world_size=world_size,
            master=master,
            deterministic=deterministic,
            shared=learner.shared,
            tensor_parallel=learner.tensor_parallel,
        )
        self._device = self._engine.device
        self._adapter: LoraAdapter | None = None
        self._sequence: SequenceParallel | None = None

    def _set_algorithm(
        self, algorithm: AlgorithmSection, temperature: float, max_staleness: int, folder: Path
    ) -> None:
        self._objective = Objective(algorithm, temperature, max_staleness, folder)
        self._preferences = Preferences(algorithm) if algorithm.learns_from_pairs else None
        self._advantage = algorithm.advantage
        self._gamma, self._lambda = algorithm.gamma, algorithm.gae_lambda
        self._epochs = algorithm.epochs
        self._needs_reference = algorithm.needs_reference
        self._user_advantage: GroupAdvantage | None = None
        if is_path(algorithm.advantage):
            self._user_advantage = user_advantage(algorithm.advantage, folder)

    def start(self) -> LearnerInfo:
        """Meet the other ranks, load the model, build the engine; collective."""
        self._engine.prepare()
        model = load_policy(
            self._model_path,
            dtype=getattr(torch, self._model_section.dtype),
            trust_remote_code=self._model_section.trust_remote_code,
            checkpointing=self._settings.gradient_checkpointing,
            attention=None if self._settings.attention == "auto" else self._settings.attention,
        )
        if self._settings.shared_prompts:
            use_shared_rows(model)
        manifest = manifest_of(model)
        count = sum(spec.numel for spec in manifest)
        adapters: tuple[AdapterSpec, ...] = ()
        if self._settings.lora is not None:
            self._adapter = LoraAdapter(model, self._settings.lora)
            if self._push_adapters:
                manifest, adapters = self._adapter.manifest, self._adapter.specs
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._build(model)
        self._weights = PolicyWeights(self._engine, self._adapter, self._engine.tensors)
        reference = self._reference_section
        if reference.place == "learner" and self._needs_reference:
            self._resident = ResidentReference(self._engine, every=reference.refresh_every, ema=reference.ema)
        if self._settings.packing:
            require_exact_packing(self._engine, self._model_section.dtype, self._device)
        if self._settings.shared_prompts:
            require_exact_sharing(self._engine, self._model_section.dtype, self._device)
        log.info(
            "learner rank %d of %d: %d parameters, %d trained",
            self._rank,
            self._engine.world_size,
            count,
            trained,
        )
        return LearnerInfo(manifest=manifest, parameters=count, adapters=adapters)

    def _build(self, model: Any) -> None:
        """The engine over ``model``, whose work ranks may share; collective."""
        settings = self._settings
        probe = Probe(model) if settings.shared > 1 else None
        self._engine.build(model)
        if settings.sequence_parallel > 1:
            self._sequence = SequenceParallel(self._engine.sharing)
            self._sequence.install(model)
        if settings.tensor_parallel > 1:
            select_at_head(model)  # which may be another layer now
        if probe is not None:
            found = torch.from_numpy(self.score(probe.token_ids.tolist()))
            key = "sequence_parallel" if settings.sequence_parallel > 1 else "tensor_parallel"
            probe.require(found, f"learner.{key}", settings.shared, self._model_section.dtype)

    def step(self, share: RankStep) -> StepResult:
        start = time.perf_counter()
        if self._mask_stale:
            share = mask_stale(share, self._max_staleness)
        check_staleness(share, self._max_staleness)
        lr = learning_rate(
            share.version,
            peak=self._settings.lr,
            schedule=self._settings.lr_schedule,
            warmup_steps=self._settings.warmup_steps,
            total_steps=self._total_steps,
        )
        samples = self._with_reference(self._with_advantages(share), share)
        updates = (share.mini_batches or (share.whole,)) * self._epochs
        if len(updates) > 1:
            samples = self._with_logprobs("proximal", samples, share)
        tally, norms, skipped = Tally(self._device), [], False
        for update in updates:
            self._accumulate(samples, update, share, tally)
            grad_norm, skipped = self._engine.update(lr)
            norms.append(grad_norm)
            if skipped:
                break
        metrics = tally.metrics(self._engine.all_sum, self._engine.all_max)
        if self._resident is not None:
            metrics["reference/version"] = float(self._resident.version)
        for loss in metrics.keys() & {"actor/pg_loss", "actor/kl_loss"}:
            metrics[loss] /= len(norms)
        metrics |= {
            "actor/grad_norm": fmean(norms),
            "actor/nonfinite_grads": float(skipped),
            "actor/lr": lr,
            "actor/updates": float(len(norms) - skipped),
        }
        if skipped:
            metrics = finite(metrics)
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
        samples = self._with_reference(self._with_advantages(share), share)
        self._accumulate(samples, share.whole, share, tally)
        return tally

    def _accumulate(
        self, samples: Sequence[TrainSample], update: MiniBatch, share: RankStep, tally: Tally
    ) -> None:
        """The gradient of one optimizer update; collective."""
        version = share.version
        counts = StepCounts(update.loss_tokens, update.sequences, self._length_norm)
        if self._preferences is not None:
            samples, pairs = self._with_pair_weights(self._preferences, samples, update, version, tally)
            counts = replace(counts, sequences=pairs)
        limit = self._limit(samples, update, version) if self._objective.needs_preview else None
        last = len(update.micro_batches) - 1
        for i, rows in enumerate(update.micro_batches):
            batch = self._collate([samples[row] for row in rows], version)
            self._engine.accumulate(last=i == last)
            logits = self._logits(batch)
            loss = self._objective(logits, batch, counts, tally, limit, share.kl_coef)
            self._engine.backward(loss)

    def _collate(self, samples: Sequence[TrainSample], version: int) -> MicroBatch:
        batch = collate(samples, version, self._device, self._settings.layout)
        return batch if self._sequence is None else self._sequence.part_of(batch)

    def _logits(self, batch: MicroBatch) -> Tensor:
        """(N, V); collective."""
        return selected_logits(
            self._engine, batch.input_ids, batch.positions, batch.position_ids, batch.shared
        )

    def _with_advantages(self, share: RankStep) -> tuple[TrainSample, ...]:
        """The samples with what the learner has to add to their advantages; collective."""
        if self._preferences is not None:
            return share.samples
        if self._user_advantage is not None:
            return from_user(share.samples, self._user_advantage)
        return batch_wide(
            share.samples,
            self._advantage,
            self._gamma,
            self._engine.all_sum,
            self._device,
            lam=self._lambda,
            kl_coef=share.kl_coef,
        )

    @torch.no_grad()
    def _with_pair_weights(
        self,
        preferences: Preferences,
        samples: Sequence[TrainSample],
        update: MiniBatch,
        version: int,
        tally: Tally,
    ) -> tuple[Sequence[TrainSample], int]:
        """The samples with their weights as answers of pairs, and the pairs of all ranks; collective."""
        log_ratios = [torch.zeros(0, dtype=torch.float64, device=self._device)]
        for rows in update.micro_batches:
            batch = self._collate([samples[row] for row in rows], version)
            logits = self._logits(batch)
            of_rows = preferences.log_ratios(self._objective.logprobs(logits, batch), batch)
            log_ratios.append(of_rows[: len(rows)])
        members = [row for rows in update.micro_batches for row in rows]
        samples, sums = preferences.weigh(samples, members, torch.cat(log_ratios))
        tally.add(**sums)
        pairs = sums["pairs"].clone()
        self._engine.all_sum(pairs)
        return samples, int(pairs)

    def _with_reference(self, samples: tuple[TrainSample, ...], share: RankStep) -> tuple[TrainSample, ...]:
        """The samples with the reference's log-probs, where that is in this process; collective."""
        if not self._needs_reference or self._reference_section.place == "actors":
            return samples
        if self._resident is not None:
            self._resident.follow(share.version)
            reference = self._resident.held()
        else:
            assert self._adapter is not None
            reference = self._adapter.off()
        with reference:
            return self._with_logprobs("reference", samples, share)

    @torch.no_grad()
    def _with_logprobs(
        self, field: Literal["proximal", "reference"], samples: tuple[TrainSample, ...], share: RankStep
    ) -> tuple[TrainSample, ...]:
        """The samples with the log-probs of the model as it is now, in ``field``; collective."""
        found = list(samples)
        for rows in share.micro_batches:
            batch = self._collate([samples[row] for row in rows], share.version)
            logits = self._logits(batch)
            logprobs = self._objective.logprobs(logits, batch).to("cpu", torch.float32).numpy()  # (B, T)
            for row, of_row in zip(rows, logprobs, strict=False):
                own: dict[str, Any] = {field: of_row[: len(samples[row].trajectory.token_ids)]}
                found[row] = replace(samples[row], **own)
        return tuple(found)

    @torch.no_grad()
    def _limit(self, samples: Sequence[TrainSample], update: MiniBatch, version: int) -> Tensor:
        """What a loss that looks at all tokens of an update has to know of them; collective."""
        previews = []
        for rows in update.micro_batches:
            batch = self._collate([samples[row] for row in rows], version)
            logits = self._logits(batch)
            previews.append(self._objective.preview(logits, batch))
        return self._objective.limit(self._engine.all_gather(torch.cat(previews)))

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Float32Array:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(len(ids) - 1, device=self._device)
        if self._sequence is None:
            logits = selected_logits(self._engine, ids[None, :-1], positions)
            logprobs, _ = token_logprobs(logits, ids[1:], 1.0)
        else:
            logprobs = self._sequence.logprobs(self._engine, ids)
        found: Float32Array = logprobs.float().cpu().numpy()
        return found

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters in the compute dtype; each is valid until the next is asked for."""
        return self._weights.named()

    def gather_bucket(
        self, bucket: Sequence[TensorSpec], into: Tensor | None = None, *, everywhere: bool = False
    ) -> Tensor | None:
        return self._weights.bucket(bucket, into, everywhere=everywhere)

    def shards(self, bucket: Sequence[TensorSpec]) -> list[Tensor]:
        return self._weights.shards(bucket)

    def share(self) -> SharedModel:
        if self._engine.is_sharded or self._adapter is not None:
            raise InvariantError("asked to share weights that lie in parts: config checks refuse that")
        return SharedModel(self._engine.module)

    def offload(self) -> None:
        self._engine.offload()

    def reload(self) -> None:
        self._engine.reload()

    def checksum(self) -> str:
        """Checksum of the full parameters; collective, the same on every rank."""
        return state_checksum(self.named_parameters())

    def export(self, folder: Path) -> None:
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if self._rank == 0:
                state[name] = parameter.to("cpu", copy=True)
        if self._adapter is not None:
            self._weights.export_adapter(folder / "adapter")
        if self._rank != 0:
            return
        trust = self._model_section.trust_remote_code
        save_policy(folder, self._engine.module, state, self._model_path, trust_remote_code=trust)

    def copy_state(self, *, weights_only: bool = False) -> None:
        self._engine.copy_state(weights_only=weights_only)
        if self._resident is not None:
            self._resident.copy(nothing=weights_only)

    def write_state(self, folder: Path) -> list[FileEntry]:
        entries = self._engine.write_state(folder)
        if self._resident is not None:
            found = self._resident.write(folder / REFERENCE)
            entries += [replace(entry, path=f"{REFERENCE}/{entry.path}") for entry in found]
        return entries

    def load_state(self, folder: Path) -> None:
        self._engine.load_state(folder)
        if self._resident is not None:
            self._resident.load(folder / REFERENCE)

    def close(self) -> None:
        """Leave the process group. Safe to call twice."""
        self._engine.close()
