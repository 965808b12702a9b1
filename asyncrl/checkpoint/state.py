"""What the controller puts into a checkpoint: scalars and books, as JSON.

Invariants:
- Everything is of one moment between two updates: version, books, queue and learner belong together.
- What can be derived is not kept: the data stream is a function of the ledger's next ordinal, the learning
  rate of the policy version, every draw of its key.
- What is not retired in ``frontier`` and not among the ready groups beside it is issued again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter

from asyncrl.errors import CheckpointError, LedgerError
from asyncrl.ledger import Frontier, Ledger
from asyncrl.types import Metrics

STATE: Final = "state.json"
CONFIG: Final = "config.yaml"
LEARNER: Final = "learner"
CRITIC: Final = "critic"
REFERENCE: Final = "reference"
"""Folders of a checkpoint, named after the sections of the config. A reference that the learner holds is in
the learner's."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The controller's state between two updates."""

    step: int
    """Updates tried so far."""
    version: int
    """Policy updates behind the weights."""
    frontier: Frontier
    kl_coefficient: float | None
    """Of the next update; None: that of the config."""
    moments: Mapping[str, float]
    """Of the rewards so far, as ``CreditAssignment.state`` gives them."""
    lengths: Mapping[str, int]
    """Sums of ``LengthBias``."""
    bad_steps: int
    """Updates in a row, up to now, that were not finite."""
    unusable: Mapping[str, int]
    """Groups in a row, up to now, that could not be trained on, by reason."""
    elapsed_s: float
    """Time of the run so far: where ``time`` of metrics.jsonl goes on."""
    seed: int
    data: str
    """Fingerprint of the training prompts and their order."""
    models: Mapping[str, str]
    """Fingerprints of the models that the run started from, by the config key that names each."""
    learner: bool
    """Whether the learner's state is in the checkpoint; before the first update it is the start model's."""
    inherited: int = 0
    """Retired ordinals whose lines are in another run's ledger, from a checkpoint of which this one began."""
    reference_version: int | None = None
    """Of a reference that follows the policy: the version that it took last."""
    lines: tuple[Metrics, ...] = field(default=())
    """Lines of metrics.jsonl that waited for an evaluation."""
    poisoned: Mapping[str, str] = field(default_factory=dict)
    """Prompts of which generators died, by uid, each with the reason."""

    def encode(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @staticmethod
    def decode(data: bytes, name: str) -> RunState:
        """The state that was encoded; ``name`` stands in a CheckpointError for where it came from."""
        try:
            _checks().validate_json(data)
            document: dict[str, Any] = json.loads(data)
            frontier = document["frontier"]
            document["frontier"] = Frontier(
                frontier["lowest"], tuple(frontier["retired_above"]), frontier["final_counts"]
            )
            document["lines"] = tuple(document["lines"])
            state = RunState(**document)
            Ledger.restore(state.frontier)
            if min(state.step, state.version) < 0 or any("step" not in line for line in state.lines):
                raise ValueError(f"step {state.step}, version {state.version}, or a line without its step")
            return state
        except (ValueError, KeyError, TypeError, RecursionError, LedgerError) as error:
            raise CheckpointError(
                f"{name} is not a run's state as this version of asyncrl writes it ({error}); resume with "
                "the version that wrote it"
            ) from error


@cache
def _checks() -> TypeAdapter[RunState]:
    """What says whether each value is of its field's type."""
    return TypeAdapter(RunState)
