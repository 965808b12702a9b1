"""The warm start: a short supervised training, so that RL finds some right answers to reinforce.

Invariants:
- The loss covers the target and the EOS after it, never the prompt or the padding.
- Loss and accuracy are measured on a fixed sample of the training prompts, because those are what RL
  will sample on: with few prompts, memory counts as skill, as it does for RL.
- Equal seeds, examples and thread counts give equal weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from asyncrl.config import WarmStartSection
from asyncrl.models.progress import ProgressCallback, WarmStartProgress

PROBE_PROMPTS = 128
PROBE_EVERY = 10
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer that follows it, EOS included, as token ids."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


def warm_start(
    model: PreTrainedModel,
    examples: Sequence[Example],
    section: WarmStartSection,
    *,
    seed: int,
    pad_id: int,
    progress: ProgressCallback,
) -> WarmStartProgress:
    """Train ``model`` in place on ``examples`` until ``section.steps`` or ``section.target``.

    Uses every core that this process may run on. Reports to ``progress`` each tenth update and after
    the last, and returns that last report. Raises ValueError without examples.
    """
    if not examples:
        raise ValueError("found no examples; expected at least 1")
    order = torch.Generator().manual_seed(seed)
    probe = collate(_one_per_prompt(examples, PROBE_PROMPTS, order), pad_id)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=section.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    warmup = max(1, min(20, section.steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warmup, 1.0 - done / section.steps)
    )
    batches = _batches(examples, section.batch_size, order)
    model.train()
    with _all_cores():
        report = WarmStartProgress(0, section.steps, *evaluate(model, *probe))
        progress(report)
        for step in range(1, section.steps + 1):
            inputs, labels = collate(next(batches), pad_id)
            loss = _target_nll(model, inputs, labels).sum() / (labels != IGNORED).sum()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % PROBE_EVERY and step < section.steps:
                continue
            report = WarmStartProgress(step, section.steps, *evaluate(model, *probe))
            progress(report)
            if section.target is not None and report.accuracy >= section.target:
                break
    model.eval()
    return report


def collate(examples: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, both (B, T): padded on the right, labels -100 outside the target."""
    width = max(len(e.prompt_ids) + len(e.target_ids) for e in examples)
    inputs = torch.full((len(examples), width), pad_id)
    labels = torch.full((len(examples), width), IGNORED)
    for row, example in enumerate(examples):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.target_ids)
        inputs[row, :end] = torch.tensor(example.prompt_ids + example.target_ids)
        labels[row, start:end] = inputs[row, start:end]
    return inputs, labels


@torch.no_grad()
def evaluate(model: PreTrainedModel, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Loss in nats a target token, and the mean probability of a whole target.

    The second is the exact-match rate that sampling at temperature 1 has on average, with no sampling.
    """
    nll = _target_nll(model, inputs, labels)  # (B, T-1)
    return float(nll.sum() / (labels != IGNORED).sum()), float(nll.sum(dim=1).neg().exp().mean())


def _target_nll(model: PreTrainedModel, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each label, (B, T-1); 0 where the label is -100."""
    # Padding is on the right and attention is causal, so no target attends to it: no mask is needed.
    logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]  # (B, T-1, V)
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")


def _one_per_prompt(examples: Sequence[Example], most: int, order: torch.Generator) -> list[Example]:
    """One example each of up to ``most`` distinct prompts, drawn at random."""
    distinct = list({example.prompt_ids: example for example in examples}.values())
    return [distinct[i] for i in torch.randperm(len(distinct), generator=order)[:most].tolist()]


def _batches(examples: Sequence[Example], size: int, order: torch.Generator) -> Iterator[list[Example]]:
    """Batches for ever: each epoch in another order, the rest of an epoch joined to the next."""
    queue: list[int] = []
    while True:
        while len(queue) < size:
            queue += torch.randperm(len(examples), generator=order).tolist()
        yield [examples[i] for i in queue[:size]]
        del queue[:size]


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let torch use every core that this process may run on, for as long as the block lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
