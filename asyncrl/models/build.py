"""How the small model comes about: fresh weights, then the warm start on the run's own training rows.

Invariants:
- The weights depend on ``model.create`` and ``data`` alone, never on ``run.seed``.
- Prompts are rendered as the run itself will render them; held-out prompts take no part.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from asyncrl.config import Config, CreateSection
from asyncrl.data import load_prompts
from asyncrl.errors import DataError
from asyncrl.models.progress import ProgressCallback
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.models.warm_start import Example, warm_start

logger = logging.getLogger(__name__)

ROPE_THETA = 1000.0
TARGET_COLUMNS = ("solution", "answer")


def build_model(
    config: Config, create: CreateSection, place: Path, folder: Path | None, progress: ProgressCallback
) -> None:
    """Make the model of ``create``, warm it up on the training rows, and save it at ``place``.

    Relative paths of data files are taken from ``folder`` (default: the current one). Raises DataError
    for data that cannot be read, and for rows that have no answer to show or are too long for the model.
    """
    tokenizer = character_tokenizer(create.max_positions)
    model = new_model(create, tokenizer)
    if create.warm_start.steps:
        examples = _within(training_examples(config, create, tokenizer, folder), create.max_positions)
        report = warm_start(
            model,
            examples,
            create.warm_start,
            seed=create.seed,
            pad_id=tokenizer.pad_token_id,
            progress=progress,
        )
        logger.info(
            "warm start: %d of %d updates, loss %.3f, expected accuracy %.2f",
            report.step,
            report.steps,
            report.loss,
            report.accuracy,
        )
    tokenizer.save_pretrained(place)
    with _no_library_bars():
        model.save_pretrained(place)


def new_model(create: CreateSection, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with fresh weights from ``create.seed``; input and output embeddings are one tensor."""
    architecture = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=create.hidden_size,
        intermediate_size=create.intermediate_size,
        num_hidden_layers=create.layers,
        num_attention_heads=create.heads,
        num_key_value_heads=create.kv_heads,
        max_position_embeddings=create.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # A narrow model does not leave its first plateau for hundreds of updates from the usual 0.02.
        initializer_range=create.hidden_size**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(create.seed)
        model = LlamaForCausalLM(architecture)
    return model.float()


def training_examples(
    config: Config, create: CreateSection, tokenizer: PreTrainedTokenizerFast, folder: Path | None = None
) -> list[Example]:
    """Pairs from the training rows of ``data``, with prompts as the run itself will render them.

    As many rows as the warm start can use, in an order drawn from ``create.seed``: ``run.seed`` has no
    part in the model.
    """
    run = config.run.model_copy(update={"seed": create.seed})
    stream = load_prompts(config.model_copy(update={"run": run}), tokenizer, folder).train
    wanted = create.warm_start.steps * create.warm_start.batch_size
    tasks = [stream.task(ordinal) for ordinal in range(min(len(stream), wanted))]
    targets = tokenizer([target_text(task.row) for task in tasks], add_special_tokens=False)["input_ids"]
    return [
        Example(task.prompt_ids, (*ids, tokenizer.eos_token_id))
        for task, ids in zip(tasks, targets, strict=True)
    ]


def target_text(row: Mapping[str, Any]) -> str:
    """What the warm start shows after the prompt: the row's ``solution``, or else its ``answer``."""
    for column in TARGET_COLUMNS:
        if row.get(column) is not None:
            return str(row[column])
    raise DataError(
        f"found a row with the columns {', '.join(sorted(row)) or 'none'}; the warm start expected "
        f"{' or '.join(TARGET_COLUMNS)}. Add one, or set model.create.warm_start.steps to 0"
    )


def _within(examples: Sequence[Example], max_positions: int) -> list[Example]:
    """The examples that fit into the model."""
    fitting = [e for e in examples if len(e.prompt_ids) + len(e.target_ids) <= max_positions]
    if len(fitting) < len(examples):
        logger.warning(
            "warm start: left out %d of %d rows whose prompt and answer exceed max_positions %d",
            len(examples) - len(fitting),
            len(examples),
            max_positions,
        )
    if not fitting:
        raise DataError(
            f"found no training row of at most {max_positions} tokens, answer included; the warm start "
            "expected at least 1. Raise model.create.max_positions"
        )
    return fitting


@contextmanager
def _no_library_bars() -> Iterator[None]:
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
