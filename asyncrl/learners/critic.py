"""One rank of the critic, on any engine: values of groups as they land, and updates towards their returns.

Invariants:
- A value V(t) is that of the state before token t is sampled; there is one for every trained token, and 0
  stands elsewhere.
- Returns are unwhitened advantages + V_old, with the values that the group was given when it landed: the
  same that the policy's advantages are made from, and what the clip is taken to.
- The gradient is that of the value loss over the whole update, whatever the micro-batches and ranks.
- An update that is not finite is skipped, and so are those that would follow it in the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import AGGREGATIONS, StepCounts
from asyncrl.algorithms.values import clipped_value_loss, explained_variance
from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import AlgorithmSection, CriticSection, ModelSection
from asyncrl.learners.advantages import Estimates, gae_estimates
from asyncrl.learners.base import MiniBatch, RankStep, StepResult, TrainSample, finite
from asyncrl.learners.collate import MicroBatch, collate
from asyncrl.learners.engines import make_engine
from asyncrl.learners.masking import check_staleness, mask_stale
from asyncrl.learners.packing import pack_rows
from asyncrl.learners.value import load_value_model
from asyncrl.roles.base import Findings
from asyncrl.types import Group

log = logging.getLogger(__name__)

_SUMS = ("loss", "tokens", "clipped", "values")
"""What is added up over the micro-batches of a step."""


class CriticRank:
    """A ``RoleWorker`` that also trains: every rank gets the same ``step`` calls in the same order.

    ``annotate`` is a call of one rank alone, and a collective one where parameters are sharded. ``master`` is
    host and port where the ranks meet, ``length_norm`` the divisor of seq-mean-token-sum-norm in tokens.
    """

    def __init__(
        self,
        *,
        model: ModelSection,
        critic: CriticSection,
        algorithm: AlgorithmSection,
        model_path: str,
        max_staleness: int,
        mask_stale: bool = False,
        rank: int = 0,
        world_size: int = 1,
        master: tuple[str, int],
        deterministic: bool = False,
        length_norm: float = 1.0,
    ) -> None:
        self._model_section = model
        self._settings = critic
        self._model_path = model_path
        self._max_staleness = max_staleness
        self._mask_stale = mask_stale
        self._length_norm = length_norm
        self._gamma, self._lambda = algorithm.gamma, algorithm.gae_lambda
        self._epochs = algorithm.epochs
        self._aggregate = AGGREGATIONS[algorithm.aggregation]
        self._engine = make_engine(
            critic,
            "critic",
            dtype=model.dtype,
            rank=rank,
            world_size=world_size,
            master=master,
            deterministic=deterministic,
        )

    def start(self) -> None:
        """Load the model, meet the other ranks, build the engine; collective."""
        engine = self._engine
        engine.prepare()
        model = load_value_model(
            self._model_path,
            dtype=getattr(torch, self._model_section.dtype),
            trust_remote_code=self._model_section.trust_remote_code,
            checkpointing=self._settings.gradient_checkpointing,
        )
        count = sum(p.numel() for p in model.parameters())
        engine.build(model)
        log.info("critic rank %d of %d: %d parameters", engine.rank, engine.world_size, count)

    @torch.no_grad()
    def annotate(self, group: Group) -> Findings:
        """The values of the group's trained tokens, by the weights of now."""
        engine, samples = self._engine, [TrainSample(group.ordinal, t, 0.0) for t in group.trajectories]
        lengths = [len(t.prompt_ids) + len(t.token_ids) for t in group.trajectories]
        packed = pack_rows(lengths, self._settings.micro_batch_tokens, section="critic")
        if engine.is_sharded:
            # All ranks work on the group together, one micro-batch each at a time.
            packed += ((),) * (-len(packed) % engine.world_size)
            packed = packed[engine.rank :: engine.world_size]
        found = torch.zeros(
            len(samples), max((len(t.token_ids) for t in group.trajectories), default=0), device=engine.device
        )
        for rows in packed:
            batch = collate([samples[row] for row in rows], 0, engine.device)
            values, _ = self._values(batch)
            if rows:
                found[list(rows), : values.shape[1]] = values
        if engine.is_sharded:
            engine.all_sum(found)
        by_row = found.cpu().numpy()  # (B, T)
        return Findings({"values": [by_row[i, : len(t.token_ids)] for i, t in enumerate(group.trajectories)]})

    def step(self, share: RankStep) -> StepResult:
        """Every optimizer update of one step; collective. Metrics are reduced over ranks.

        Raises StalenessError if any trained token is older than max_staleness.
        """
        start = time.perf_counter()
        if self._mask_stale:
            share = mask_stale(share, self._max_staleness)
        check_staleness(share, self._max_staleness)
        engine, lr = self._engine, self._settings.lr
        estimates = gae_estimates(share.samples, self._gamma, self._lambda, share.kl_coef)
        explained = explained_variance(
            estimates.values.to(engine.device),
            estimates.returns.to(engine.device),
            estimates.mask.to(engine.device),
            engine.all_sum,
        )
        updates = (share.mini_batches or (share.whole,)) * self._epochs
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=engine.device)
        norms, skipped = [], False
        for update in updates:
            sums += self._accumulate(share.samples, estimates, update, share.version)
            norm, skipped = engine.update(lr)
            norms.append(norm)
            if skipped:
                break
        engine.all_sum(sums)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        tokens = max(total["tokens"], 1.0)
        metrics = {
            "critic/vf_loss": total["loss"] / len(norms),
            "critic/vf_clipfrac": total["clipped"] / tokens,
            "critic/vpred_mean": total["values"] / tokens,
            "critic/explained_variance": explained,
            "critic/grad_norm": fmean(norms),
            "critic/nonfinite_grads": float(skipped),
            "critic/lr": lr,
        }
        if skipped:
            log.warning(
                "critic update %d of %d in the step of version %d was skipped, not finite: %s",
                len(norms),
                len(updates),
                share.version,
                metrics,
            )
        return StepResult(skipped and len(norms) == 1, finite(metrics), time.perf_counter() - start)

    def accumulate(self, share: RankStep) -> None:
        """Forward and backward over all micro-batches: leaves the step's gradient; collective."""
        estimates = gae_estimates(share.samples, self._gamma, self._lambda, share.kl_coef)
        self._accumulate(share.samples, estimates, share.whole, share.version)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters in the compute dtype; each is valid until the next is asked for."""
        for name, parameter in self._engine.module.named_parameters():
            with self._engine.gathered([parameter]) as (whole,):
                yield name, whole

    def copy_state(self) -> None:
        self._engine.copy_state()

    def write_state(self, folder: Path) -> list[FileEntry]:
        return self._engine.write_state(folder)

    def load_state(self, folder: Path) -> None:
        self._engine.load_state(folder)

    def close(self) -> None:
        """Leave the process group. Safe to call twice."""
        self._engine.close()

    def _accumulate(
        self, samples: Sequence[TrainSample], estimates: Estimates, update: MiniBatch, version: int
    ) -> Tensor:
        """The gradient of one optimizer update; collective. Returns this rank's ``_SUMS``."""
        engine = self._engine
        counts = StepCounts(update.loss_tokens, update.sequences, self._length_norm)
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=engine.device)
        last = len(update.micro_batches) - 1
        for i, rows in enumerate(update.micro_batches):
            batch = collate([samples[row] for row in rows], version, engine.device)
            engine.accumulate(last=i == last)
            values, flat = self._values(batch)
            width, picked = values.shape[1], list(rows)
            old, returns = values.new_zeros(values.shape), values.new_zeros(values.shape)
            if rows:
                old.copy_(estimates.values[picked, :width])
                returns.copy_(estimates.returns[picked, :width])
            result = clipped_value_loss(values, old, returns, batch.mask, self._settings.value_clip)
            loss = self._aggregate(result.loss, batch.mask, counts)
            own = (loss, batch.mask.sum(), result.clipped.sum(), values.sum())
            sums += torch.stack([part.detach().double() for part in own])
            # 0 times a finite loss adds nothing; 0 times another is NaN, and so is every gradient then.
            engine.backward(loss + flat.sum() * (loss.detach() * 0.0))
        return sums

    def _values(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Values (B, T), 0 outside the mask, and those of the N trained tokens alone."""
        flat: Tensor = self._engine(input_ids=batch.input_ids, positions=batch.positions)  # (N,)
        return flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat), flat
