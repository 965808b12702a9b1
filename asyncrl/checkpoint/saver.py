"""Taking checkpoints beside training: the copy at a step's boundary, then files in the background.

Training waits for the copy alone, and for the files of the checkpoint before, if those are not written yet:
there is memory for one copy. Each learner rank writes its own part; the controller's is written in a thread.
With ``hf: every`` it waits for the Hugging Face folder too, which the ranks write together.

Invariants:
- A checkpoint is of one moment between two updates.
- It is sealed once every line that was reported before that moment is on disk in the run's own files.
- One that cannot be written (a full disk, say) is removed, counted and logged, and training goes on; the
  first and the last one of a run, and one that a signal asked for, have to succeed.
- With ``keep_best``, the weights of every version that is evaluated are kept until its evaluation is known,
  and those of the best one until a better one comes: in its checkpoint, where there is to be one, else alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.files import FileEntry, adopt, write_file, written
from asyncrl.checkpoint.groups import READY, encode_ready, payloads_of, with_payloads
from asyncrl.checkpoint.manifest import read_manifest
from asyncrl.checkpoint.state import CONFIG, STATE, RunState
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.config import CheckpointSection
from asyncrl.learners.base import Learner
from asyncrl.types import Metrics, ReadyGroup
from asyncrl.waiting import within

log = logging.getLogger(__name__)

HF: Final = "hf"
"""The folder of a checkpoint that transformers and vLLM load."""
Kind = Literal["whole", "weights"]
"""What is taken: all that a run goes on from, or the policy's weights alone."""
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

    ``config_text`` is the resolved config, ``of`` what else the run is of, ``lines_on_disk`` returns once
    what was reported so far is.
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
        of: Origin,
        reference: FollowingReference | None = None,
        last_step: int | None = None,
    ) -> None:
        self.of = of
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
        """One at a time decides which checkpoints go, or adds one."""
        self._in_question: set[int] = set()
        """Steps whose evaluation is not known yet."""

    def due(self, step: int, *, last: bool, evaluated: bool) -> Kind | None:
        """What belongs after ``step``, the ``last`` one or one whose version is ``evaluated``."""
        section = self._section
        if (last and section.at_end) or (section.every > 0 and step % section.every == 0):
            return "whole"
        return "weights" if evaluated and section.keep_best else None

    async def take(
        self,
        tasks: asyncio.TaskGroup,
        capture: Callable[[], tuple[RunState, list[Issued]]],
        *,
        kind: Kind = "whole",
        evaluation: asyncio.Task[Metrics] | None = None,
        required: bool = False,
    ) -> None:
        """Copy what ``capture`` and the learner hold now, and write it in a task of ``tasks``.

        Returns once training may go on. ``evaluation`` is that of the learner's version, if there is one.
        ``required``: a failure to write raises, in the task.
        """
        await self.written()
        state, ready = capture()
        judged = evaluation if self._section.keep_best else None
        if judged is not None:
            self._in_question.add(state.step)
        copied = asyncio.Event()
        self._writing = tasks.create_task(
            self._take(state, ready, kind, required, copied), name=f"checkpoint of step {state.step}"
        )
        self._writing.add_done_callback(lambda _: copied.set())
        if judged is not None:
            work = self._judge(state, judged, self._writing)
            tasks.create_task(work, name=f"verdict on step {state.step}")
        await copied.wait()

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
        """Put the policy, which is at ``step``, into that checkpoint as a Hugging Face folder.

        Nothing to do where ``checkpoint.hf`` wants none, or there is no such checkpoint, or it has one.
        """
        if self._section.hf == "never" or await asyncio.to_thread(self._has_no_use_for_export, step):
            return
        part = await asyncio.to_thread(self._store.begin, step)
        try:
            await self._learner.export(part)
            await asyncio.to_thread(self._store.extend, step, part, HF)
        except BaseException:
            await asyncio.to_thread(self._store.discard, part)
            raise

    def _has_no_use_for_export(self, step: int) -> bool:
        if step not in self._store.steps():
            return True
        # By the manifest: a folder that is not in it yet was left by a process that ended there.
        entries = read_manifest(self._store.path(step)).files
        return any(entry.path.startswith(f"{HF}/") for entry in entries)

    async def note_evaluation(self, step: int, result: Metrics) -> None:
        """Count an evaluation of the checkpoint of ``step``, of which ``take`` did not hear."""
        if step and self._section.keep_best and step in self._store.steps():
            async with self._tidying:
                await asyncio.to_thread(self._note, Best(step, result["eval/reward_mean"]))

    async def _copy(self, state: RunState, kind: Kind) -> None:
        if kind == "weights":
            await self._learner.copy_state(weights_only=True)
            return
        await asyncio.gather(*(holder.copy_state() for holder in self._holders(state)))

    def _holders(self, state: RunState) -> list[StateHolder]:
        """Whose state is no longer the start model's."""
        learner: list[StateHolder] = [self._learner] if state.learner else []
        follows = self._reference is not None and state.reference_version
        return [*learner, self._reference] if self._reference is not None and follows else learner

    async def _take(
        self, state: RunState, ready: Sequence[Issued], kind: Kind, required: bool, copied: asyncio.Event
    ) -> None:
        """Copy and write; sets ``copied`` once updates may run again."""
        step, timeout_s, setting = state.step, self._section.timeout_s, "checkpoint.timeout_s"
        part = None
        try:
            part = await asyncio.to_thread(self._store.begin, step)
            await within(timeout_s, f"copying the state of step {step}", setting, self._copy(state, kind))
            if kind == "whole":
                self.last_step = step
            exports = kind == "whole" and self._section.hf == "every" and state.learner
            if exports:
                await asyncio.to_thread((part / HF).mkdir)
                doing = f"exporting the policy of step {step}"
                await within(timeout_s, doing, setting, self._learner.export(part / HF))
            copied.set()
            work = self._write(part, state, ready, kind)
            files = await within(timeout_s, f"writing the checkpoint of step {step}", setting, work)
            if exports:
                files += await asyncio.to_thread(adopt, part, HF)
            weights_only = kind == "weights"
            async with self._tidying:  # else one that began before would not know that these are in question
                await asyncio.to_thread(
                    self._store.seal, part, step, state.version, files, weights_only=weights_only
                )
        except OSError as error:
            self.failed += 1
            if self.last_step == step:
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
            log.info("checkpoint of step %d" if kind == "whole" else "weights of step %d", step)
            async with self._tidying:
                await asyncio.to_thread(self._prune, frozenset(self._in_question))

    async def _write(
        self, part: Path, state: RunState, ready: Sequence[Issued], kind: Kind
    ) -> list[FileEntry]:
        """What was copied, without the manifest."""
        if kind == "whole":
            return await self._write_parts(part, state, ready)
        text = await asyncio.to_thread(write_file, part, CONFIG, self._config_text.encode())
        return [text, *await self._learner.write_state(part)]

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
        """Keep the weights of ``state``'s step if the evaluation of its version is the best one."""
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
        gone = before is None or self._store.holding(before.step) is None
        if before is None or gone or found.reward_mean > before.reward_mean:
            self._store.set_best(found)

    def _prune(self, in_question: frozenset[int]) -> None:
        best = self._store.best() if self._section.keep_best else None
        keep = in_question if best is None else in_question | {best.step}
        try:
            self._store.prune(self._section.keep_last, keep)
        except OSError as error:
            log.warning("checkpoints that are no longer needed could not be removed: %s", error)
