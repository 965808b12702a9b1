"""The checkpoints of one run: ``<run>/checkpoints/step_<N>/``, and weights alone: ``weights_<N>/``.

Invariants:
- Both are written under a temporary name and renamed once all of it is on disk, the manifest last: at any
  moment a folder of such a name is whole, or was damaged afterwards.
- A run goes on from a checkpoint; weights alone are there to be used.
- ``prune`` removes nothing of a step that it was told to keep, and the newest checkpoint last of all.
- ``best.json`` names the step with the best evaluation so far, if its weights were kept.
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

from asyncrl.checkpoint.files import FileEntry, adopt, make_folder, replace_file, sync_folder, write_file
from asyncrl.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from asyncrl.errors import CheckpointError

log = logging.getLogger(__name__)

_WHOLE = re.compile(r"step_(\d+)")
_WEIGHTS = re.compile(r"weights_(\d+)")
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
        """The checkpoint of ``step``."""
        return self.folder / f"step_{step}"

    def weights_path(self, step: int) -> Path:
        """The weights alone of ``step``."""
        return self.folder / f"weights_{step}"

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, ascending; whole or not is ``verify``'s to say."""
        return [step for step in self._named(_WHOLE) if (self.path(step) / MANIFEST).exists()]

    def without_manifest(self) -> list[int]:
        """The steps of folders that bear a checkpoint's name and are none, ascending."""
        return [step for step in self._named(_WHOLE) if not (self.path(step) / MANIFEST).exists()]

    def weights_steps(self) -> list[int]:
        """The steps that there are weights alone of, ascending."""
        return [step for step in self._named(_WEIGHTS) if (self.weights_path(step) / MANIFEST).exists()]

    def holding(self, step: int) -> Path | None:
        """The folder that has the weights of ``step``: a checkpoint, or weights alone; None without one."""
        places = (self.path(step), self.weights_path(step))
        return next((place for place in places if (place / MANIFEST).exists()), None)

    def begin(self, step: int) -> Path:
        """A new empty folder to write the checkpoint of ``step`` into."""
        make_folder(self.folder)
        # A name of its own: ranks of a controller that was killed may still write into another.
        part = self.folder / f".step_{step}{_PART}{secrets.token_hex(4)}"
        part.mkdir()
        return part

    def seal(
        self,
        part: Path,
        step: int,
        policy_version: int,
        files: Iterable[FileEntry],
        *,
        weights_only: bool = False,
    ) -> Path:
        """Make ``part``, whose ``files`` are on disk, the checkpoint of ``step``, or its weights alone.

        Returns its folder.
        """
        manifest = Manifest(step, policy_version, tuple(files))
        write_file(part, MANIFEST, manifest.encode())
        for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
            sync_folder(folder)
        target = self.weights_path(step) if weights_only else self.path(step)
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
        added = adopt(folder, name)
        replace_file(folder / MANIFEST, replace(before, files=(*files, *added)).encode())

    def prune(self, keep_last: int, keep: Collection[int] = ()) -> None:
        """Remove all but the newest ``keep_last`` checkpoints, and what is of the steps in ``keep``.

        Weights alone stay only where they are in ``keep``, and no checkpoint has them too.
        """
        steps = self.steps()
        for step in steps[: max(len(steps) - keep_last, 0)]:
            if step not in keep:
                self._remove(self.path(step))
        for step in self.weights_steps():
            if step not in keep or step in steps:
                self._remove(self.weights_path(step))

    def clear_parts(self) -> None:
        """Remove what earlier processes did not come to seal."""
        if self.folder.is_dir():
            for part in self.folder.glob(f".*{_PART}*"):
                shutil.rmtree(part, ignore_errors=True)

    def set_aside(self, after: int) -> None:
        """Rename what is of steps after this one: it is of a history that the run goes back from."""
        found = [(step, self.path(step)) for step in self.steps()]
        found += [(step, self.weights_path(step)) for step in self.weights_steps()]
        for step, folder in found:
            if step > after:
                target = folder.with_name(f"{folder.name}{_ASIDE}")
                if target.exists():
                    shutil.rmtree(target)
                folder.rename(target)
                sync_folder(self.folder)
                log.warning("%s was rolled back, and is now %s", folder, target.name)
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
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / _BEST} is damaged ({error}); delete it: the next evaluation writes it anew"
            ) from error

    def set_best(self, best: Best) -> None:
        document = {"step": best.step, "eval/reward_mean": best.reward_mean}
        replace_file(self.folder / _BEST, (json.dumps(document) + "\n").encode())

    def _named(self, pattern: re.Pattern[str]) -> list[int]:
        """The numbers in the names that fit, ascending."""
        if not self.folder.is_dir():
            return []
        names = (pattern.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def _remove(self, folder: Path) -> None:
        # Under another name first: one that is removed halfway is no checkpoint, and goes at the next start.
        part = folder.with_name(f".{folder.name}{_PART}{secrets.token_hex(4)}")
        folder.rename(part)
        sync_folder(self.folder)
        shutil.rmtree(part)
