"""What a run trains on and what it is measured on, split by prompt text and counted.

Invariants:
- No prompt, by its rendered text, is both in training and in evaluation.
- Every row is accounted for: rows = trainable + over-long dropped + held for evaluation.
- Which prompts are held out depends on the data and ``data.eval.seed`` alone, never on ``run.seed``,
  so that runs with different seeds are measured on the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncrl.config import Config, DataSection
from asyncrl.data.order import EpochOrder, Indices, Order, WeightedOrder, permutation
from asyncrl.data.rendered import RenderedRows, open_rendered
from asyncrl.data.stream import PromptStream
from asyncrl.environments.forms import tool_schemas
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
    """Those of named sets included."""
    eval_over_long: int
    policy: str
    recognised: tuple[str, ...] = ()
    """A line for each source: the form that its rows were taken for."""

    def __str__(self) -> str:
        over = {"drop": "dropped", "truncate_left": "truncated"}.get(self.policy, self.policy)
        text = (
            f"{self.trainable} of {self.train_rows} rows to train on; {self.over_long} over-long {over}, "
            f"{self.held_for_eval} held for evaluation; longest prompt {self.longest_prompt} tokens"
        )
        text += f"; {self.eval_prompts} prompts to evaluate on, {self.eval_over_long} over-long {over}"
        return "\n".join([text, *self.recognised])


@dataclass(frozen=True, slots=True)
class Prompts:
    """A run's data. Tasks to evaluate on have ordinals of their own, from 0, through all sets."""

    train: PromptStream
    eval: tuple[Task, ...]
    """Of ``data.eval``; empty without it."""
    report: PromptReport
    eval_sets: Mapping[str, tuple[Task, ...]] = field(default_factory=dict)
    """Of ``data.eval_sets``, by name."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """One pass over a source: what the split needs to know of each row."""

    tokens: npt.NDArray[np.int32]  # (rows,)
    texts: npt.NDArray[np.uint64]  # (rows,) 64-bit digest of the rendered text


@dataclass(frozen=True, slots=True)
class _EvalRows:
    """What one evaluation is to be of, and what of it must not be trained on."""

    rows: RenderedRows
    indices: Indices
    texts: npt.NDArray[np.uint64]
    over_long: int = 0


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path | None = None) -> Prompts:
    """Open, recognise, render and measure all rows once, and split them.

    Relative paths are taken from ``folder`` (default: the current one). Texts are not kept: a task's
    text and ids are made when it is asked for. Raises DataError for data that cannot be read, lacks
    a column, is empty, or is over-long where ``data.over_long`` is error.
    """
    folder = folder or Path.cwd()
    data = config.data
    tools = [] if config.environment is None else tool_schemas(config.environment, folder)
    rows = open_rendered(data, data.train, "data.train", tokenizer, folder, tools)
    scan = _scan(rows)
    fitting = _fitting(scan, data, rows)
    evals: dict[str, _EvalRows] = {}
    named = {f"data.eval_sets.{name}": source for name, source in data.eval_sets.items()}
    for key, source in {"data.eval": data.eval, **named}.items():
        if source is None:
            continue
        if source.holdout is not None:
            indices = _hold_out(scan, fitting, source.holdout, source.seed)
            evals[key] = _EvalRows(rows, indices, scan.texts[indices])
            continue
        others = open_rendered(data, source, key, tokenizer, folder, tools)
        measured = _scan(others)
        over_long = int((measured.tokens > data.max_prompt_tokens).sum())
        evals[key] = _EvalRows(others, _fitting(measured, data, others), measured.texts, over_long)
    held = np.zeros(len(rows), np.bool_)
    for chosen in evals.values():
        held |= np.isin(scan.texts, chosen.texts)
    train_indices = fitting[~held[fitting]]
    if len(train_indices) == 0:
        taken = " or ".join(evals)
        raise DataError(
            f"data.train: found {len(rows)} rows, of which {len(rows) - len(fitting)} are over-long and "
            f"{int(held[fitting].sum())} have a prompt that is in {taken}; expected at least 1 row that is "
            "neither"
        )
    train = PromptStream(
        rows,
        _order(config, rows, train_indices),
        name="train",
        max_prompt_tokens=data.max_prompt_tokens,
        fingerprint=_fingerprint(scan.texts[train_indices], data),
    )
    tasks: dict[str, tuple[Task, ...]] = {}
    for key, chosen in evals.items():
        first = sum(map(len, tasks.values()))
        tasks[key] = _eval_tasks(chosen, key, first, config)
    report = PromptReport(
        train_rows=len(rows),
        trainable=len(train_indices),
        over_long=int((scan.tokens > data.max_prompt_tokens).sum()),
        held_for_eval=int(held[fitting].sum()),
        longest_prompt=min(int(scan.tokens[train_indices].max()), data.max_prompt_tokens),
        eval_prompts=sum(map(len, tasks.values())),
        eval_over_long=sum(chosen.over_long for chosen in evals.values()),
        policy=data.over_long,
        recognised=(
            *rows.recognised(),
            *(line for e in evals.values() if e.rows is not rows for line in e.rows.recognised()),
        ),
    )
    sets = {name: tasks[f"data.eval_sets.{name}"] for name in data.eval_sets}
    return Prompts(train, tasks.get("data.eval", ()), report, sets)


def _eval_tasks(chosen: _EvalRows, key: str, first: int, config: Config) -> tuple[Task, ...]:
    """The tasks of one set; their ordinals begin with ``first``."""
    indices = chosen.indices[: config.eval.max_prompts]
    order = EpochOrder(indices, seed=0, shuffle=False)
    name = "eval" if key == "data.eval" else f"eval-{key.rpartition('.')[2]}"
    stream = PromptStream(chosen.rows, order, name=name, max_prompt_tokens=config.data.max_prompt_tokens)
    return tuple(replace(stream.task(i), ordinal=first + i) for i in range(len(indices)))


def _order(config: Config, rows: RenderedRows, indices: Indices) -> Order:
    """Epochs over all rows, or a mixture by weight."""
    seed, shuffle = config.run.seed, config.data.shuffle
    weights = [part.weight for part in config.data.train.mixture if part.weight is not None]
    if not weights:
        return EpochOrder(indices, seed=seed, shuffle=shuffle)
    orders = []
    for number, (part, start) in enumerate(zip(rows.parts, rows.starts, strict=True)):
        own = indices[(indices >= start) & (indices < start + len(part.rows))]
        if len(own) == 0:
            raise DataError(
                f"{part.key}: found no row to train on of {len(part.rows)}, all are over-long or in "
                "evaluation; expected at least 1 of a source that has a weight"
            )
        orders.append(EpochOrder(own, seed=seed, shuffle=shuffle, stream=number))
    return WeightedOrder(orders, weights, seed=seed, shuffle=shuffle)


def _fingerprint(texts: npt.NDArray[np.uint64], data: DataSection) -> str:
    """Of the prompts in an epoch, in their order, and of what is made of them."""
    digest = blake2b(texts.astype("<u8").tobytes(), digest_size=16)
    digest.update(f"{data.shuffle}|{data.max_prompt_tokens}".encode())
    weights = [part.weight for part in data.train.mixture if part.weight is not None]
    if weights:
        digest.update(f"|{weights}".encode())
    return digest.hexdigest()


def _scan(rows: RenderedRows) -> _Scan:
    tokens = np.empty(len(rows), np.int32)
    texts = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _BATCH_ROWS):
        indices = range(start, min(start + _BATCH_ROWS, len(rows)))
        batch = [rows.text(i) for i in indices]
        for i, text, ids in zip(indices, batch, rows.encode(batch), strict=True):
            if not ids:
                raise DataError(f"{rows.where(i)}: found an empty prompt; expected at least 1 token")
            tokens[i] = len(ids)
            texts[i] = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
    return _Scan(tokens, texts)


def _fitting(scan: _Scan, data: DataSection, rows: RenderedRows) -> Indices:
    """Indices of the rows that the policy for over-long prompts lets through."""
    over = np.flatnonzero(scan.tokens > data.max_prompt_tokens)
    if data.over_long == "truncate_left" or len(over) == 0:
        return np.arange(len(rows), dtype=np.int64)
    if data.over_long == "error":
        first = int(over[0])
        raise DataError(
            f"{rows.key}: found {len(over)} of {len(rows)} prompts over data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}, the first at {rows.where(first)} with {scan.tokens[first]} tokens, "
            f"the longest with {scan.tokens.max()}; expected none, as data.over_long is error: raise "
            "data.max_prompt_tokens, or set data.over_long to drop or truncate_left"
        )
    if len(over) == len(rows):
        raise DataError(
            f"{rows.key}: found all {len(rows)} prompts over data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}, the shortest with {scan.tokens.min()} tokens; expected at least 1 "
            "that fits: raise data.max_prompt_tokens"
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
