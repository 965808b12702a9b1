"""The run itself: its name, its length, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from asyncrl.sections.base import Section


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^\w[\w.+=-]*$")] = "run"
    """Name of the run, of letters, digits and ``_.+=-``; its folder is ``<dir>/<name>/``."""
    dir: str = "runs"
    """Folder that holds the runs."""
    seed: NonNegativeInt = 0
    """Seeds the data order and every random draw."""
    steps: PositiveInt = 100
    """Policy updates. The only setting for the length of a run."""
    deterministic: bool = False
    """Bit-for-bit reproducible at pipeline_depth 0 with the torch engine; slower."""
    stall_after_s: PositiveFloat = 120.0
    """Seconds without progress before a stall report is logged."""
    max_unusable_groups: PositiveInt = 128
    """Groups in a row that fail or are filtered before the run ends with an error."""
    max_restarts: NonNegativeInt = 0
    """Failures of infrastructure in a row (a dead learner rank, too few generators, a lost node) after which
    the same command starts the run again from its last checkpoint. A later one begins the row anew."""
    restart_backoff_s: PositiveFloat = 10.0
    """Seconds before the first restart of a row; each wait is twice the one before, at most ten minutes."""
    rollout_only: bool = False
    """Record ``steps`` batches of the start model in ``rollouts/``, with no learner (``--rollout-only``)."""
    replay: str | None = None
    """Train on what this run's folder holds in ``rollouts/``, without a generator (``--replay``)."""

    @property
    def folder(self) -> Path:
        """Where everything that the run writes goes."""
        return Path(self.dir) / self.name


class CheckpointSection(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: none between the first step and the last."""
    at_end: bool = True
    """Take one after the last step, and when a signal ends the run."""
    keep_last: PositiveInt = 2
    """How many of the newest are kept."""
    keep_best: bool = True
    """Keep the weights of the version with the best ``eval/reward_mean``: every version that is evaluated
    leaves its weights, without the optimizer's state, until its evaluation is known."""
    hf: Literal["never", "last", "every"] = "last"
    """Which of them hold the policy as a Hugging Face folder too. Training stands still while one is
    written, so that by default it is the one that a run ends with."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """auto: go on from the newest whole checkpoint in the run's folder, if there is one; never: refuse a
    folder that was used; a path, ``.../checkpoints/step_<N>``: go on from that one, of whichever run. A run
    that did so, and is started with the same path again, goes on from its own checkpoints since then."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that copying the state may take, and then writing it."""


class LogSection(Section):
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Where metrics go beside ``metrics.jsonl``. wandb needs ``asyncrl[wandb]``; with ``WANDB_MODE=offline``
    in the environment it keeps them on this machine."""
    rollouts_every: NonNegativeInt = 10
    """Steps between samples of trajectories in ``rollouts/``; 0: never."""
    trace_mb: NonNegativeInt = 256
    """Megabytes (2**20 bytes) that ``trace.json``, the run's timeline, may get; 0: none is written."""
    display: Literal["auto", "rich", "lines", "none"] = "auto"
    """auto: a live display on a terminal, lines elsewhere."""
