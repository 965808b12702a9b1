"""One rank's training engine on DeepSpeed, ZeRO 0 to 3: a ``TrainingEngine``, with its invariants.

Nothing else imports deepspeed, but for the attention in ``sequence``. What it does unasked is undone here:
it averages gradients over ranks, so losses are multiplied by the number of ranks; it counts accumulation
steps, so it is told before each forward pass whether this is the last; and its float32 stage 0 checks no
gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import Dtype, EngineSection
from asyncrl.learners.deepspeed_state import find_fragments
from asyncrl.learners.optimizer_state import Fragment, OptimizerState, StateCopy
from asyncrl.learners.rank_group import RankGroup
from asyncrl.learners.state_files import Part, SavedState, Slab, write_state
from asyncrl.learners.tensor import TensorParallel, whole_tensors

_LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default for reduce and all-gather buckets, in elements."""
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


class DeepSpeedEngine:
    """``group`` is this rank's place among the others, which it has yet to join.

    ``tensor_parallel``: how many ranks divide the layers.
    """

    def __init__(
        self,
        settings: EngineSection,
        group: RankGroup,
        *,
        dtype: Dtype,
        deterministic: bool = False,
        tensor_parallel: int = 1,
    ) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self.device = group.device
        self.all_sum = group.all_sum
        self.all_max = group.all_max
        self.all_gather = group.all_gather
        self.replicas = group.replicas
        self.tensors: TensorParallel | None = None
        self._group = group
        self._settings = settings
        self._dtype = dtype
        self._deterministic = deterministic
        self._tensor_parallel = tensor_parallel
        self._engine: Any = None
        self._is_offloaded = False

    @property
    def sharing(self) -> Any:
        return self._group.sharing

    def prepare(self) -> None:
        if self.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        self._group.prepare(deterministic=self._deterministic)

    def build(self, model: nn.Module) -> None:
        import deepspeed

        self._join_ranks()
        whole = whole_tensors(model) if self._tensor_parallel > 1 else {}
        trained = [p for p in model.parameters() if p.requires_grad]
        config = self._engine_config(sum(p.numel() for p in trained))
        self._engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        if whole:
            self.tensors = TensorParallel(self.module, whole, self.sharing)
        fragments = find_fragments(self.module, self.optimizer, self.rank, self.tensors)
        self._state = OptimizerState(
            {name: self._shape(name, p) for name, p in self.module.named_parameters() if p.requires_grad},
            getattr(self.optimizer, "optimizer", self.optimizer),
            fragments,
            owned=self._owned(fragments),
        )
        self._copy = StateCopy(self._state)

    @property
    def module(self) -> Any:
        return self._engine.module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, or the plain one where it wraps none around it."""
        return self._engine.optimizer

    def __call__(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def accumulate(self, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * (self.world_size // self._tensor_parallel))

    def update(self, lr: float) -> tuple[float, bool]:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._is_plain:
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if not norm.isfinite():
                self._engine.zero_grad()
                return norm.item(), True
            parameters = self._engine.module.parameters()
            torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.max_grad_norm, norm)
            self._engine.step()
            return norm.item(), False
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), not self._engine.was_step_applied()

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
        if not self.is_sharded or not parameters:
            yield [parameter.detach() for parameter in parameters]
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield [parameter.detach() for parameter in parameters]

    def part(self, parameter: Any) -> Tensor:
        own: Tensor = parameter.ds_tensor.detach()
        return own

    def collect(
        self, numels: Sequence[int], parts: Iterable[Tensor], dtype: torch.dtype, whole: Tensor | None
    ) -> None:
        self._group.collect(numels, parts, dtype, whole)

    def local_parameters(self) -> list[Tensor]:
        parameters: list[Any] = list(self._engine.module.parameters())
        return [self.part(p) if self.is_sharded else p.detach() for p in parameters]

    def local_parts(self) -> list[Part]:
        found = []
        for name, parameter in self._engine.module.named_parameters():
            if not self.is_sharded:
                found.append(Part(name, tuple(parameter.shape), 0, parameter.numel(), 0))
                continue
            size = parameter.ds_tensor.numel()
            start = min(self.rank * size, parameter.ds_numel)
            numel = min(size, parameter.ds_numel - start)
            found.append(Part(name, _shape(parameter), start, numel, 0))
        return found

    @property
    def is_sharded(self) -> bool:
        return self._settings.zero_stage == 3

    def drop_gathered(self) -> None:
        if self.is_sharded:
            # Those that are too small to be worth it stay gathered otherwise.
            for parameter in self._engine.module.parameters():
                parameter.partition(param_list=[parameter], has_been_updated=False)

    def offload(self) -> None:
        # With ZeRO 2, and with 1 in float32: other optimizers cannot do so.
        if self._is_offloaded or not hasattr(self.optimizer, "offload_states") or self.is_sharded:
            return
        self._engine.offload_states(pin_memory=self.device.type == "cuda")
        self._move_frozen("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._is_offloaded = True

    def reload(self) -> None:
        if not self._is_offloaded:
            return
        self._engine.reload_states()
        self._move_frozen(self.device)
        self._is_offloaded = False

    def copy_state(self, *, weights_only: bool = False) -> None:
        self._copy.take(weights_only=weights_only)

    def write_state(self, folder: Path) -> list[FileEntry]:
        return write_state(folder, self.rank, self.world_size, self._copy.parts, self._copy.tensors())

    def load_state(self, folder: Path) -> None:
        saved = SavedState(folder)
        self._state.load(saved)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self._rewrite(parameter, partial(saved.read, "weight", name, slab=self._slab(name)))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        self._group.close()

    @torch.no_grad()
    def _rewrite(self, parameter: nn.Parameter, read: Callable[[], Tensor]) -> None:
        """Overwrite a parameter on every rank; collective for ZeRO-3, where rank 0 alone reads."""
        if not self.is_sharded:
            parameter.copy_(read().view(parameter.shape))
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self.rank == 0:
                parameter.copy_(read().view(parameter.shape))

    def _owned(self, fragments: list[Fragment]) -> list[Fragment]:
        """Which of them this rank has to write: where all have everything, each its share."""
        if self.tensors is not None and self.tensors.index > 0:
            return [fragment for fragment in fragments if fragment.slab is not None]
        return fragments[self.rank :: self.world_size] if self._is_plain else fragments

    def _slab(self, name: str) -> Slab | None:
        """What this rank has of a parameter that ranks divide."""
        return None if self.tensors is None else self.tensors.slabs.get(name)

    def _shape(self, name: str, parameter: Any) -> tuple[int, ...]:
        """Of the whole parameter."""
        if self.tensors is not None and name in self.tensors.slabs:
            return self.tensors.shapes[name]
        return _shape(parameter)

    def _move_frozen(self, device: torch.device | str) -> None:
        """DeepSpeed moves what it trains, and no more."""
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(device)

    @property
    def _is_plain(self) -> bool:
        """Without ZeRO and in float32, DeepSpeed wraps the optimizer in nothing that checks it."""
        return self._settings.zero_stage == 0 and self._dtype == "float32" and self._tensor_parallel == 1

    def _join_ranks(self) -> None:
        import deepspeed

        self._group.join()
        # An all-reduce for inference that is compiled on first use, for a minute or more, and that
        # training never calls.
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
        deepspeed.init_distributed(dist_backend=self._group.backend, auto_mpi_discovery=False, verbose=False)

    def _engine_config(self, parameters: int) -> dict[str, Any]:
        settings = self._settings
        # Even, as DeepSpeed wants it: a value head makes the number of parameters odd.
        bucket = min(_LARGEST_BUCKET, parameters + parameters % 2)
        config: dict[str, Any] = {
            "train_batch_size": self.world_size,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if self._is_plain else settings.max_grad_norm,
            "steps_per_print": 2**60,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": settings.lr,
                    "betas": list(settings.betas),
                    "eps": settings.eps,
                    "weight_decay": settings.weight_decay,
                    "torch_adam": True,
                },
            },
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": settings.zero_stage,
                # Buffers of this many elements are allocated whole: no larger than the model.
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "overlap_comm": self.device.type == "cuda",
            },
        }
        if self._dtype == "bfloat16":
            config["bf16"] = {"enabled": True}
            # Micro-batches add up in float32, which DeepSpeed offers from stage 1 on.
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config["zero_optimization"]["stage"] = max(settings.zero_stage, 1)
        if self._tensor_parallel > 1:
            # Logits stay whole: a loss needs the whole distribution of a token.
            config["tensor_parallel"] = {
                "autotp_size": self._tensor_parallel,
                "vocab_parallel_lm_head": False,
            }
            # Without ZeRO, DeepSpeed's norm of a gradient lacks what the other ranks have of it.
            config["zero_optimization"]["stage"] = max(settings.zero_stage, 1)
        return config


def _shape(parameter: Any) -> tuple[int, ...]:
    """Of what all the ranks of ZeRO 3 have together."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
