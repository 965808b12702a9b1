"""Generator processes that are killed and stopped under a real run: it goes on, and gets them back."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from .deaths import generators, run_to_strike, strike


def test_killed_and_stopped_generators_are_noticed_and_come_back_at_the_live_version(tmp_path: Path) -> None:
    with run_to_strike(
        tmp_path,
        # Groups that run for many snapshots, so that there is something to go on from at each death.
        "rollout.max_new_tokens=200",
        "learner.micro_batch_tokens=512",
        "generators.health_every_s=0.1",
        name="deaths",
        more_steps=3,
        gone_within_s=15,
    ) as run:
        strike(run, generators(run)[:1], signal.SIGKILL, expected=1, busy_s=0.3)
        strike(run, generators(run)[:1], signal.SIGSTOP, expected=2, busy_s=0.3)
        # None is left then, and no update will come to be pushed: the learner has to push in between.
        strike(run, generators(run), signal.SIGKILL, expected=4, busy_s=0.3)
    last = run.metrics[-1]
    assert last["generator/restarts"] == 4
    assert last["generator/continued_tokens"] > 0, "all that the dead had sampled was sampled again"
    back = [int(version) for version in re.findall(r"generator \d is back, at version (\d+)", run.text)]
    assert len(back) == 4
    assert back == sorted(back)
    assert back[0] >= 3, f"let in at versions {back}, not at the live one"
