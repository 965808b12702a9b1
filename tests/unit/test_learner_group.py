"""The learner over its ranks: who is sent which share of an update. Ranks write down what they are asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config_load import parse_config
from asyncrl.learners.base import StepResult
from asyncrl.learners.group import RayLearner
from tests.unit.recorded_batches import batch_of, record_batch

from .controller_harness import BASE


@dataclass
class Method:
    """A Ray actor's ``step``: calls are written down, and answered at once."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def remote(self, *arguments: Any) -> asyncio.Future[StepResult]:
        self.calls.append(arguments)
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        answer.set_result(StepResult(False, {}))
        return answer


@dataclass
class Rank:
    step: Method = field(default_factory=Method)


async def test_ranks_that_share_the_work_get_the_same_samples_and_the_others_the_rest() -> None:
    ranks = [Rank() for _ in range(4)]
    config = parse_config(BASE, ("learner.ranks=4", "learner.sequence_parallel=2"))
    groups = record_batch(2, groups=3)
    await RayLearner(config, ranks).step(batch_of(groups, 2))

    sent = []
    for rank in ranks:
        ((version, _, plan, _, *payloads),) = rank.step.calls
        assert version == 2
        assert [group.ordinal for group in payloads] == [groups[i].ordinal for i in plan.items]
        sent.append(plan)
    assert sent[0] == sent[1]
    assert sent[2] == sent[3]
    assert sorted((*sent[0].items, *sent[2].items)) == [0, 1, 2]
    assert len(sent[0].micro_batches) == len(sent[2].micro_batches)
