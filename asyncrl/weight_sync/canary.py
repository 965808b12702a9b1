"""The canary: after a push, the replicas' log-probs of fixed tokens against the learner's.

A checksum says which bytes arrived. This looks at what an engine computes with them: names mapped to
other layers, parts that were repacked or cut wrongly, layers that kept old weights, another dtype.

Invariants:
- The tokens are the same for the whole run, and are fed, not sampled: nothing depends on a draw.
- Both sides score one and the same version, and a version's expected log-probs are its own learner's.
- A replica that compares badly ends the run: equal bytes computed with wrongly are no accident of
  transport, and sending them again would not help.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import CanaryError
from asyncrl.types import Float32Array, Metrics, Task

log = logging.getLogger(__name__)

TOKENS = 64
"""Most tokens that are scored."""
DEFAULT_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.2}
"""By dtype, for the mean absolute difference of a token's log-prob.

For SmolLM2-135M between vLLM and learner on a CPU it was 0.03 in bfloat16, and 0.001 in float32 with the
inputs of all products rounded as GPUs do it under TF32; with one tensor exchanged between two of its thirty
layers, 0.4 to 6. The largest difference of 63 tokens is no measure: rounding alone made it 0.2 to 1.8 in
bfloat16, where exchanged tensors made it 3 to 27."""


def canary_tokens(tasks: Iterable[Task], limit: int) -> tuple[int, ...]:
    """The first prompts of the run, one after the other, cut to ``TOKENS`` and to ``limit`` tokens.

    They are ids of the run's own tokenizer, whatever that is. ``tasks`` need not end.
    """
    wanted = min(TOKENS, limit)
    ids: list[int] = []
    for task in tasks:
        ids += task.prompt_ids
        if len(ids) >= wanted:
            break
    return tuple(ids[:wanted])


@dataclass(frozen=True, slots=True)
class _Expected:
    version: int
    logprobs: Float32Array


class Canary:
    """Which pushes to check, against what, and what came of it.

    Every version that is a multiple of ``every`` is checked, and every replica before it takes its first
    work. ``tolerance`` bounds the mean absolute difference of the tokens' log-probs. ``overlap``: the
    learner trains on while it pushes, so that a version can be scored at the step's boundary alone. A
    replica that is let in later, at a version that was not scored there, goes unchecked until the next.
    """

    def __init__(self, token_ids: tuple[int, ...], *, every: int, tolerance: float, overlap: bool) -> None:
        if len(token_ids) < 2 or every < 1:
            raise ValueError(f"{len(token_ids)} tokens every {every} versions: expected >= 2 and >= 1")
        self.token_ids = token_ids
        self.overlap = overlap
        self._every = every
        self._tolerance = tolerance
        self._expected: _Expected | None = None
        self._owed = False
        self._seconds = 0.0
        self._found: Metrics = {}

    def due(self, version: int, *, newcomers: bool) -> bool:
        """Whether a push of ``version`` is to be checked; ``newcomers``: some receiver never took work."""
        return newcomers or self._owed or version % self._every == 0

    def expect(self, version: int, logprobs: Float32Array, seconds: float) -> None:
        """Take the learner's log-probs of ``version``; ``seconds`` is what they took."""
        self._expected = _Expected(version, logprobs)
        self._seconds += seconds

    def knows(self, version: int) -> bool:
        """Whether the learner's log-probs of ``version`` are here."""
        return self._expected is not None and self._expected.version == version

    def owe(self, version: int) -> None:
        """A check that was due could not be made; the next version makes up for it."""
        self._owed = True
        log.info("version %d was not scored when the learner held it: the next one is checked", version)

    def compare(self, version: int, found: Mapping[str, Float32Array], seconds: float) -> None:
        """Hold the replicas' log-probs, by name, against the learner's; ``seconds`` is what they took.

        Raises CanaryError when they differ by more than the tolerance on average, or one is not finite.
        """
        assert self._expected is not None
        assert self._expected.version == version, "what is expected is of this version"
        expected = self._expected.logprobs
        differences = {name: np.abs(logprobs - expected) for name, logprobs in found.items()}
        self._seconds += seconds
        # A NaN is no number below the tolerance.
        bad = [name for name, each in differences.items() if not each.mean() <= self._tolerance]
        if bad:
            name = bad[0]
            worst = int(np.argmax(differences[name]))  # the first NaN, where there is one
            others = f" (and likewise {', '.join(bad[1:])})" if bad[1:] else ""
            raise CanaryError(
                f"{name} at version {version}{others}: log-probs of the canary's tokens differ from the "
                f"learner's by {differences[name].mean():.3g} on average, expected at most "
                f"weight_sync.canary_tolerance = {self._tolerance:g}; the furthest is token {worst + 2} of "
                f"{len(self.token_ids)}, {found[name][worst]:.6g} where the learner has "
                f"{expected[worst]:.6g}. It received the learner's bytes, but computes something else with "
                "them: a tensor reached another layer, was repacked wrongly, or was left as it was. Only if "
                "this model is known to round so coarsely, raise canary_tolerance"
            )
        self._owed = False
        self._found = {
            "weight_sync/canary_diff_mean": max(float(each.mean()) for each in differences.values()),
            "weight_sync/canary_diff_max": max(float(each.max()) for each in differences.values()),
        }

    def take_metrics(self) -> Metrics:
        """Figures since the last call: seconds of both sides, which are part of those of the push, and of the
        last comparison, if there was one, the replica's that differed most."""
        metrics = {"timing_s/canary": self._seconds, **self._found}
        self._seconds, self._found = 0.0, {}
        return metrics
