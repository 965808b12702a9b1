"""The engines that sample."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from asyncrl.generators.vllm_options import worker_count
from asyncrl.sections.base import Section


class GeneratorsSection(Section):
    backend: Literal["torch", "vllm"] = "torch"
    """The engine; ``torch`` is the embedded one."""
    replicas: PositiveInt = 1
    """Engines, each with the whole model; with ``max``, those that a run starts with."""
    min: PositiveInt | None = None
    """Fewest that a run goes on with; with fewer it stops after a checkpoint. Null: 1."""
    max: PositiveInt | None = None
    """Most: in a cluster, more join while the run goes on as soon as there is room for them. Null: as many as
    ``replicas``, which take the place of those whose node went away."""
    below_min_s: PositiveFloat = 300.0
    """Seconds that a run bears fewer than ``min``, where others may still join."""
    slots: PositiveInt = 64
    """Sequences that one engine samples at the same time."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, then mps, then cpu."""
    threads: PositiveInt = 1
    """Threads of one engine on CPU (vllm: of each of its workers, unless they are pinned to cores)."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Cores to pin the engines to, dealt out in turn; null: unpinned."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM, by its own names, e.g. ``tensor_parallel_size``."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that an engine may take to load the model and warm up."""
    health_every_s: PositiveFloat = 1.0
    """Seconds between two pings of a replica."""
    health_timeout_s: PositiveFloat = 3.5
    """Seconds that a replica has to answer a ping before it is taken for dead."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one replica in a row, no group completed in between, before it is left dead."""
    logprob_diff_alarm: PositiveFloat | None = None
    """Warn when the mean difference between the engine's and the learner's log-probs of the same tokens
    is above this; null: 0.01 in float32, 0.1 in bfloat16."""

    @property
    def fewest(self) -> int:
        """Replicas that a run does not go on without."""
        return self.min or 1

    @property
    def most(self) -> int:
        """Replicas that a run may have at a time."""
        return self.max or self.replicas

    @property
    def workers(self) -> int:
        """Processes that share one replica's model: each is a rank of the push group."""
        return worker_count(self.vllm) if self.backend == "vllm" else 1
