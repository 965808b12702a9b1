"""The checkpoints of one run: ``<run>/checkpoints/step_<N>/``.

Invariants:
- A checkpoint is written under a temporary name and renamed once all of it is on disk, its manifest last: at
  any moment a folder ``step_<N>`` is whole, or was damaged afterwards.
- ``prune`` removes no checkpoint that it was told to keep, and the newest last of all.
- ``best.json`` names the checkpoint with the best evaluation so far, if that was one worth keeping.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.checkpoint.files import FileEntry, measure, replace_file, sync_folder, write_file
from asyncrl.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from asyncrl.errors import CheckpointError

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d+)")
_PART = ".part-"
_ASIDE = ".rolled_back"
_BEST = "best.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far."""

    step: int
    reward_mean: float


class CheckpointStore:
    """The folder ``<run>/checkpoints``. Every method blocks on the disk: call them in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, ascending; whole or not is ``verify``'s to say."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        found = (int(name[1]) for name in names if name is not None)
        return sorted(step for step in found if (self.path(step) / MANIFEST).exists())

    def begin(self, step: int) -> Path:
        """A new empty folder to write the checkpoint of ``step`` into."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # A name of its own: ranks of a controller that was killed may still write into another.
        part = self.folder / f".step_{step}{_PART}{secrets.token_hex(4)}"
        part.mkdir()
        return part

    def seal(self, part: Path, step: int, policy_version: int, files: Iterable[FileEntry]) -> Path:
        """Make ``part``, whose ``files`` are on disk, the checkpoint of ``step``; returns its folder."""
        manifest = Manifest(step, policy_version, tuple(files))
        write_file(part, MANIFEST, manifest.encode())
        for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
            sync_folder(folder)
        target = self.path(step)
        if target.exists():
            # Of a history that was rolled back, or damaged: else this step would not be taken again.
            self._remove(target)
        part.rename(target)
        sync_folder(self.folder)
        return target

    def discard(self, part: Path) -> None:
        """Remove what ``begin`` made, because it will not be sealed."""
        shutil.rmtree(part, ignore_errors=True)

    def extend(self, step: int, part: Path, name: str) -> None:
        """Move the folder ``part`` into the checkpoint of ``step`` as ``name``, and into its manifest."""
        folder = self.path(step)
        target, before = folder / name, read_manifest(folder)
        files = tuple(entry for entry in before.files if not entry.path.startswith(f"{name}/"))
        if target.exists():
            # Out of the manifest first: at any moment, what that names is there.
            replace_file(folder / MANIFEST, replace(before, files=files).encode())
            shutil.rmtree(target)
        part.rename(target)
        sync_folder(folder)
        paths = (path for path in target.rglob("*") if path.is_file())
        added = (measure(folder, path.relative_to(folder).as_posix()) for path in paths)
        replace_file(folder / MANIFEST, replace(before, files=(*files, *added)).encode())

    def prune(self, keep_last: int, keep: Collection[int] = ()) -> None:
        """Remove all but the newest ``keep_last`` checkpoints and those in ``keep``."""
        steps = self.steps()
        for step in steps[: max(len(steps) - keep_last, 0)]:
            if step not in keep:
                self._remove(self.path(step))

    def clear_parts(self) -> None:
        """Remove what earlier processes did not come to seal."""
        if self.folder.is_dir():
            for part in self.folder.glob(f".*{_PART}*"):
                shutil.rmtree(part, ignore_errors=True)

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints after a step: they are of a history that the run goes back from."""
        for step in self.steps():
            if step > after:
                target = self.path(step).with_name(f"step_{step}{_ASIDE}")
                if target.exists():
                    shutil.rmtree(target)
                self.path(step).rename(target)
                log.warning("the checkpoint of step %d was rolled back, and is now %s", step, target)
        best = self.best()
        if best is not None and best.step > after:
            (self.folder / _BEST).unlink()

    def best(self) -> Best | None:
        """The best evaluation that ``set_best`` was told of; None without one."""
        try:
            document = json.loads((self.folder / _BEST).read_bytes())
            return Best(int(document["step"]), float(document["eval/reward_mean"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder / _BEST} is damaged ({error}); delete it: the next evaluation writes it anew"
            ) from error

    def set_best(self, best: Best) -> None:
        document = {"step": best.step, "eval/reward_mean": best.reward_mean}
        replace_file(self.folder / _BEST, (json.dumps(document) + "\n").encode())

    def _remove(self, folder: Path) -> None:
        # Its manifest first: a checkpoint that is removed halfway is none.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
