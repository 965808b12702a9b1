"""The small model that a config asks for with ``model.create``, made on first use.

Invariants:
- A model folder that exists is whole: it is built beside its place and renamed into it.
- One process builds at a time; the others wait for it, and then find the model.
- The folder's name holds a hash of all that the weights depend on, so a changed ``create`` or
  ``data`` block (or data file) makes another model and never overwrites one.
- Held-out prompts take no part in the warm start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from asyncrl.config import Config, CreateSection
from asyncrl.data import load_prompts
from asyncrl.errors import ConfigError, DataError, DeadlineError
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.models.warm_start import PROBE_EXAMPLES, Example, ProgressCallback, warm_start

logger = logging.getLogger(__name__)

RECIPE = 1
"""Part of the hash: raise it when the same config should give other weights."""
ROPE_THETA = 1000.0
BUILD_TIMEOUT_S = 900.0
TARGET_COLUMNS = ("solution", "answer")


def model_folder(config: Config, folder: Path | None = None) -> Path:
    """Where the model of ``config`` is, or will be: ``<run.dir>/.models/llama-<hash>``.

    Relative paths of data files are taken from ``folder`` (default: the current one). Raises
    ConfigError if the config has no ``model.create``.
    """
    facts = {
        "recipe": RECIPE,
        "create": _create_section(config).model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "files": _file_digests(config, folder or Path.cwd()),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.run.dir) / ".models" / f"llama-{digest}"


def ensure_model(
    config: Config,
    progress: ProgressCallback | None = None,
    *,
    folder: Path | None = None,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> Path:
    """The Hugging Face folder of ``model.create``: found, or made now, with its warm start.

    ``progress`` hears of the warm start every few updates. Relative paths of data files are taken
    from ``folder`` (default: the current one). Raises ConfigError without ``model.create``, DataError
    for data that cannot be read or rows that have no answer to show, and DeadlineError if another
    process is still making the model after ``timeout_s``.
    """
    place = model_folder(config, folder)
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(place.with_name(f"{place.name}.lock"), timeout_s):
        if place.exists():
            return place
        draft = place.with_name(f"{place.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)  # what a builder that was killed left behind
        _build(config, draft, folder, progress or (lambda _: None))
        draft.rename(place)
    return place


def training_examples(
    config: Config, tokenizer: PreTrainedTokenizerFast, folder: Path | None = None
) -> list[Example]:
    """Pairs from the training rows of ``data``, with prompts as the run itself will render them.

    As many rows as the warm start can use, in an order drawn from ``create.seed``: ``run.seed`` has no
    part in the model.
    """
    create = _create_section(config)
    run = config.run.model_copy(update={"seed": create.seed})
    stream = load_prompts(config.model_copy(update={"run": run}), tokenizer, folder).train
    wanted = create.warm_start.steps * create.warm_start.batch_size + PROBE_EXAMPLES
    tasks = [stream.task(ordinal) for ordinal in range(min(len(stream), wanted))]
    targets = tokenizer([target_text(task.row) for task in tasks], add_special_tokens=False)["input_ids"]
    return [
        Example(task.prompt_ids, (*ids, tokenizer.eos_token_id))
        for task, ids in zip(tasks, targets, strict=True)
    ]


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


def _build(config: Config, draft: Path, folder: Path | None, progress: ProgressCallback) -> None:
    create = _create_section(config)
    tokenizer = character_tokenizer(create.max_positions)
    model = new_model(create, tokenizer)
    if create.warm_start.steps:
        examples = _within(training_examples(config, tokenizer, folder), create.max_positions)
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
    tokenizer.save_pretrained(draft)
    with _no_library_bars():
        model.save_pretrained(draft)


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
    if len(fitting) < 5:
        raise DataError(
            f"found {len(fitting)} training rows of at most {max_positions} tokens, answer included; "
            "the warm start expected at least 5. Raise model.create.max_positions or data.train.size"
        )
    return fitting


def _create_section(config: Config) -> CreateSection:
    if config.model.create is None:
        raise ConfigError("model.create is not set; expected it where a model is to be made")
    return config.model.create


def _file_digests(config: Config, folder: Path) -> dict[str, str]:
    """SHA-256 of the local files that the data block names."""
    digests = {}
    for source in (config.data.train, config.data.eval):
        if source is None:
            continue
        names = [source.path, source.python.rpartition(":")[0] if source.python else None]
        for name in filter(None, names):
            if (folder / name).is_file():
                with (folder / name).open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


@contextmanager
def _no_library_bars() -> Iterator[None]:
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _only_builder(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file ``path``. The kernel frees it when its holder ends, however that comes."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making this model; waiting for it (%s)", path)
            _lock_within(path, file.fileno(), timeout_s)
        yield


def _lock_within(path: Path, descriptor: int, timeout_s: float) -> None:
    # flock knows no timeout, so it waits in a thread of its own. The duplicate shares the lock and
    # stays valid in that thread if this side gives up and closes its file.
    duplicate = os.dup(descriptor)

    def wait() -> None:
        fcntl.flock(duplicate, fcntl.LOCK_EX)
        os.close(duplicate)

    waiter = threading.Thread(target=wait, name="model-lock", daemon=True)
    waiter.start()
    waiter.join(timeout_s)
    if waiter.is_alive():
        raise DeadlineError(
            f"waited {timeout_s:.0f} s for another process to finish making the model; it holds {path}. "
            "End that process, or give this run another run.dir"
        )
