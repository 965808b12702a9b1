"""The books of the loop: what it knows of a run, taken out of its parts in one moment and put back into them.

Invariant: ``restore`` of what ``capture`` gave leaves every part as it was, but for groups that were running:
they count as never admitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.saver import Issued
from asyncrl.checkpoint.state import RunState
from asyncrl.credit import CreditAssignment
from asyncrl.metrics import LengthBias, StepMeter
from asyncrl.metrics_lines import MetricsLines
from asyncrl.outstanding import OutstandingGroups
from asyncrl.pushes import Reference
from asyncrl.roles.kl_control import KLControl
from asyncrl.waiting import now


@dataclass(slots=True)
class Books:
    """The parts of the loop that remember something, and what the run is ``of``."""

    groups: OutstandingGroups
    credit: CreditAssignment
    kl: KLControl
    meter: StepMeter
    lines: MetricsLines
    reference: Reference | None
    seed: int
    of: Origin
    poisoned: dict[str, str] = field(default_factory=dict)
    """The prompts that are not tried again, by uid, each with the reason."""
    bad_steps: int = 0
    """Updates in a row, up to now, that were not finite."""
    inherited: int = 0
    """Ordinals that were retired in another run's folder."""
    elapsed_before_s: float = 0.0
    """How long the run had lasted when it was resumed."""
    started_at: float = 0.0
    """By the loop's clock."""

    def elapsed_s(self) -> float:
        """Seconds that the run has lasted so far, those before a resume included."""
        return self.elapsed_before_s + now() - self.started_at

    def capture(self) -> tuple[RunState, list[Issued]]:
        """All of it, and the ready groups. Between two updates."""
        step = self.groups.step
        state = RunState(
            step=step,
            version=self.groups.budget.version,
            frontier=self.groups.ledger.frontier(),
            kl_coefficient=self.kl.coefficient,
            moments=dict(self.credit.state()),
            lengths=self.meter.bias.state(),
            bad_steps=self.bad_steps,
            unusable=self.groups.unusable,
            elapsed_s=self.elapsed_s(),
            seed=self.seed,
            data=self.of.data,
            models=dict(self.of.models),
            learner=step > 0,
            inherited=self.inherited,
            reference_version=None if self.reference is None else self.reference.version,
            lines=tuple(self.lines.waiting),
            poisoned=dict(self.poisoned),
        )
        return state, self.groups.ready()

    def restore(self, state: RunState, ready: tuple[Issued, ...]) -> None:
        """Before anything runs. The lines that waited are the caller's to add again."""
        self.groups.restore(state, ready)
        self.credit.restore(state.moments)
        if state.kl_coefficient is not None:
            self.kl.coefficient = state.kl_coefficient
        self.meter.bias = LengthBias(**state.lengths)
        self.bad_steps = state.bad_steps
        self.inherited = state.inherited
        self.poisoned.update(state.poisoned)
        self.elapsed_before_s = state.elapsed_s
