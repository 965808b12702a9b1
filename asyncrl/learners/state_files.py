"""Files of a training engine's state: parameters, masters and moments by name, whoever had which part.

Each rank writes ``rank-00000-of-00002.safetensors`` with its fragments, flat and in float32, under the names
``weight/<parameter>``, ``exp_avg/<parameter>`` and ``exp_avg_sq/<parameter>``, and a ``.json`` of the same
name that says which part of which parameter each is, and how many optimizer updates that has seen.

Invariants:
- What is read does not depend on how many ranks wrote it, nor on their ZeRO stage or tensor parallelism.
- Plain safetensors, which any reader of that format opens; no pickle.
- A parameter of which a part is missing, or there twice, is a CheckpointError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import NonNegativeInt, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.checkpoint.files import FileEntry, sync_folder, write_file, written
from asyncrl.errors import CheckpointError

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
MOMENTS: Final[tuple[Kind, ...]] = ("exp_avg", "exp_avg_sq")
_FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Slab:
    """What one of several ranks has of a tensor that they divide: ``first`` to ``last`` of a dimension."""

    dim: NonNegativeInt
    first: NonNegativeInt
    last: NonNegativeInt

    def of(self, whole: Tensor) -> Tensor:
        """The slab, a view."""
        return whole.narrow(self.dim, self.first, self.last - self.first)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a parameter a rank has."""

    name: str
    shape: tuple[NonNegativeInt, ...]
    """Of the whole parameter."""
    start: NonNegativeInt
    """Where the part begins in the flattened parameter, or in its flattened slab."""
    numel: NonNegativeInt
    updates: NonNegativeInt
    """Optimizer updates that the parameter has seen; 0: it has no moments."""
    slab: Slab | None = None
    """Of the ranks that divide the parameter, what this one has; None: it is not divided."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What there is of it."""
        return ("weight", *MOMENTS) if self.updates else ("weight",)


_PARTS: Final = TypeAdapter(list[Part])
"""From JSON; files of runs before tensor parallelism name no slab."""


def write_state(
    folder: Path, rank: int, ranks: int, parts: Sequence[Part], tensors: Iterable[tuple[str, Tensor]]
) -> list[FileEntry]:
    """Write one rank's ``parts`` durably. ``tensors``: for each part and kind of it, in order, its name
    ``kind/parameter`` and the values, (numel,) float32 on the CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"rank-{rank:05}-of-{ranks:05}"
    document = {"format_version": _FORMAT_VERSION, "ranks": ranks, "parts": [asdict(part) for part in parts]}
    index = write_file(folder, f"{stem}.json", (json.dumps(document, indent=1) + "\n").encode())
    header, offset = {}, 0
    for part in parts:
        for kind in part.kinds:
            end = offset + 4 * part.numel
            header[f"{kind}/{part.name}"] = {
                "dtype": "F32",
                "shape": [part.numel],
                "data_offsets": [offset, end],
            }
            offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with written(folder / f"{stem}.safetensors") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        # Not by the library's own writer, which keeps the interpreter from training meanwhile.
        for name, (expected, tensor) in zip(header, tensors, strict=True):
            assert name == expected, f"{expected} in place of {name}"
            if tensor.numel():
                file.write(tensor.numpy().data)
    sync_folder(folder)
    return [index, file.entry(f"{stem}.safetensors")]


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A whole parameter, over all ranks that wrote it."""

    name: str
    shape: tuple[int, ...]
    updates: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class SavedState:
    """What all ranks wrote into ``folder``. Raises CheckpointError for what does not fit together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[str, list[tuple[str, Part]]] = {}  # by parameter: the file's stem, and the part
        for stem, part in _indices(folder):
            self._parts.setdefault(part.name, []).append((stem, part))
        self.parameters = {name: self._whole(name, parts) for name, parts in self._parts.items()}

    def read(
        self, kind: Kind, name: str, start: int = 0, numel: int | None = None, slab: Slab | None = None
    ) -> Tensor:
        """Values ``start`` to ``start + numel`` of the flattened parameter, or of a slab of it: (numel,)
        float32 on the CPU."""
        parts = self._parts[name]
        if slab is not None or parts[0][1].slab is not None:
            values = self._divided(kind, name)
            values = (values if slab is None else slab.of(values)).flatten()
            return values[start : None if numel is None else start + numel]
        end = self.parameters[name].numel if numel is None else start + numel
        return self._run(kind, parts, start, end)

    def _divided(self, kind: Kind, name: str) -> Tensor:
        """A whole parameter in its shape, from the slabs that it was written in, or from one piece."""
        saved, parts = self.parameters[name], self._parts[name]
        whole = torch.empty(saved.shape, dtype=torch.float32)
        for slab in {part.slab for _, part in parts}:
            target = whole if slab is None else slab.of(whole)
            own = [(stem, part) for stem, part in parts if part.slab == slab]
            target.copy_(self._run(kind, own, 0, target.numel()).view(target.shape))
        return whole

    def _run(self, kind: Kind, parts: Sequence[tuple[str, Part]], start: int, end: int) -> Tensor:
        """Values ``start`` to ``end`` of what the parts are flattened pieces of."""
        result = torch.empty(end - start, dtype=torch.float32)
        for stem, part in parts:
            first, last = max(start, part.start), min(end, part.start + part.numel)
            if first >= last:
                continue
            path = self._folder / f"{stem}.safetensors"
            try:
                with safe_open(path, framework="pt") as file:
                    values = file.get_slice(f"{kind}/{part.name}")[first - part.start : last - part.start]
                result[first - start : last - start] = values
            except (OSError, SafetensorError, RuntimeError, IndexError, TypeError) as error:
                raise CheckpointError(f"{path}: {kind}/{part.name} cannot be read: {error}") from error
        return result

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless these are the parameters, by name and shape."""
        found = {name: parameter.shape for name, parameter in self.parameters.items()}
        if found == shapes:
            return
        differing = sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
        first = differing[0]
        raise CheckpointError(
            f"{self._folder} is of another model: {len(differing)} trained tensors differ, the first is "
            f"{first} with shape {found.get(first)} in the checkpoint and {shapes.get(first)} in the model; "
            "expected the model, and the learner.lora, that the checkpoint was made with"
        )

    def _whole(self, name: str, parts: list[tuple[str, Part]]) -> SavedParameter:
        shapes = {part.shape for _, part in parts}
        updates = {part.updates for _, part in parts}
        shape = parts[0][1].shape
        if len(shapes) > 1 or len(updates) > 1 or not _cover(shape, [part for _, part in parts]):
            raise CheckpointError(
                f"{self._folder}: the parts of {name} do not add up: found "
                f"{[(part.start, part.numel, part.updates) for _, part in parts]} (start, length, updates) "
                f"of {sorted(shapes)}; expected one of each of its {prod(shape)} values"
            )
        return SavedParameter(name, shape, updates.pop())


def _cover(shape: tuple[int, ...], parts: Sequence[Part]) -> bool:
    """Whether the parts are each value of a parameter once: slabs in a row, and runs in a row in each."""
    slabs = {part.slab for part in parts}
    if None in slabs:
        return len(slabs) == 1 and _in_a_row([(p.start, p.numel) for p in parts], prod(shape))
    divided = [slab for slab in slabs if slab is not None]
    dim = divided[0].dim
    if any(slab.dim != dim for slab in divided) or dim >= len(shape) or not shape[dim]:
        return False
    if not _in_a_row([(slab.first, slab.last - slab.first) for slab in divided], shape[dim]):
        return False
    each = prod(shape) // shape[dim]  # values of one place along the dimension
    return all(
        _in_a_row([(p.start, p.numel) for p in parts if p.slab == slab], each * (slab.last - slab.first))
        for slab in divided
    )


def _in_a_row(runs: Sequence[tuple[int, int]], total: int) -> bool:
    """Whether runs, (start, length) each, are 0 to ``total`` without a gap and without an overlap."""
    ends = accumulate((length for _, length in sorted(runs)), initial=0)
    in_a_row = all(start == end for (start, _), end in zip(sorted(runs), ends, strict=False))
    return in_a_row and sum(length for _, length in runs) == total


def _indices(folder: Path) -> Iterator[tuple[str, Part]]:
    files = sorted(folder.glob("rank-*.json"))
    for path in files:
        try:
            document = json.loads(path.read_bytes())
            version, ranks = document["format_version"], document["ranks"]
            parts = _PARTS.validate_python(document["parts"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if version != _FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this asyncrl reads {_FORMAT_VERSION}"
            )
        if ranks != len(files):
            raise CheckpointError(f"{folder} has files of {len(files)} ranks, {path.name} says {ranks}")
        yield from ((path.stem, part) for part in parts)
    if not files:
        raise CheckpointError(f"{folder} holds no state of a training engine: no rank-*.json in it")
