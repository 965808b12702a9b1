"""Every exception that asyncrl raises on purpose.

::

    AsyncRLError
    ├── UsageError                  exit 2: the user can fix it before anything runs
    │   ├── ConfigError             a key, a value, or two values that contradict
    │   ├── DataError               a data set that cannot be read or is empty
    │   ├── CheckpointError         damaged, or of a run that this one cannot go on from
    │   └── PlacementError          the machine or cluster lacks what was asked for
    ├── InvariantError              a bug in asyncrl, never the user's fault
    │   ├── BudgetError             an admission or retirement that the rule forbids
    │   ├── StalenessError          a token older than max_staleness reached the learner
    │   ├── QueueOverflowError      a put beyond the bound of the experience queue
    │   └── LedgerError             an ordinal lost, repeated, or moved backwards
    ├── CodecError                  damaged, truncated or foreign bytes
    │   └── TornRecordError         the last record of a file was cut off while it was written
    ├── RolloutError                data failure: recorded against the prompt, run goes on
    │   └── RewardError
    │       ├── RewardRaisedError   the user's function raised
    │       ├── RewardTimeoutError  it did not answer in reward.timeout_s
    │       ├── RewardValueError    NaN, a string, the wrong number of values
    │       └── RewardWorkerError   its process died
    ├── InfrastructureError         retried elsewhere, then the run fails
    │   ├── GeneratorError          a replica died or broke
    │   │   └── LostGroupError      a group that it ran, and what is left of it
    │   ├── VersionGoneError        the last replica that held a version died
    │   ├── LearnerError            a rank died or broke
    │   ├── RoleError               an actor of a role, such as the reference, died, broke or hangs
    │   └── WeightSyncError         a push failed
    │       ├── PushTimeoutError    a receiver did not answer in weight_sync.timeout_s
    │       ├── ChecksumError       sender's and receiver's bytes differ
    │       └── CanaryError         equal bytes, yet learner and replica compute different log-probs
    ├── DeadlineError               a wait passed its deadline; says who was waited for
    ├── DeadlockError               under the virtual clock: tasks wait, and nothing can wake them
    └── TrainingError               the run cannot go on
        ├── BadStepsError           learner.max_bad_steps non-finite updates in a row
        ├── NothingTrainableError   too many groups in a row failed or were filtered
        ├── NoGeneratorError        fewer than generators.min replicas are left
        ├── ReplayError             recorded groups that the run has come out of step with
        ├── ReferenceLostError      a reference that nobody can give back, in a run that promises bits
        └── BenchRunError           a run that ``asyncrl bench`` started ended with an error

Messages state what was found, what was expected (with both numbers), and what to change.
All survive pickling, because Ray carries them between processes.
"""

from __future__ import annotations

from typing import Any


class AsyncRLError(Exception):
    """Root of the tree; catch this to catch everything that asyncrl raises on purpose."""


class UsageError(AsyncRLError):
    """The user can fix it before anything runs. The command exits with 2."""


class ConfigError(UsageError):
    """A key, a value, or two values that contradict each other."""


class DataError(UsageError):
    """A data set that cannot be read, is empty, or lacks a column."""


class CheckpointError(UsageError):
    """A checkpoint that is damaged or incomplete, or of a run that this one cannot go on from."""


class PlacementError(UsageError):
    """The machine or cluster lacks what was asked for."""


class InvariantError(AsyncRLError):
    """A promise of asyncrl was broken: a bug, never the user's fault."""


class BudgetError(InvariantError):
    """An admission or a retirement that the admission rule forbids."""


class StalenessError(InvariantError):
    """A token older than ``schedule.max_staleness`` reached the learner's input."""


class QueueOverflowError(InvariantError):
    """A put beyond the bound of the experience queue."""


class LedgerError(InvariantError):
    """An ordinal was lost, repeated, or moved against the order of its states."""


class CodecError(AsyncRLError):
    """Bytes that are damaged, truncated, or of another format or version."""


class TornRecordError(CodecError):
    """The last record of a file was cut off while it was written; what lies before it is whole."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset
        """Where the torn record starts, in bytes: cut the file here to go on writing."""

    def __reduce__(self) -> tuple[type[TornRecordError], tuple[str, int]]:
        return type(self), (str(self), self.offset)


class RolloutError(AsyncRLError):
    """A failure of one prompt or sample: counted against it, and the run goes on."""


class RewardError(RolloutError):
    """A reward could not be had. Never turned into 0.0."""


class RewardRaisedError(RewardError):
    """The user's reward function raised."""


class RewardTimeoutError(RewardError):
    """The user's reward function did not answer within ``reward.timeout_s``."""


class RewardValueError(RewardError):
    """The user's reward function returned something that is not one finite number a sample."""


class RewardWorkerError(RewardError):
    """The process that ran the user's reward function died."""


class EnvironmentFaultError(RolloutError):
    """A user's environment failed; its trajectory alone is lost."""


class EnvironmentRaisedError(EnvironmentFaultError):
    """It raised, or could not be made."""


class EnvironmentTimeoutError(EnvironmentFaultError):
    """It did not answer within ``environment.timeout_s``."""


class EnvironmentValueError(EnvironmentFaultError):
    """It returned something that is no observation, or one that is too long."""


class EnvironmentWorkerError(EnvironmentFaultError):
    """The process that ran it died."""


class InfrastructureError(AsyncRLError):
    """A part of the system failed; the work is retried elsewhere, or the run ends."""


class GeneratorError(InfrastructureError):
    """A generator replica died or broke."""


class LostGroupError(GeneratorError):
    """The replica of a group died or was given up before it had answered."""

    def __init__(self, message: str, salvage: Any = None) -> None:
        super().__init__(message)
        self.salvage = salvage
        """What it had of the group, to go on from elsewhere: a ``Salvage``, or None for nothing."""

    def __reduce__(self) -> tuple[type[LostGroupError], tuple[str, Any]]:
        return type(self), (str(self), self.salvage)


class VersionGoneError(InfrastructureError):
    """Work for one version, which no replica holds any more and the learner cannot send again."""


class LearnerError(InfrastructureError):
    """A learner rank died or broke."""


class RoleError(InfrastructureError):
    """An actor of a role (see ``roles/base.py``) died, broke, or did not answer in time."""


class WeightSyncError(InfrastructureError):
    """A weight push failed."""


class PushTimeoutError(WeightSyncError):
    """A receiver did not answer within ``weight_sync.timeout_s``."""


class ChecksumError(WeightSyncError):
    """A receiver's weights differ from the sender's."""


class CanaryError(WeightSyncError):
    """A replica received the learner's bytes, and does not compute what the learner does with them."""


class DeadlineError(AsyncRLError):
    """A wait passed its deadline; the message names the uid, actor and phase."""


class DeadlockError(AsyncRLError):
    """Under the virtual clock: tasks are pending, nothing is ready, and no timer is set."""


class TrainingError(AsyncRLError):
    """The run cannot go on."""


class BadStepsError(TrainingError):
    """``learner.max_bad_steps`` updates in a row were not finite."""


class NothingTrainableError(TrainingError):
    """Too many groups in a row failed or were filtered; nothing is left to train on."""


class NoGeneratorError(TrainingError):
    """Fewer generator replicas are left than the run goes on with."""


class ReplayError(TrainingError):
    """Recorded groups that the run has come out of step with, or none left of them."""


class ReferenceLostError(TrainingError):
    """An actor of a moving reference died with what it held, and the run promised to repeat its bits."""


class BenchRunError(TrainingError):
    """A run that ``asyncrl bench`` started ended with an error."""
