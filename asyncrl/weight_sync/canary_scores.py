"""Asking both sides for what the canary compares, each within ``timeout_s``.

Raises PushTimeoutError, what failed of a side, or CanaryError. ``clock`` gives the seconds that are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.generators.member import Member
from asyncrl.learners.base import Learner
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.together import together


async def score_learner(
    canary: Canary, version: int, learner: Learner, *, timeout_s: float, clock: Callable[[], float]
) -> None:
    """Have the canary expect what the learner, which holds ``version``, computes."""
    start = clock()
    (logprobs,) = await together(
        timeout_s,
        f"scoring the canary of version {version} by the learner",
        learner.score(canary.token_ids),
    )
    canary.expect(version, logprobs, clock() - start)


async def compare_generators(
    canary: Canary, version: int, members: Sequence[Member], *, timeout_s: float, clock: Callable[[], float]
) -> None:
    """Compare with it what the replicas compute, on all of which ``version`` is live."""
    start = clock()
    names = [member.name for member in members]
    found = await together(
        timeout_s,
        f"scoring the canary of version {version} on {', '.join(names)}",
        *(member.call(member.replica.score(canary.token_ids)) for member in members),
    )
    canary.compare(version, dict(zip(names, found, strict=True)), clock() - start)
