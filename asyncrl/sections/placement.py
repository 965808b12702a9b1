"""What runs where, and how weights travel."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from asyncrl.sections.base import Names, Section, Strategy


class WeightSyncSection(Section):
    backend: Literal["auto", "nccl", "gloo", "ipc", "shm"] = "auto"
    """auto: nccl between GPUs, gloo otherwise. Colocated with vLLM: ipc on GPUs, shm on CPUs, which hand
    weights over in memory that a learner rank and the generator beside it both have open."""
    bucket_mb: PositiveFloat = 256.0
    """Megabytes (2**20 bytes) that travel in one broadcast."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that one push may take before its group is rebuilt without the silent receiver."""
    overlap: bool = False
    """Copy the weights out at the step's boundary and train on while the copy is sent."""
    adapter_only: bool = False
    """With ``learner.lora`` and the torch engine: send the adapters alone. Generators keep a copy of the
    start model and merge them themselves, while they generate."""
    canary_every: NonNegativeInt = 10
    """Pushes from one canary to the next: fixed tokens whose log-probs on every generator have to be the
    learner's. The first push is always checked, and every restarted generator. With ``overlap`` the
    learner stands still for its half. Colocated, where it costs next to nothing, each version is checked.
    0: none at all."""
    canary_tolerance: PositiveFloat | None = None
    """Largest mean difference of the canary's log-probs, beyond which the run ends. Null: 0.01 in float32,
    0.2 in bfloat16."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes that travel in one broadcast."""
        return int(self.bucket_mb * 2**20)


class SidePlacementSection(Section):
    """Where in a cluster one side goes."""

    strategy: Strategy = "PACK"
    """Over as few nodes as possible (PACK), on one (STRICT_PACK), evenly over all (SPREAD), or each on one of
    its own (STRICT_SPREAD)."""
    nodes: Names | None = None
    """Nodes that it may be on, by address, host name or id; null: any."""
    cpus: NonNegativeFloat | None = None
    """CPUs that are set aside for each of its actors. Null: its ``threads`` on CPU, none beside a GPU.
    0: none, so that actors share cores."""


class PlacementSection(Section):
    mode: Literal["split", "colocated"] = "split"
    """split: generators and learner on devices of their own. colocated: a generator and a learner rank on one
    device, in turns. With the torch engine they are one process with the same parameters, and no weights are
    sent (ZeRO 0 to 2); with vLLM two processes, of which one has the device's memory at a time."""
    address: str | None = None
    """Ray cluster to join; null: start one on this machine."""
    nodes: PositiveInt | None = None
    """Nodes of the cluster that the run is for: with fewer it does not start, of more it takes so many. Null:
    whatever there is."""
    learner: SidePlacementSection = SidePlacementSection()
    """Where the learner's ranks go, and those of a critic."""
    generators: SidePlacementSection = SidePlacementSection()
    """Where the generators go. Each is on one node, with all its workers."""
