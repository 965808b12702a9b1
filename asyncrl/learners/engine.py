"""One rank's training engine on DeepSpeed: its process, its ranks' meeting, its model and optimizer.

Nothing else imports deepspeed. What it does unasked is undone here: it averages gradients over ranks, so
losses are multiplied by the number of ranks; it counts accumulation steps, so it is told before each
forward pass whether this is the last; and its float32 stage 0 checks no gradient.

Invariants:
- Every rank gets the same calls in the same order. One engine a process.
- An update whose gradient is not finite, on any rank, is skipped on every rank: parameters and optimizer
  state keep their bits.
- The learning rate is that of the call; the engine holds no schedule.
- Parameters, masters, moments and their number of updates are all of its state.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import Dtype, EngineSection
from asyncrl.errors import ConfigError
from asyncrl.learners.optimizer_state import OptimizerState, StateCopy
from asyncrl.learners.state_files import Part, SavedState, write_state

_LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default for reduce and all-gather buckets, in elements."""
_SHARED_MEMORY_OP = "deepspeed_shm_comm"


class TrainingEngine:
    """A model that is trained by its ranks together: ``prepare``, then ``build``, then the rest.

    ``section`` is the settings' name in the config, for messages. ``master`` is host and port where the
    ranks meet; rank 0 listens there, on that address alone. Raises ConfigError for a device that is not
    there.
    """

    def __init__(
        self,
        settings: EngineSection,
        section: str,
        *,
        dtype: Dtype,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        deterministic: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._settings = settings
        self._section = section
        self._dtype = dtype
        self._master = master
        self._deterministic = deterministic
        self.device = torch.device(self._pick_device())
        self._engine: Any = None
        self._is_offloaded = False

    def prepare(self) -> None:
        """Make the process ready; before the model is loaded."""
        torch.set_num_threads(self._settings.threads)
        if self.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)

    def build(self, model: nn.Module) -> None:
        """Meet the other ranks, and take the model over; collective. What needs no gradient is frozen."""
        import deepspeed

        self._join_ranks()
        trained = [p for p in model.parameters() if p.requires_grad]
        config = self._engine_config(sum(p.numel() for p in trained))
        self._engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        self._state = OptimizerState(
            self.module, self.optimizer, rank=self.rank, ranks=self.world_size, gathered=self._rewritten
        )
        self._copy = StateCopy(self._state)

    @property
    def module(self) -> Any:
        """The model itself."""
        return self._engine.module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, or the plain one where it wraps none around it."""
        return self._engine.optimizer

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass; collective for ZeRO-3."""
        return self._engine(**inputs)

    def accumulate(self, *, last: bool) -> None:
        """Before the forward pass of each micro-batch: whether it is the update's last."""
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch: this rank's share of the update's loss, a scalar."""
        self._engine.backward(loss * self.world_size)

    def update(self, lr: float) -> tuple[float, bool]:
        """Apply the gradient; its norm before clipping, and whether it was skipped; collective."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._clips_itself:
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
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Whole parameters inside the block; collective for ZeRO-3, nothing to do below."""
        if self._settings.zero_stage < 3 or not parameters:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield

    def local_parameters(self) -> list[Tensor]:
        """This rank's own part of each parameter, as it lies in memory, in the model's order.

        After writing to them, ``drop_gathered``.
        """
        parameters: list[Any] = list(self._engine.module.parameters())
        if self._settings.zero_stage < 3:
            return [p.detach() for p in parameters]
        return [p.ds_tensor.detach() for p in parameters]

    def local_parts(self) -> list[Part]:
        """Which part of its parameter each of ``local_parameters`` is; padding is behind its ``numel``."""
        found = []
        for name, parameter in self._engine.module.named_parameters():
            if not self.is_sharded:
                found.append(Part(name, tuple(parameter.shape), 0, parameter.numel(), 0))
                continue
            start = self.rank * parameter.ds_tensor.numel()
            numel = min(parameter.ds_tensor.numel(), parameter.ds_numel - start)
            found.append(Part(name, tuple(parameter.ds_shape), start, max(numel, 0), 0))
        return found

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of every parameter (ZeRO 3), or all of them."""
        return self._settings.zero_stage == 3

    def drop_gathered(self) -> None:
        """Have the next forward pass gather every parameter anew: ZeRO-3 keeps small ones whole."""
        if self._settings.zero_stage == 3:
            for parameter in self._engine.module.parameters():
                parameter.partition(param_list=[parameter], has_been_updated=False)

    def offload(self) -> None:
        """Move weights, masters and moments to host memory; until ``reload``, only its state can be copied.

        With ZeRO 2, and 1 in float32, whose optimizer can do so. With others nothing moves: config checks
        allow them only on a CPU, where everything lies there already.
        """
        if self._is_offloaded or not hasattr(self.optimizer, "offload_states") or self.is_sharded:
            return
        self._engine.offload_states(pin_memory=self.device.type == "cuda")
        self._move_frozen("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._is_offloaded = True

    def reload(self) -> None:
        """Move them back; no effect where they are there."""
        if not self._is_offloaded:
            return
        self._engine.reload_states()
        self._move_frozen(self.device)
        self._is_offloaded = False

    def _move_frozen(self, device: torch.device | str) -> None:
        """DeepSpeed moves what it trains, and no more."""
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(device)

    def copy_state(self) -> None:
        """Copy this rank's part of the state, between two updates."""
        self._copy.take()

    def write_state(self, folder: Path) -> list[FileEntry]:
        """Write what was copied last into ``folder``, in any thread, also while updates run."""
        return write_state(folder, self.rank, self.world_size, self._copy.parts, self._copy.tensors())

    def load_state(self, folder: Path) -> None:
        """Go on from what any number of ranks wrote into ``folder``; collective. Raises CheckpointError."""
        self._state.load(SavedState(folder))

    @contextmanager
    def _rewritten(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Whole parameters inside the block, which rank 0 may write to for all; collective for ZeRO-3."""
        if self._settings.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0):
            yield

    def all_sum(self, values: Tensor) -> None:
        """Sum over the ranks, in place; collective."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)

    def all_max(self, values: Tensor) -> None:
        """Maximum over the ranks, in place; collective."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, (N,) each, any N: one tensor, padded with infinity; collective."""
        if self.world_size == 1:
            return values
        longest = torch.tensor(len(values), device=self.device)
        self.all_max(longest)
        padded = values.new_full((int(longest),), torch.inf)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)

    def close(self) -> None:
        """Leave the process group. Safe to call twice."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _clips_itself(self) -> bool:
        """Without ZeRO and in float32, DeepSpeed wraps the optimizer in nothing that checks it."""
        return self._settings.zero_stage == 0 and self._dtype == "float32"

    def _pick_device(self) -> str:
        wanted = self._settings.device
        if wanted == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"{self._section}.device is cuda, but torch finds 0 CUDA devices: use auto or cpu"
            )
        return wanted

    def _join_ranks(self) -> None:
        import deepspeed

        host, port = self._master
        timeout = timedelta(seconds=self._settings.start_timeout_s)
        # Bound by us to that one address: left to itself the store listens on every interface.
        listener = socket.create_server((host, port)).detach() if self.rank == 0 else None
        store = TCPStore(
            host,
            port,
            is_master=self.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
            use_libuv=True,
        )
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        step_timeout = timedelta(seconds=self._settings.step_timeout_s)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=step_timeout
        )
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            # One visible device a rank: placement sees to that.
            LOCAL_RANK="0",
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
        # An all-reduce for inference that is compiled on first use, for a minute or more, and that
        # training never calls.
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)

    def _engine_config(self, parameters: int) -> dict[str, Any]:
        settings = self._settings
        # Even, as DeepSpeed wants it: a value head makes the number of parameters odd.
        bucket = min(_LARGEST_BUCKET, parameters + parameters % 2)
        config: dict[str, Any] = {
            "train_batch_size": self.world_size,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if self._clips_itself else settings.max_grad_norm,
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
        return config
