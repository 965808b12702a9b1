"""The shell of a role, by itself: what has to die dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial

import psutil
import pytest
import ray

from asyncrl.roles.actor import RayRoleMember
from asyncrl.roles.base import Findings
from asyncrl.types import Group


class Idle:
    """A worker that finds nothing."""

    def start(self) -> None: ...

    def annotate(self, group: Group) -> Findings:
        return Findings({})

    def close(self) -> None: ...


@pytest.fixture
def local_ray():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("local_ray")
def test_a_stopped_process_is_gone_once_its_member_was_killed() -> None:
    async def scenario() -> None:
        member = RayRoleMember(
            "idle 0", "reference", partial(Idle), cores=None, gpus=0, start_timeout_s=120.0
        )
        await member.start()
        process = member._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await member.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            await asyncio.to_thread(process.wait, 5.0)

    asyncio.run(scenario())
