"""``asyncrl export``: the policy of a checkpoint as a Hugging Face folder, by one process on the CPU.

Invariants:
- Only a whole checkpoint is exported, and the folder appears as a whole, under its name.
- The tensors are those that the learner would have exported at that step: in the model's dtype, with
  adapters merged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from torch import nn

from asyncrl.checkpoint.manifest import MANIFEST, verify
from asyncrl.checkpoint.resume import newest_checkpoint
from asyncrl.checkpoint.state import CONFIG, LEARNER
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import CheckpointError
from asyncrl.learners.gathering import collect
from asyncrl.learners.lora import LoraAdapter
from asyncrl.learners.policy import load_policy, save_policy
from asyncrl.learners.state_files import SavedState
from asyncrl.learners.weights import PolicyWeights

log = logging.getLogger(__name__)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint, or the weights alone, that ``path`` is; of a run's folder the best, or without
    evaluations the newest whole one.

    Raises CheckpointError where there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    store = CheckpointStore(path / "checkpoints")
    best = store.best()
    place = None if best is None else store.holding(best.step)
    if best is not None and place is not None:
        log.info("step %d has the best evaluation: eval/reward_mean = %.4g", best.step, best.reward_mean)
        return place
    newest = newest_checkpoint(store)
    if newest is None:
        raise CheckpointError(
            f"found no checkpoint in {path}; expected the folder of one, as in "
            "runs/NAME/checkpoints/step_50, or that of a run that has some"
        )
    return newest.folder


def export(checkpoint: Path, target: Path, model_path: str) -> None:
    """Write the policy of ``checkpoint`` to ``target``, with the tokenizer of the start model ``model_path``.

    Raises CheckpointError for a checkpoint that is damaged, is of the start model, or of another one than
    ``model_path``'s, and for a ``target`` that is there already.
    """
    if target.exists():
        raise CheckpointError(f"found {target}, which is there already; expected a folder to make")
    verify(checkpoint)
    if not (checkpoint / LEARNER).is_dir():
        raise CheckpointError(f"{checkpoint} was taken before the first step: its policy is the start model")
    config = config_of(checkpoint)
    model = load_policy(
        model_path,
        dtype=getattr(torch, config.model.dtype),
        trust_remote_code=config.model.trust_remote_code,
        checkpointing=False,
    )
    adapter = None if config.learner.lora is None else LoraAdapter(model, config.learner.lora)
    _load(model, SavedState(checkpoint / LEARNER))
    weights = PolicyWeights(_Whole(model), adapter)
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    trust = config.model.trust_remote_code
    save_policy(part, model, dict(weights.named()), model_path, trust_remote_code=trust)
    if adapter is not None:
        weights.export_adapter(part / "adapter")
    part.rename(target)


def config_of(checkpoint: Path) -> Config:
    """The config that a whole checkpoint was made with."""
    verify(checkpoint)
    text = (checkpoint / CONFIG).read_text(encoding="utf-8")
    return parse_config(yaml.safe_load(text), name=str(checkpoint / CONFIG))


class _Whole:
    """A model in one piece, where ``PolicyWeights`` expects the engine of one of several ranks."""

    rank = 0
    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
        yield [parameter.detach() for parameter in parameters]

    def part(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.detach().reshape(-1)

    def collect(
        self,
        numels: Sequence[int],
        parts: Iterable[torch.Tensor],
        dtype: torch.dtype,
        whole: torch.Tensor | None,
    ) -> None:
        collect(None, self.rank, numels, parts, dtype, whole)  # nothing comes from elsewhere


@torch.no_grad()
def _load(model: nn.Module, saved: SavedState) -> None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved.require({name: tuple(p.shape) for name, p in trained.items()})
    for name, parameter in trained.items():
        parameter.copy_(saved.read("weight", name).view(parameter.shape))
