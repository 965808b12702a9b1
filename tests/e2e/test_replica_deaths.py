"""Generator processes that are killed, stopped or out of memory under a real run, which gets them back."""

from __future__ import annotations

import re
from pathlib import Path

from asyncrl.listeners import described, find_listeners

from .deaths import generators, kill, run_out_of_memory, run_to_strike, stand_still, stop, strike
from .runs import Run


def assert_nobody_else_is_let_in(run: Run) -> None:
    """Beyond loopback listen Ray's own services alone, which ask for its token; a process has one of them."""
    pids = {process.pid for process in run.processes()}
    sockets = [socket for socket in find_listeners().sockets if socket.pid in pids]
    outside = [socket for socket in sockets if not socket.is_loopback]
    assert outside, "Ray's services were not found: this looks at nothing"
    assert {socket.guard for socket in outside} == {"Ray's token"}, list(described(outside))
    actors = [socket.pid for socket in outside if "Actor" in socket.process]
    assert len(actors) == len(set(actors)), list(described(outside))
    assert any("LearnerActor" in socket.process for socket in sockets if socket.is_loopback), "no push group"


def test_killed_stopped_and_starved_generators_come_back_at_the_live_version(
    tmp_path: Path,
) -> None:
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
        assert_nobody_else_is_let_in(run)
        stand_still(run, 6.0)  # longer than a ping may take
        strike(run, generators(run)[:1], kill, expected=1, busy_s=0.3)
        strike(run, generators(run)[:1], stop, expected=2, busy_s=0.3)
        # None is left then, and no update will come to be pushed: the learner has to push in between.
        strike(run, generators(run), run_out_of_memory, expected=4, busy_s=0.3)
    last = run.metrics[-1]
    assert last["generator/restarts"] == 4
    assert last["generator/continued_tokens"] > 0, "all that the dead had sampled was sampled again"
    back = [int(version) for version in re.findall(r"generator \d is back, at version (\d+)", run.text)]
    assert len(back) == 4
    assert back == sorted(back)
    assert back[0] >= 3, f"let in at versions {back}, not at the live one"
