"""A ``Learner`` that computes nothing and takes as long as it is told.

Use it to run the real controller under a virtual clock, in tests and in simulations. Do not use it
to test numerics: its weights are a number.

Invariants:
- It waits by ``asyncio.sleep`` alone, so that a virtual clock decides how long that is.
- Its staleness check is the real one: a batch with lag > max_staleness raises StalenessError.
- Once a scripted death has happened, every later call raises LearnerError.
- What is copied out is a version between two updates, and what is pushed afterwards is that copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.checkpoint.files import FileEntry, write_file
from asyncrl.errors import InvariantError, LearnerError, StalenessError, WeightSyncError
from asyncrl.learners.base import LearnerInfo, PushReport, StepResult
from asyncrl.types import Batch, Float32Array, group_lag
from asyncrl.weight_sync.base import Channel, Manifest, PushGroupSpec, TensorSpec
from asyncrl.weight_sync.scripted import scripted_logprobs

StepSeconds = float | Callable[[Batch], float]
"""Duration of an update: constant, or from its batch."""
PushSeconds = float | Callable[[int], float]
"""Duration of the sending half of a push: constant, or from its version."""

SCRIPTED_MANIFEST: Manifest = (TensorSpec("weight", (1,), "float32"),)


def seconds_by_tokens(tokens_per_s: float) -> Callable[[Batch], float]:
    """Step durations of a learner that trains so many tokens a second, prompts included."""

    def duration(batch: Batch) -> float:
        trajectories = (t for item in batch.items for t in item.meta.trajectories)
        return sum(t.prompt_tokens + t.response_tokens for t in trajectories) / tokens_per_s

    return duration


def scripted_checksum(version: int) -> str:
    """What scripted senders and receivers alike report for ``version``."""
    return f"scripted-{version}"


class ScriptedLearner:
    """Steps, pushes, failures and deaths from a script; see ``learners/base.py``'s ``Learner``.

    ``bad_steps`` and ``dies_at`` name calls of ``step``, counted from 0 with skipped ones included;
    ``failed_pushes`` names calls of ``push``, which raise WeightSyncError when their time is over.
    ``computed`` says how many tokens a step computes, for its metrics; ``stepping`` hears when an update
    begins (True) and when it is over.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        step_s: StepSeconds = 0.0,
        computed: Callable[[Batch], int] | None = None,
        stepping: Callable[[bool], None] = lambda begins: None,
        push_s: PushSeconds = 0.0,
        copy_s: float = 0.0,
        score_s: float = 0.0,
        offload_s: float = 0.0,
        reload_s: float = 0.0,
        start_s: float = 0.0,
        bad_steps: Collection[int] = (),
        dies_at: int | None = None,
        failed_pushes: Collection[int] = (),
        version: int = 0,
        keeps_batches: bool = True,
    ) -> None:
        self.version = version
        self.batches: list[Batch] = []
        """Every batch that a step was asked for, in order; empty where none is kept."""
        self.pushed: list[int] = []
        """Versions that were sent to generators, in order."""
        self.referred: list[int] = []
        """Versions that were sent to the reference, in order."""
        self.scored: list[int] = []
        """Versions that log-probs were asked of, in order."""
        self.push_groups: list[PushGroupSpec] = []
        self._max_staleness = max_staleness
        self._step_s = step_s
        self._computed = computed
        self._tell = stepping
        self._push_s = push_s
        self._copy_s = copy_s
        self._score_s = score_s
        self._offload_s = offload_s
        self._reload_s = reload_s
        self.offloaded = False
        """Whether it has left its device."""
        self._stepping = False
        self._copied: int | None = None
        self._copied_state = 0
        self._copied_weights_only = False
        self._start_s = start_s
        self._bad_steps = frozenset(bad_steps)
        self._dies_at = dies_at
        self._failed_pushes = frozenset(failed_pushes)
        self._push_calls = 0
        self._step_calls = 0
        self._keeps_batches = keeps_batches
        self._up = False
        self._why_down = "was not started"

    @property
    def ordinals(self) -> list[tuple[int, ...]]:
        """Ordinals of each batch."""
        return [tuple(item.meta.ordinal for item in batch.items) for batch in self.batches]

    @property
    def lags(self) -> list[tuple[int | None, ...]]:
        """Lag of each group of each batch; None where no token is trained."""
        return [tuple(group_lag(batch.version, item.meta) for item in batch.items) for batch in self.batches]

    async def start(self) -> LearnerInfo:
        await asyncio.sleep(self._start_s)
        self._up = True
        return LearnerInfo(manifest=SCRIPTED_MANIFEST, parameters=1)

    async def step(self, batch: Batch) -> StepResult:
        self._check_on_device("update")
        attempt, self._step_calls = self._step_calls, self._step_calls + 1
        if self._keeps_batches:
            self.batches.append(batch)
        self._check(batch)
        duration = self._step_s(batch) if callable(self._step_s) else self._step_s
        begun = asyncio.get_running_loop().time()
        self._stepping = True
        self._tell(True)
        try:
            await asyncio.sleep(duration)
        finally:
            self._stepping = False
            self._tell(False)
        if attempt == self._dies_at:
            self._go_down(f"died in step call {attempt}, as scripted")
            self._check_up()
        skipped = attempt in self._bad_steps
        if not skipped:
            self.version += 1
        ranks = ((begun, begun + duration),)
        metrics = {"actor/pg_loss": 0.0}
        if self._computed is not None:
            metrics["perf/computed_tokens"] = float(self._computed(batch))
        return StepResult(skipped, metrics, train_s=duration, ranks=ranks)

    async def open_push_group(self, spec: PushGroupSpec, channel: Channel = "generators") -> None:
        self._check_up()
        self.push_groups.append(spec)

    async def copy_out(self, version: int) -> float:
        self._check_up()
        if self._stepping or version != self.version:
            during = "in the middle of an update" if self._stepping else "between two updates"
            raise InvariantError(f"asked to copy version {version} out {during}, have {self.version}")
        await asyncio.sleep(self._copy_s)
        self._copied = version
        return self._copy_s

    async def push(self, version: int, channel: Channel = "generators") -> PushReport:
        self._check_on_device("push")
        if self._copied is None and (self._stepping or version != self.version):
            during = "in the middle of an update" if self._stepping else "between two updates"
            raise InvariantError(f"asked to push version {version} {during}, have {self.version}")
        if self._copied is not None and version != self._copied:
            raise InvariantError(f"asked to push version {version}, the copy is of {self._copied}")
        call, self._push_calls = self._push_calls, self._push_calls + 1
        duration = self._push_s(version) if callable(self._push_s) else self._push_s
        await asyncio.sleep(duration)
        if call in self._failed_pushes:
            raise WeightSyncError(f"push call {call} of version {version} failed, as scripted")
        (self.pushed if channel == "generators" else self.referred).append(version)
        return PushReport(version, scripted_checksum(version), SCRIPTED_MANIFEST[0].nbytes, duration)

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        self._check_on_device("score")
        if self._stepping:
            raise InvariantError(f"asked to score in the middle of the update of version {self.version}")
        self.scored.append(self.version)
        await asyncio.sleep(self._score_s)
        return scripted_logprobs(self.version, token_ids)

    async def offload(self) -> None:
        """Takes ``offload_s``, in which it is on the device still."""
        self._check_on_device("offload")
        if self._stepping:
            raise InvariantError(f"asked to offload in the middle of the update of version {self.version}")
        await asyncio.sleep(self._offload_s)
        self.offloaded = True

    async def reload(self) -> None:
        """Takes ``reload_s``, in which it is on the device already."""
        self._check_up()
        back, self.offloaded = self.offloaded, False
        await asyncio.sleep(self._reload_s if back else 0.0)

    async def checksum(self) -> str:
        self._check_on_device("sum its weights up")
        return scripted_checksum(self.version)

    async def export(self, folder: Path) -> None:
        """Writes its version, in place of weights."""
        self._check_on_device("export")
        (folder / "version").write_text(str(self.version))

    async def copy_state(self, *, weights_only: bool = False) -> None:
        self._check_up()
        if self._stepping:
            raise InvariantError(f"asked to copy the state in the middle of the update of {self.version}")
        await asyncio.sleep(self._copy_s)
        self._copied_state, self._copied_weights_only = self.version, weights_only

    async def write_state(self, folder: Path) -> list[FileEntry]:
        self._check_up()
        (folder / "learner").mkdir()
        name = "weights" if self._copied_weights_only else "version"
        entry = write_file(folder / "learner", name, str(self._copied_state).encode())
        return [replace(entry, path=f"learner/{name}")]

    async def load_state(self, folder: Path) -> None:
        self._check_up()
        self.version = int((folder / "learner" / "version").read_text())

    async def close(self) -> None:
        self._go_down("was closed")

    def _check(self, batch: Batch) -> None:
        if batch.version != self.version:
            raise InvariantError(f"batch for version {batch.version}, the policy is at {self.version}")
        for item in batch.items:
            lag = group_lag(batch.version, item.meta)
            if lag is not None and not 0 <= lag <= self._max_staleness:
                raise StalenessError(
                    f"group {item.meta.ordinal} has lag {lag} in the update of version {batch.version}, "
                    f"expected 0 to max_staleness = {self._max_staleness}"
                )

    def _go_down(self, why: str) -> None:
        self._up, self._why_down = False, why

    def _check_on_device(self, doing: str) -> None:
        self._check_up()
        if self.offloaded:
            raise InvariantError(f"asked to {doing} version {self.version} while off its device")

    def _check_up(self) -> None:
        if not self._up:
            raise LearnerError(f"the scripted learner {self._why_down}")
