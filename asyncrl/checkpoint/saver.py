"""Taking checkpoints beside training: the copy at a step's boundary, then files in the background.

Training waits for the copy alone, and for the files of the checkpoint before, if those are not written yet:
there is memory for one copy. Each learner rank writes its own part; the controller's is written in a thread.

Invariants:
- A checkpoint is of one moment between two updates.
- It is sealed once every line that was reported before that moment is on disk in the run's own files.
- One that cannot be written (a full disk, say) is removed, counted and logged, and training goes on; the last
  one of a run, and one that a signal asked for, has to succeed.
- With ``keep_best``, every version that is evaluated has a checkpoint until its evaluation is known, and the
  best one until a better one comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.checkpoint.files import FileEntry, write_file, written
from asyncrl.checkpoint.groups import READY, encode_ready, payloads_of, with_payloads
from asyncrl.checkpoint.state import CONFIG, STATE, RunState
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.config import CheckpointSection
from asyncrl.learners.base import Learner
from asyncrl.types import Metrics, ReadyGroup
from asyncrl.waiting import within

log = logging.getLogger(__name__)

Issued = tuple[ReadyGroup, int]
"""A ready group, and the version that it was issued at."""
Resolve = Callable[[Sequence[Any]], list[bytes]]
"""The bytes behind payloads; called in a thread."""


class StateHolder(Protocol):
    """Whoever has weights that a run changes."""

    async def copy_state(self) -> None: ...

    async def write_state(self, folder: Path) -> list[FileEntry]: ...


class FollowingReference(StateHolder, Protocol):
    """A reference whose weights are those of a past version."""

    async def load_state(self, folder: Path, version: int) -> None: ...


class Saver:
    """Takes the checkpoints of one run into ``store``.

    ``config_text`` is the resolved config, ``data`` the fingerprint of the prompts, ``lines_on_disk`` returns
    once what was reported so far is.
    """

    def __init__(
        self,
        section: CheckpointSection,
        store: CheckpointStore,
        learner: Learner,
        *,
        resolve: Resolve,
        lines_on_disk: Callable[[], Awaitable[None]],
        config_text: str,
        data: str,
        reference: FollowingReference | None = None,
        last_step: int | None = None,
    ) -> None:
        self.data = data
        self.last_step = last_step
        """The step of the newest checkpoint that was taken, or that the run goes on from."""
        self.failed = 0
        """Checkpoints that could not be written."""
        self._section = section
        self._store = store
        self._learner = learner
        self._reference = reference
        self._resolve = resolve
        self._lines_on_disk = lines_on_disk
        self._config_text = config_text
        self._writing: asyncio.Task[None] | None = None
        self._tidying = asyncio.Lock()
        """One at a time decides which checkpoints go."""
        self._in_question: set[int] = set()
        """Steps whose evaluation is not known yet."""

    def is_due(self, step: int, *, last: bool, evaluated: bool) -> bool:
        """Whether a checkpoint belongs after ``step``: the ``last`` one has it, whatever the settings."""
        every = self._section.every
        return last or (every > 0 and step % every == 0) or (evaluated and self._section.keep_best)

    async def take(
        self,
        tasks: asyncio.TaskGroup,
        capture: Callable[[], tuple[RunState, list[Issued]]],
        *,
        evaluation: asyncio.Task[Metrics] | None = None,
        required: bool = False,
    ) -> None:
        """Copy what ``capture`` and the learner hold now, and write it in a task of ``tasks``.

        Returns after the copy. ``evaluation`` is that of the learner's version, if there is one.
        ``required``: a failure to write raises, in the task.
        """
        await self.written()
        state, ready = capture()
        await within(
            self._section.timeout_s,
            f"copying the state of step {state.step}",
            "checkpoint.timeout_s",
            self._copy(state),
        )
        self.last_step = state.step
        if evaluation is not None and self._section.keep_best:
            self._in_question.add(state.step)
        self._writing = tasks.create_task(
            self._write(state, ready, required), name=f"checkpoint of step {state.step}"
        )
        if state.step in self._in_question:
            assert evaluation is not None
            work = self._judge(state, evaluation, self._writing)
            tasks.create_task(work, name=f"verdict on step {state.step}")

    async def load(self, folder: Path, state: RunState) -> None:
        """Have everyone go on from the checkpoint in ``folder``, of ``state``. Raises CheckpointError."""
        timeout_s, setting = self._section.timeout_s, "checkpoint.timeout_s"
        if state.learner:
            await within(timeout_s, f"loading {folder}", setting, self._learner.load_state(folder))
        if self._reference is not None and state.reference_version:
            work = self._reference.load_state(folder, state.reference_version)
            await within(timeout_s, f"loading {folder}", setting, work)

    async def written(self) -> None:
        """Wait for the files of the checkpoint before; how that ended is its TaskGroup's to see."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def export(self, step: int) -> None:
        """Put the model as a Hugging Face folder into the checkpoint of ``step``, which the learner is at."""
        part = await asyncio.to_thread(self._store.begin, step)
        try:
            await self._learner.export(part)
            await asyncio.to_thread(self._store.extend, step, part, "hf")
        except BaseException:
            await asyncio.to_thread(self._store.discard, part)
            raise

    async def _copy(self, state: RunState) -> None:
        await asyncio.gather(*(holder.copy_state() for holder in self._holders(state)))

    def _holders(self, state: RunState) -> list[StateHolder]:
        """Whose state is no longer the start model's."""
        learner: list[StateHolder] = [self._learner] if state.learner else []
        follows = self._reference is not None and state.reference_version
        return [*learner, self._reference] if self._reference is not None and follows else learner

    async def _write(self, state: RunState, ready: Sequence[Issued], required: bool) -> None:
        step, timeout_s = state.step, self._section.timeout_s
        part = None
        try:
            part = await asyncio.to_thread(self._store.begin, step)
            work = self._write_parts(part, state, ready)
            files = await within(
                timeout_s, f"writing the checkpoint of step {step}", "checkpoint.timeout_s", work
            )
            await asyncio.to_thread(self._store.seal, part, step, state.version, files)
        except OSError as error:
            self.failed += 1
            self.last_step = None
            log.error("the checkpoint of step %d could not be written: %s", step, error)
            if part is not None:
                await asyncio.to_thread(self._store.discard, part)
            self._in_question.discard(step)
            if required:
                raise
        except BaseException:
            if part is not None:
                await asyncio.to_thread(self._store.discard, part)
            raise
        else:
            log.info("checkpoint of step %d", step)
            async with self._tidying:
                await asyncio.to_thread(self._prune, frozenset(self._in_question))

    async def _write_parts(self, part: Path, state: RunState, ready: Sequence[Issued]) -> list[FileEntry]:
        """Everything but the manifest. All writers have ended when it raises what the first of them did."""
        writers: list[Awaitable[list[FileEntry]]] = [
            self._lines(),
            asyncio.to_thread(self._write_own, part, state, ready),
            *(holder.write_state(part) for holder in self._holders(state)),
        ]
        files: list[FileEntry] = []
        for result in await asyncio.gather(*writers, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            files += result
        return files

    async def _lines(self) -> list[FileEntry]:
        """Have the run's own files on disk, of which none belongs to the checkpoint."""
        await self._lines_on_disk()
        return []

    def _write_own(self, part: Path, state: RunState, ready: Sequence[Issued]) -> list[FileEntry]:
        """The controller's files; in a thread."""
        groups = [group for group, _ in ready]
        resolved = with_payloads(groups, self._resolve(payloads_of(groups)))
        with written(part / READY) as file:
            for group, (_, start_version) in zip(resolved, ready, strict=True):
                file.write(encode_ready(group, start_version))
        return [
            file.entry(READY),
            write_file(part, STATE, state.encode()),
            write_file(part, CONFIG, self._config_text.encode()),
        ]

    async def _judge(
        self, state: RunState, evaluation: asyncio.Task[Metrics], writing: asyncio.Task[None]
    ) -> None:
        """Keep a checkpoint if the evaluation of its version is the best one."""
        await asyncio.wait([evaluation, writing])
        async with self._tidying:
            known = not evaluation.cancelled() and evaluation.exception() is None
            if known and state.step in self._in_question:
                result = evaluation.result()
                if result.get("eval/policy_version") == state.version:  # else it had to turn to another one
                    await asyncio.to_thread(self._note, Best(state.step, result["eval/reward_mean"]))
            self._in_question.discard(state.step)
            await asyncio.to_thread(self._prune, frozenset(self._in_question))

    def _note(self, found: Best) -> None:
        before = self._store.best()
        if before is None or before.step not in self._store.steps() or found.reward_mean > before.reward_mean:
            self._store.set_best(found)

    def _prune(self, in_question: frozenset[int]) -> None:
        best = self._store.best() if self._section.keep_best else None
        keep = in_question if best is None else in_question | {best.step}
        try:
            self._store.prune(self._section.keep_last, keep)
        except OSError as error:
            log.warning("checkpoints that are no longer needed could not be removed: %s", error)
