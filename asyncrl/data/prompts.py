"""What a run trains on and what it is measured on, split by prompt text and counted.

Invariants:
- No prompt, by its rendered text, is both in training and in evaluation.
- Every row is accounted for: rows = trainable + over-long dropped + held for evaluation.
- Which prompts are held out depends on the data and ``data.eval.seed`` alone, never on ``run.seed``,
  so that runs with different seeds are measured on the same questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncrl.config import Config, DataSection
from asyncrl.data.sources import Rows, open_source
from asyncrl.data.stream import Indices, PromptStream, permutation
from asyncrl.data.templates import PromptTemplate, prompt_key
from asyncrl.errors import DataError
from asyncrl.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_ROWS = 1000


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Where the rows went."""

    train_rows: int
    """Rows of the training source."""
    trainable: int
    """Rows in an epoch."""
    over_long: int
    """Training rows over ``data.max_prompt_tokens``: dropped or truncated, as ``policy`` says."""
    held_for_eval: int
    """Training rows removed because their text is in evaluation."""
    longest_prompt: int
    """Tokens of the longest prompt that is trained on."""
    eval_prompts: int
    eval_over_long: int
    policy: str

    def __str__(self) -> str:
        over = {"drop": "dropped", "truncate_left": "truncated"}.get(self.policy, self.policy)
        text = (
            f"{self.trainable} of {self.train_rows} rows to train on; {self.over_long} over-long {over}, "
            f"{self.held_for_eval} held for evaluation; longest prompt {self.longest_prompt} tokens"
        )
        return text + (
            f"; {self.eval_prompts} prompts to evaluate on, {self.eval_over_long} over-long {over}"
        )


@dataclass(frozen=True, slots=True)
class Prompts:
    """A run's data. ``eval`` has ordinals of its own, from 0; it is empty without ``data.eval``."""

    train: PromptStream
    eval: tuple[Task, ...]
    report: PromptReport


@dataclass(frozen=True, slots=True)
class _Scan:
    """One pass over a source: what the split needs to know of each row."""

    tokens: npt.NDArray[np.int32]  # (rows,)
    texts: npt.NDArray[np.uint64]  # (rows,) 64-bit digest of the rendered text


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path | None = None) -> Prompts:
    """Open, render and measure all rows once, and split them.

    Relative paths are taken from ``folder`` (default: the current one). Texts are not kept: a task's
    text and ids are made when it is asked for. Raises DataError for data that cannot be read, lacks
    a column, is empty, or is over-long where ``data.over_long`` is error.
    """
    folder = folder or Path.cwd()
    data = config.data
    rows = open_source(data.train, folder)
    template = _template(data, tokenizer, rows, "data.train")
    scan = _scan(rows, template)
    fitting = _fitting(scan, data, rows, "data.train")
    eval_over_long = 0
    if data.eval is None:
        eval_rows, eval_template, eval_indices = rows, template, np.empty(0, np.int64)
        held = np.zeros(len(rows), np.bool_)
    elif data.eval.holdout is not None:
        eval_rows, eval_template = rows, template
        eval_indices = _hold_out(scan, fitting, data.eval.holdout, data.eval.seed)
        held = np.isin(scan.texts, scan.texts[eval_indices])
    else:
        eval_rows = open_source(data.eval, folder)
        eval_template = _template(data, tokenizer, eval_rows, "data.eval")
        eval_scan = _scan(eval_rows, eval_template)
        eval_indices = _fitting(eval_scan, data, eval_rows, "data.eval")
        eval_over_long = int((eval_scan.tokens > data.max_prompt_tokens).sum())
        held = np.isin(scan.texts, eval_scan.texts)
    train_indices = fitting[~held[fitting]]
    if len(train_indices) == 0:
        raise DataError(
            f"data.train: found {len(rows)} rows, of which {len(rows) - len(fitting)} are over-long and "
            f"{int(held[fitting].sum())} have a prompt that is in data.eval; expected at least 1 row that is "
            "neither"
        )
    eval_indices = eval_indices[: config.eval.max_prompts]
    held_out = (
        PromptStream(
            eval_rows,
            eval_template,
            eval_indices,
            name="eval",
            max_prompt_tokens=data.max_prompt_tokens,
            seed=0,
            shuffle=False,
        )
        if len(eval_indices)
        else None
    )
    train = PromptStream(
        rows,
        template,
        train_indices,
        name="train",
        max_prompt_tokens=data.max_prompt_tokens,
        seed=config.run.seed,
        shuffle=data.shuffle,
        fingerprint=_fingerprint(scan.texts[train_indices], data),
    )
    report = PromptReport(
        train_rows=len(rows),
        trainable=len(train_indices),
        over_long=int((scan.tokens > data.max_prompt_tokens).sum()),
        held_for_eval=int(held[fitting].sum()),
        longest_prompt=min(int(scan.tokens[train_indices].max()), data.max_prompt_tokens),
        eval_prompts=len(eval_indices),
        eval_over_long=eval_over_long,
        policy=data.over_long,
    )
    eval_tasks = tuple(held_out.task(i) for i in range(len(held_out))) if held_out is not None else ()
    return Prompts(train, eval_tasks, report)


def _fingerprint(texts: npt.NDArray[np.uint64], data: DataSection) -> str:
    """Of the prompts in an epoch, in their order, and of what is made of them."""
    digest = blake2b(texts.astype("<u8").tobytes(), digest_size=16)
    digest.update(f"{data.shuffle}|{data.max_prompt_tokens}".encode())
    return digest.hexdigest()


def _template(data: DataSection, tokenizer: PreTrainedTokenizerBase, rows: Rows, key: str) -> PromptTemplate:
    try:
        return PromptTemplate(data, tokenizer, prompt_key(data, list(rows[0])))
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _scan(rows: Rows, template: PromptTemplate) -> _Scan:
    tokens = np.empty(len(rows), np.int32)
    texts = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _BATCH_ROWS):
        indices = range(start, min(start + _BATCH_ROWS, len(rows)))
        batch = [template.text(rows[i], rows.where(i)) for i in indices]
        for i, text, ids in zip(indices, batch, template.encode(batch), strict=True):
            if not ids:
                raise DataError(f"{rows.where(i)}: found an empty prompt; expected at least 1 token")
            tokens[i] = len(ids)
            texts[i] = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
    return _Scan(tokens, texts)


def _fitting(scan: _Scan, data: DataSection, rows: Rows, key: str) -> Indices:
    """Indices of the rows that the policy for over-long prompts lets through."""
    over = np.flatnonzero(scan.tokens > data.max_prompt_tokens)
    if data.over_long == "truncate_left" or len(over) == 0:
        return np.arange(len(rows), dtype=np.int64)
    if data.over_long == "error":
        first = int(over[0])
        raise DataError(
            f"{key}: found {len(over)} of {len(rows)} prompts over data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}, the first at {rows.where(first)} with {scan.tokens[first]} tokens, "
            f"the longest with {scan.tokens.max()}; expected none, as data.over_long is error: raise "
            "data.max_prompt_tokens, or set data.over_long to drop or truncate_left"
        )
    if len(over) == len(rows):
        raise DataError(
            f"{key}: found all {len(rows)} prompts over data.max_prompt_tokens = {data.max_prompt_tokens}, "
            f"the shortest with {scan.tokens.min()} tokens; expected at least 1 that fits: raise "
            "data.max_prompt_tokens"
        )
    return np.flatnonzero(scan.tokens <= data.max_prompt_tokens).astype(np.int64)


def _hold_out(scan: _Scan, fitting: Indices, wanted: int, seed: int) -> Indices:
    """Indices of one row for each of ``wanted`` distinct texts, in an order drawn from ``seed``."""
    drawn = fitting[permutation(len(fitting), seed, 0)]
    _, first = np.unique(scan.texts[drawn], return_index=True)
    if wanted >= len(first):
        raise DataError(
            f"data.eval.holdout: found {wanted}, with {len(first)} distinct prompts in data.train; expected "
            f"at most {len(first) - 1}, so that something is left to train on"
        )
    chosen: Indices = drawn[np.sort(first)[:wanted]]
    return chosen
