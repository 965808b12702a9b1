"""One rank's training engine on torch's FSDP2 (``fully_shard``): a ``TrainingEngine``, with its invariants.

Each transformer block is a unit that is gathered for its passes, and what is outside of them is another. The
sharded parameters are float32 whatever the model computes in: they are their own masters.

Invariants:
- Between two calls a rank holds its rows of each parameter and nothing gathered.
- The optimizer knows plain tensors: this rank's rows, in the memory that FSDP2 gathers from.
- Gradients are summed over ranks in float32, micro-batch by micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import Dtype, EngineSection
from asyncrl.errors import InvariantError
from asyncrl.learners.optimizer_state import Fragment, OptimizerState, StateCopy
from asyncrl.learners.rank_group import RankGroup
from asyncrl.learners.state_files import Part, SavedState, write_state

log = logging.getLogger(__name__)


class FsdpEngine:
    """``group`` is this rank's place among the others, which it has yet to join."""

    is_sharded = True
    tensors = None

    def __init__(
        self, settings: EngineSection, group: RankGroup, *, dtype: Dtype, deterministic: bool = False
    ) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.device = group.device
        self.all_sum = group.all_sum
        self.all_max = group.all_max
        self.all_gather = group.all_gather
        self.replicas = group.replicas
        self.sharing = group.sharing
        self._group = group
        self._settings = settings
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._deterministic = deterministic
        self._model: Any = None

    def prepare(self) -> None:
        self._group.prepare(deterministic=self._deterministic)

    def build(self, model: nn.Module) -> None:
        self._group.join()
        self._units: list[Any] = [*_blocks(model), model]
        self._shard()
        self._model = model
        # Only now, that FSDP2 has gathered each unit once, do its rows stay where they are.
        with torch.no_grad():
            self._rows = {name: _rows(parameter) for name, parameter in model.named_parameters()}
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        settings = self._settings
        self.optimizer = torch.optim.AdamW(
            [self._rows[name] for name in trained if self._rows[name].numel()],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._state = OptimizerState(
            {name: tuple(parameter.shape) for name, parameter in trained.items()},
            self.optimizer,
            [
                Fragment(part.name, part.shape, part.start, part.numel, self._rows[part.name], 0)
                for part in self.local_parts()
                if part.name in trained and part.numel
            ],
        )
        self._copy = StateCopy(self._state)

    @property
    def module(self) -> Any:
        return self._model

    def __call__(self, **inputs: Any) -> Any:
        found = self._model(**inputs)
        if not torch.is_grad_enabled():
            # Where no backward pass follows, nothing else would let go of what was gathered.
            self.drop_gathered()
        return found

    def accumulate(self, *, last: bool) -> None:
        """Nothing: each micro-batch adds its gradient to the rank's rows at once."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, lr: float) -> tuple[float, bool]:
        gradients = self._take_gradients()
        norms = [torch.linalg.vector_norm(gradient).double() for gradient in gradients]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if norms:
            square += torch.stack(norms).square().sum()
        self.all_sum(square)
        norm = square.sqrt().item()
        finite = square.isfinite().item()
        if finite:
            scale = self._settings.max_grad_norm / (norm + 1e-6)
            if scale < 1.0:
                torch._foreach_mul_(gradients, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, not finite

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
        with torch.no_grad():
            whole = [self._whole(parameter) for parameter in parameters]
        yield whole

    def part(self, parameter: nn.Parameter) -> Tensor:
        rows, size = _rows(parameter), self._part_numel(parameter)
        # FSDP2 keeps its padding behind the rows: it gathers parts of one size itself.
        behind = rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset()
        if behind < size:
            raise InvariantError(
                f"found {behind} elements where FSDP2 keeps a rank's part of a {tuple(parameter.shape)} "
                f"parameter, expected {size}, its padding included"
            )
        return rows.as_strided((size,), (1,))

    def collect(
        self, numels: Sequence[int], parts: Iterable[Tensor], dtype: torch.dtype, whole: Tensor | None
    ) -> None:
        self._group.collect(numels, parts, dtype, whole)

    def local_parameters(self) -> list[Tensor]:
        return list(self._rows.values())

    def local_parts(self) -> list[Part]:
        found = []
        for name, parameter in self._model.named_parameters():
            start = min(self.rank * self._part_numel(parameter), parameter.numel())
            found.append(Part(name, tuple(parameter.shape), start, self._rows[name].numel(), 0))
        return found

    def drop_gathered(self) -> None:
        for unit in self._units:
            unit.reshard()

    def offload(self) -> None:
        """Nothing: the config allows no turns with generators on a device."""

    def reload(self) -> None:
        """Nothing, likewise."""

    def copy_state(self, *, weights_only: bool = False) -> None:
        self._copy.take(weights_only=weights_only)

    def write_state(self, folder: Path) -> list[FileEntry]:
        return write_state(folder, self.rank, self.world_size, self._copy.parts, self._copy.tensors())

    def load_state(self, folder: Path) -> None:
        self._state.load(SavedState(folder))
        self.drop_gathered()

    def close(self) -> None:
        self._group.close()

    def _shard(self) -> None:
        """Leave this rank its rows of each parameter, unit by unit, on the device."""
        world = dist.group.WORLD
        assert world is not None, "join() made it"
        mesh = DeviceMesh.from_group(world, self.device.type)
        # Inputs stay as they come: a model's own float32 islands are its own business.
        policy = MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for unit in self._units:
            _to_masters(unit)
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=self._settings.zero_stage == 3
            )
            assert isinstance(unit, FSDPModule)
            # A rank's loss is its share of the whole one: gradients add up, and gloo knows no other way.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for unit in self._units:
            unit.unshard()
            unit.reshard()

    def _take_gradients(self) -> list[Tensor]:
        """Of the optimizer's tensors, where it will look for them."""
        found = []
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            rows, gradient = self._rows[name], _rows(parameter.grad)
            parameter.grad = None
            if rows.numel():
                rows.grad = gradient
                found.append(gradient)
        return found

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        own = self.part(parameter).to(self._dtype)
        if self.world_size == 1:
            return own.view(parameter.shape)
        padded = own.new_empty(own.numel() * self.world_size)
        dist.all_gather_single(padded, own)
        return padded[: parameter.numel()].view(parameter.shape)

    def _part_numel(self, parameter: nn.Parameter) -> int:
        """Elements of a rank's part, of the same number of rows on each, padding included."""
        rows = parameter.shape[0]
        return -(-rows // self.world_size) * (parameter.numel() // max(rows, 1))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, by what the model says must not be split."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        log.warning("%s names no blocks: all of it is gathered at once", type(model).__name__)
    return blocks


@torch.no_grad()
def _to_masters(unit: nn.Module) -> None:
    """float32, for what no inner unit has taken."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


@torch.no_grad()
def _rows(sharded: Tensor) -> Tensor:
    """This rank's rows of a parameter or a gradient."""
    assert isinstance(sharded, DTensor)
    return sharded.to_local()
