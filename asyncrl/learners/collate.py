"""Samples to the tensors of one micro-batch.

Shapes: B samples, R rows of L input positions, T response positions, N trained tokens of all samples, in
their order. R is B, unless several samples share a row.

Invariants:
- Rows are padded on the right and masked by length, never by token id: a pad token may well be EOS,
  and a sampled EOS is trained like any other token. Under causal attention no real token sees the
  padding, so that no attention mask is needed either.
- Samples that share a row are told apart by ``position_ids`` alone, which start at 0 with each of them
  and count up by 1 within it; a padding token is a sample of its own. Where they share a prompt too,
  ``shared`` tells them apart, and ``position_ids`` are those that each would have alone.
- ``positions`` name the inputs whose outputs predict trained tokens, and nothing else: logits are
  computed for those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncrl.attention.shared_rows import SharedRows
from asyncrl.errors import InvariantError
from asyncrl.learners.base import TrainSample
from asyncrl.learners.layout import Layout, Places, lay_out, lay_out_shared
from asyncrl.types import token_lags

if TYPE_CHECKING:
    from asyncrl.learners.sequence import Part


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """All on one device."""

    input_ids: Tensor  # (R, L) int64
    positions: Tensor  # (N,) int64, into the flattened (R * L,) inputs
    targets: Tensor  # (N,) int64, the trained tokens
    mask: Tensor  # (B, T) bool, N of them True
    behaviour: Tensor  # (B, T) float32, log b
    advantages: Tensor  # (B, 1) float32, or (B, T) where they differ from token to token
    fresh: Tensor  # (B, 1) bool, rows whose trained tokens are all of the current version
    ages: Tensor  # (B, T) int64, lag of each trained token; -1 outside the mask
    proximal: Tensor | None = None  # (B, T) float32, log p; None where p is the policy as it is
    reference: Tensor | None = None  # (B, T) float32, log-probs of the reference; None without one
    position_ids: Tensor | None = None  # (R, L) int64; None where every row is one sample
    shared: SharedRows | None = None  # which tokens of the rows see which; None where none share a prompt
    part: Part | None = None  # where ranks share the rows, whose columns the inputs are


def collate(
    samples: Sequence[TrainSample], version: int, device: torch.device, layout: Layout = "padded"
) -> MicroBatch:
    """No samples make a dummy: one row of one token with nothing to train.

    Raises InvariantError for an empty prompt: nothing would predict the first token.
    """
    trajectories = [sample.trajectory for sample in samples]
    for sample in samples:
        if len(sample.trajectory.prompt_ids) == 0:
            raise InvariantError(f"{_name(sample)} has a prompt of 0 tokens, expected at least 1")
    rows = max(len(samples), 1)
    places = _places(samples, layout)
    response = max((len(t.token_ids) for t in trajectories), default=1)
    # The last token of a sample predicts nothing that is trained, so it is no input.
    input_ids = np.zeros((places.rows, max(places.width - 1, 1)), np.int64)
    position_ids = None if layout == "padded" else np.zeros_like(input_ids)
    segments = np.full_like(input_ids, -1) if layout == "shared" else None
    mask = np.zeros((rows, response), np.bool_)
    behaviour = np.zeros((rows, response), np.float32)
    by_token = any(sample.token_advantages is not None for sample in samples)
    advantages = np.zeros((rows, response if by_token else 1), np.float32)
    fresh = np.zeros((rows, 1), np.bool_)
    ages = np.full((rows, response), -1, np.int64)
    moved_on = any(sample.proximal is not None for sample in samples)
    proximal = np.zeros((rows, response), np.float32) if moved_on else None
    referred = any(sample.reference is not None for sample in samples)
    reference = np.zeros((rows, response), np.float32) if referred else None
    positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [np.zeros(0, np.int64)]
    targets = [np.zeros(0, np.int64)]
    for row, (sample, t) in enumerate(zip(samples, trajectories, strict=True)):
        prompt, length = len(t.prompt_ids), len(t.token_ids)
        at, start = places.places[row]
        tokens = np.concatenate([t.prompt_ids, t.token_ids])
        columns = start + np.arange(len(tokens) - 1)
        if places.answers is not None:
            columns[prompt:] += places.answers[row] - prompt
        input_ids[at, columns] = tokens[:-1]
        if position_ids is not None:
            position_ids[at, columns] = np.arange(len(tokens) - 1)
        if segments is not None:
            segments[at, columns[:prompt]] = 0
            segments[at, columns[prompt:]] = row + 1
        mask[row, :length] = t.loss_mask
        behaviour[row, :length] = t.logprobs
        if sample.token_advantages is None:
            advantages[row] = sample.advantage
        else:
            advantages[row, :length] = sample.token_advantages
        if proximal is not None:
            proximal[row, :length] = sample.proximal
        if reference is not None:
            reference[row, :length] = sample.reference
        # What follows a masked token was sampled with keys and values of an older version.
        fresh[row] = not sample.masked and bool(np.all(t.versions[t.loss_mask] == version))
        trained = np.flatnonzero(t.loss_mask)
        positions.append(at * input_ids.shape[1] + columns[prompt - 1 + trained])
        targets.append(t.token_ids[trained].astype(np.int64))
        ages[row, trained] = token_lags(version, t.versions[trained])

    def to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        input_ids=to_device(input_ids),
        positions=to_device(np.concatenate(positions)),
        targets=to_device(np.concatenate(targets)),
        mask=to_device(mask),
        behaviour=to_device(behaviour),
        advantages=to_device(advantages),
        fresh=to_device(fresh),
        ages=to_device(ages),
        proximal=None if proximal is None else to_device(proximal),
        reference=None if reference is None else to_device(reference),
        position_ids=None if position_ids is None else to_device(position_ids),
        shared=None if segments is None else SharedRows.of(segments, device),
    )


def _places(samples: Sequence[TrainSample], layout: Layout) -> Places:
    prompts = [len(s.trajectory.prompt_ids) for s in samples]
    answers = [len(s.trajectory.token_ids) for s in samples]
    if layout == "shared":
        keys = [(s.ordinal, s.trajectory.prompt_ids.tobytes()) for s in samples]
        return lay_out_shared(keys, prompts, answers)
    return lay_out([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], layout)


def _name(sample: TrainSample) -> str:
    return f"sample {sample.trajectory.sample} of ordinal {sample.ordinal}"
