"""The reference policy: a model that gives the sampled tokens' log-probs, group by group.

Invariants:
- Log-probs are those of the learner's forward pass at ``rollout.temperature``: with equal weights the KL is
  0 up to rounding.
- A group's numbers depend on that group alone, to the bit: it is computed in micro-batches of its own.
- Nothing here has a gradient. The weights change only where they are told to follow the policy's, between
  two groups, and each group's findings name the version that they were computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.kl import KL_ESTIMATORS, KLEstimator
from asyncrl.algorithms.logprobs import token_logprobs
from asyncrl.checkpoint.files import FileEntry
from asyncrl.errors import ConfigError
from asyncrl.learners.base import TrainSample
from asyncrl.learners.collate import MicroBatch, collate
from asyncrl.learners.policy import load_policy, selected_logits
from asyncrl.roles.base import Findings, Received
from asyncrl.roles.following import FollowingWeights
from asyncrl.types import Float32Array, Group
from asyncrl.weight_sync.base import PushGroupSpec

Wanted = Literal["reference", "penalty", "token_penalty"]
"""What a run needs of the reference: the tokens' log-probs (KL in the loss, pairs), the KL of each answer
(in the reward), or that and the KL of each token (in rewards by token)."""


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """What a ``ReferencePolicy`` is made of."""

    path: str
    """Hugging Face folder or name."""
    dtype: str
    device: Literal["auto", "cpu", "cuda"]
    threads: int
    temperature: float
    micro_batch_tokens: int
    wanted: Wanted
    kl_form: str
    """Name of the KL's estimator, for penalties."""
    trust_remote_code: bool = False


class ReferencePolicy:
    """A ``FollowingWorker``. Its scalar ``kl`` is the KL of each answer, summed over its trained tokens.

    That KL is of the policy that sampled, by the log-probs that came with the tokens.
    """

    def __init__(self, settings: ReferenceSettings) -> None:
        self._settings = settings
        self._device = torch.device(_device(settings.device))
        self._estimator: KLEstimator = KL_ESTIMATORS[settings.kl_form]
        self._model: Any = None
        self._weights: FollowingWeights | None = None

    def start(self) -> None:
        if self._device.type == "cpu":
            torch.set_num_threads(self._settings.threads)
        model = load_policy(
            self._settings.path,
            dtype=getattr(torch, self._settings.dtype),
            trust_remote_code=self._settings.trust_remote_code,
            checkpointing=False,
        )
        self._model = model.requires_grad_(False).to(self._device)
        self._weights = FollowingWeights(self._model)

    def annotate(self, group: Group) -> Findings:
        lengths = [len(t.token_ids) for t in group.trajectories]
        logprobs = [np.zeros(n, np.float32) for n in lengths]
        penalties = [np.zeros(n, np.float32) for n in lengths]
        totals = [0.0] * len(lengths)
        for rows in self._micro_batches(group):
            samples = [TrainSample(group.ordinal, group.trajectories[row], 0.0) for row in rows]
            batch = collate(samples, group.start_version, self._device)
            reference = self._logprobs(batch)  # (B, T)
            kl = self._estimator(batch.behaviour.double(), reference.double(), batch.mask)  # (B, T)
            for i, row in enumerate(rows):
                logprobs[row] = _of_row(reference, i, lengths[row])
                penalties[row] = _of_row(kl, i, lengths[row])
                totals[row] = float(kl[i].sum())
        version = self._following.version
        if self._settings.wanted == "reference":
            return Findings({"reference": logprobs}, reference_version=version)
        arrays = {"kl": penalties} if self._settings.wanted == "token_penalty" else {}
        return Findings(arrays, {"kl": tuple(totals)}, version)

    def join(self, spec: PushGroupSpec) -> None:
        self._following.join(spec)

    def receive(self, version: int) -> Received:
        return self._following.receive(version)

    def take(self, version: int, decay: float) -> None:
        self._following.take(version, decay)

    def copy_state(self) -> None:
        self._following.copy_state()

    def write_state(self, folder: Path) -> list[FileEntry]:
        return self._following.write_state(folder)

    def load_state(self, folder: Path, version: int) -> None:
        self._following.load_state(folder, version)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.leave()
        self._model = self._weights = None

    @property
    def _following(self) -> FollowingWeights:
        assert self._weights is not None, "start() comes first"
        return self._weights

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs of the trained tokens, 0 elsewhere, (B, T)."""
        logits = selected_logits(self._model, batch.input_ids, batch.positions)  # (N, V)
        flat, _ = token_logprobs(logits, batch.targets, self._settings.temperature)  # (N,)
        return flat.new_zeros(batch.mask.shape).masked_scatter(batch.mask, flat)

    def _micro_batches(self, group: Group) -> list[list[int]]:
        """Trajectories with a trained token, longest first, rows * longest row within the budget."""
        length = {
            row: len(t.prompt_ids) + len(t.token_ids)
            for row, t in enumerate(group.trajectories)
            if t.loss_mask.any()
        }
        order = sorted(length, key=lambda row: (-length[row], row))
        found, start = [], 0
        while start < len(order):
            rows = max(self._settings.micro_batch_tokens // length[order[start]], 1)
            found.append(order[start : start + rows])
            start += rows
        return found


def _of_row(values: Tensor, row: int, length: int) -> Float32Array:
    array: Float32Array = values[row, :length].to("cpu", torch.float32).numpy()
    return array


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("reference.device is cuda, but torch finds 0 CUDA devices: use auto or cpu")
    return wanted
