"""A small asynchronous run on budget, queue and ledger alone, that checks every promise after every event.

Replicas sample a few tokens a group, each stamped with the version that is live at that moment; replicas
die and come back, groups fail, are filtered and dropped, updates are skipped, pushes are late. What the
objects under test say is compared with the harness's own record of what really happened: start
versions as replicas had them, tokens as they were sampled.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from asyncrl.errors import StalenessError
from asyncrl.ledger import FinalState, Ledger
from asyncrl.queues.budget import StalenessBudget
from asyncrl.queues.experience import ExperienceQueue, Shortfall
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import GroupMeta, ReadyGroup, Trajectory, group_lag, unmasked

GROUP_BYTES = 10


@dataclass(frozen=True)
class Params:
    """One schedule. Times are in units of the mean update."""

    seed: int = 0
    steps: int = 10
    groups_per_step: int = 2
    pipeline_depth: int = 1
    max_staleness: int = 2
    publish_every: int = 1
    at_bound: Literal["wait", "drop", "mask"] = "wait"
    in_flight: bool = True
    replicas: int = 2
    tokens: int = 3
    """Most tokens that a group samples, one to this many."""
    lengths: Literal["constant", "exponential", "lognormal"] = "constant"
    rollout_time: float = 0.5
    score_time: float = 0.0
    """Longest time that a group is scored for, when all of its tokens are sampled."""
    update_time: float = 1.0
    push_time: float = 0.1
    """Longest time that one push takes."""
    failed: float = 0.0
    """Probability that a group fails, like the ones below."""
    filtered: float = 0.0
    death: float = 0.0
    """That the replica of a group dies while it is generated."""
    bad_step: float = 0.0
    early_publish: float = 0.0
    """That a version is made live though it is not due, as for an evaluation."""
    max_bytes: int = 1_000_000

    @classmethod
    def random(cls, seed: int) -> Params:
        """The seed's schedule: D 0-4, k 1-3, pushes of up to 2.5 updates, up to 90 % of groups unusable."""
        draw = random.Random(seed)
        depth, every, batch = draw.randint(0, 4), draw.randint(1, 3), draw.choice((1, 1, 2, 2, 3, 4))
        at_bound: Literal["wait", "drop", "mask"] = draw.choice(("wait", "drop", "mask"))
        return cls(
            seed=seed,
            steps=draw.randint(5, 9),
            groups_per_step=batch,
            pipeline_depth=depth,
            max_staleness=depth + every - 1 + draw.choice((0, 0, 1, 2, 4)),
            publish_every=every,
            at_bound=at_bound,
            in_flight=draw.random() < 0.6 or at_bound == "mask",
            replicas=draw.randint(1, 3),
            tokens=8 if at_bound == "mask" else 3,
            lengths=draw.choice(("constant", "exponential", "lognormal", "lognormal")),
            rollout_time=draw.choice((0.05, 0.5, 1.0, 3.0)),
            score_time=draw.choice((0.0, 3.0)) if at_bound == "mask" else 0.0,
            push_time=draw.choice((0.0, 0.1, 1.0, 2.5)),
            failed=0.9 if batch == 1 and draw.random() < 0.2 else draw.choice((0.0, 0.0, 0.1, 0.3)),
            filtered=draw.choice((0.0, 0.0, 0.2, 0.4)),
            death=draw.choice((0.0, 0.0, 0.02, 0.1)),
            bad_step=draw.choice((0.0, 0.0, 0.2)),
            early_publish=draw.choice((0.0, 0.0, 0.3)),
            max_bytes=draw.choice((1_000_000, 1_000_000, 1, batch * GROUP_BYTES * 3 // 2)),
        )

    @classmethod
    def masking(cls, seed: int) -> Params:
        """Long tails, a bound with no slack, and rewards that take longer than updates: many are masked."""
        drawn = cls.random(seed)
        depth = max(1, drawn.pipeline_depth)
        return replace(
            drawn,
            at_bound="mask",
            in_flight=True,
            lengths="lognormal",
            rollout_time=1.0,
            score_time=3.0,
            tokens=8,
            pipeline_depth=depth,
            max_staleness=depth + drawn.publish_every - 1,
            failed=0.0,
        )


@dataclass
class Result:
    """What one schedule did."""

    counts: dict[str, int]
    lags: list[int]
    """True lag of every trained group."""
    happened: Counter[str] = field(default_factory=Counter)


@dataclass
class _Replica:
    live: int = 0
    life: int = 0
    """Raised by each death: a generation that began in another life is lost."""
    serving: bool = True
    busy: int = 0


class ReplicaDied(Exception):
    """The replica died under a group."""


class Schedule:
    """One run. ``check`` is called after every event."""

    def __init__(
        self, params: Params, budget_cls: type[StalenessBudget], queue_cls: type[ExperienceQueue]
    ) -> None:
        p = self.p = params
        self.random = random.Random(params.seed + 1)
        self.budget = budget_cls(
            p.groups_per_step, p.pipeline_depth, p.max_staleness, p.publish_every, p.steps
        )
        self.capacity = (p.pipeline_depth + 1) * p.groups_per_step
        self.queue = queue_cls(self.budget, self.capacity, p.max_bytes)
        self.ledger = Ledger()
        self.replicas = [_Replica() for _ in range(p.replicas)]
        self.updates = 0
        self.live = 0
        self.publish_up_to = 0
        self.start: dict[int, int] = {}  # true start version of every live group
        self.tokens: dict[int, list[int]] = {}  # true version of each token of every ready group
        self.deadline: dict[int, int] = {}  # last step for every live group: start + S, or postponed to
        self.expiry: dict[int, int] = {}  # as the budget said at the latest issue
        self.training: set[int] = set()
        self.rollouts: dict[int, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()  # something that a take may depend on
        self.routable = asyncio.Event()  # a replica may have become free to take work
        self.drained = asyncio.Event()  # a replica may have become idle
        self.due = asyncio.Event()
        self.result = Result({}, [])

    async def run(self) -> Result:
        async with asyncio.TaskGroup() as self.tasks:
            publisher = self.tasks.create_task(self.publish(), name="publish")
            self.event()
            await self.train()
            publisher.cancel()
        p, counts = self.p, self.ledger.counts()
        assert self.updates == self.budget.version == p.steps
        assert self.budget.outstanding == 0, "groups were started that the run could not train"
        assert counts["trained"] == p.steps * p.groups_per_step == len(self.result.lags)
        assert self.ledger.frontier().lowest == counts["submitted"] == self.ledger.next_ordinal
        self.result.counts = counts
        return self.result

    # The promises.

    def event(self) -> None:
        """Something happened: check everything, start what the budget admits, wake the trainer."""
        self.check()
        while self.budget.admissible() and not self.queue.full:
            ordinal = self.ledger.next_ordinal
            self.ledger.submit(ordinal, f"task-{ordinal}")
            self.issued(ordinal, self.budget.admit(ordinal).expiry)
            self.rollouts[ordinal] = self.tasks.create_task(self.rollout(ordinal), name=f"rollout {ordinal}")
            self.check()
        assert self.ledger.next_ordinal < 500 * self.capacity * self.p.steps, "no progress"
        self.result.happened["queue full"] += self.queue.full
        self.changed.set()

    def check(self) -> None:
        """Conservation, the bound on the outstanding groups, and that all can be trained in time."""
        budget = self.budget
        self.ledger.check()
        counts = self.ledger.counts()
        live = counts["running"] + counts["ready"] + counts["training"]
        assert live == budget.outstanding == len(self.start)
        assert counts["running"] == budget.running == len(self.rollouts)
        assert counts["ready"] == len(self.queue)
        assert self.queue.bytes == GROUP_BYTES * len(self.queue)
        assert counts["training"] == len(self.training)
        assert live <= self.capacity, f"{live} outstanding, expected at most {self.capacity}"
        waiting = self.deadline if not self.training else self.deadline.keys() - self.training
        deadlines = sorted([self.deadline[ordinal] for ordinal in waiting])
        next_step = self.updates + bool(self.training)
        for total, deadline in enumerate(deadlines, start=1):
            steps_left = deadline - next_step + 1
            assert total <= steps_left * self.p.groups_per_step, (
                f"{total} groups due by step {deadline} cannot all be trained in {steps_left} steps"
            )

    def trained_lags(self, ordinal: int) -> list[int]:
        """True lags of the tokens of a group that the next step trains."""
        lags = [self.updates - version for version in self.tokens[ordinal]]
        if self.p.at_bound == "mask":
            lags = [lag for lag in lags if lag <= self.p.max_staleness]
        return lags

    def check_batch(self, batch: list[ReadyGroup]) -> None:
        """No trained token older than the bound, none too few trained, and all reported as it is."""
        assert len(batch) == self.p.groups_per_step
        for group in batch:
            ordinal = group.meta.ordinal
            lags = self.trained_lags(ordinal)
            assert lags, f"group {ordinal} is trained with no token left"
            assert group.meta.loss_tokens == len(lags), "tokens masked in vain, or not masked"
            masked = len(self.tokens[ordinal]) - len(lags)
            assert not masked or self.deadline[ordinal] > self.start[ordinal] + self.p.max_staleness, (
                "masked without having been postponed"
            )
            self.result.happened["masked"] += bool(masked)
            lag = max(lags)
            if not 0 <= lag <= self.p.max_staleness:
                raise StalenessError(f"lag {lag} in a batch, expected at most {self.p.max_staleness}")
            reported = group_lag(self.budget.version, group.meta)
            assert reported == lag, f"lag {lag} was reported as {reported}"
            if self.p.pipeline_depth == 0:  # synchronous, but for versions that are never pushed
                assert lag < self.p.publish_every, f"lag {lag} at pipeline_depth 0"

    # What happens.

    def issued(self, ordinal: int, expiry: int) -> None:
        self.start[ordinal] = self.live
        self.deadline[ordinal] = max(self.live + self.p.max_staleness, self.deadline.get(ordinal, 0))
        self.expiry[ordinal] = expiry

    def retire(self, ordinal: int, state: FinalState, reason: str) -> None:
        self.ledger.retire(ordinal, state, reason)
        self.budget.retire(ordinal)
        del self.start[ordinal], self.expiry[ordinal], self.deadline[ordinal]
        self.tokens.pop(ordinal, None)
        self.rollouts.pop(ordinal, None)
        self.training.discard(ordinal)
        self.result.happened[state] += 1

    async def rollout(self, ordinal: int) -> None:
        while True:
            try:
                versions = await self.generate(ordinal)
                break
            except ReplicaDied:
                self.result.happened["reissued"] += 1
                self.issued(ordinal, self.budget.reissue(ordinal).expiry)
                self.event()
        if self.p.score_time:
            await asyncio.sleep(self.random.uniform(0.0, self.p.score_time))
        outcome = self.random.random()
        if outcome < self.p.failed:
            self.retire(ordinal, "failed", "RewardRaisedError")
        elif outcome < self.p.failed + (1 - self.p.failed) * self.p.filtered:
            self.retire(ordinal, "filtered", "zero_variance")
        else:
            self.land(ordinal, versions)
        self.event()

    def land(self, ordinal: int, versions: list[int]) -> None:
        tokens = np.array(versions, np.int32)
        trajectory = Trajectory(
            sample=0,
            attempt=0,
            prompt_ids=tokens,
            token_ids=tokens,
            loss_mask=np.ones(len(versions), np.bool_),
            logprobs=np.zeros(len(versions), np.float32),
            versions=tokens,
            reward=1.0,
            finish_reason="stop",
        )
        meta = GroupMeta(
            ordinal, f"task-{ordinal}", self.start[ordinal], (trajectory.meta(),), 0, GROUP_BYTES
        )
        del self.rollouts[ordinal]
        self.tokens[ordinal] = versions
        self.ledger.mark_ready(ordinal)
        self.queue.put(ReadyGroup(meta, b"", self.expiry[ordinal]))

    async def generate(self, ordinal: int) -> list[int]:
        """Sample some tokens on the least busy replica, each stamped when it is sampled."""
        while not (free := [replica for replica in self.replicas if replica.serving]):
            self.routable.clear()
            await self.routable.wait()
        replica = min(free, key=lambda r: r.busy)
        life, tokens = replica.life, self.random.randint(1, self.p.tokens)
        dies_at = self.random.randrange(tokens) if self.random.random() < self.p.death else None
        duration = self.duration() / tokens
        versions = []
        replica.busy += 1
        try:
            for token in range(tokens):
                await asyncio.sleep(duration)
                if token == dies_at and replica.life == life:
                    replica.life += 1
                    replica.serving = False
                    self.tasks.create_task(self.restart(replica), name="restart")
                if replica.life != life:
                    raise ReplicaDied
                versions.append(replica.live)
        finally:
            replica.busy -= 1
            self.drained.set()
        return versions

    def duration(self) -> float:
        mean = self.p.rollout_time
        if self.p.lengths == "exponential":
            return self.random.expovariate(1 / mean)
        if self.p.lengths == "lognormal":
            return mean * self.random.lognormvariate(0.0, 1.2)
        return mean

    async def restart(self, replica: _Replica) -> None:
        """Bring a dead replica back, at the live version."""
        await asyncio.sleep(self.random.uniform(0.0, 2.0))
        replica.live = max(replica.live, self.live)
        replica.serving = True
        self.routable.set()

    async def train(self) -> None:
        p = self.p
        postponed = False  # since something else happened
        while self.updates < p.steps:
            if p.at_bound == "mask" and not postponed:
                self.drop_all_masked()
            batch = self.queue.take()
            if isinstance(batch, Shortfall):
                assert batch.wanted == p.groups_per_step
                assert batch.ready == len(self.queue)
                assert not batch.missing or batch.ready >= batch.wanted, "blocked before a batch is ready"
                assert not set(batch.blocking) - set(self.rollouts), "blocked by what is not running"
                if batch.blocking and p.at_bound == "drop":
                    for ordinal in batch.blocking:
                        self.rollouts[ordinal].cancel()
                        self.retire(ordinal, "dropped", "at_bound")
                    self.event()
                    continue
                if batch.blocking and p.at_bound == "mask":
                    assert not postponed, "postponed, and blocked all the same"
                    postponed = True
                    self.postpone(batch.overdue)
                    continue
                self.result.happened["waited at the bound"] += bool(batch.blocking)
                self.changed.clear()
                await self.changed.wait()
                continue
            postponed = False
            if p.at_bound == "mask":
                batch = [
                    replace(g, meta=unmasked(self.budget.version, p.max_staleness, g.meta)) for g in batch
                ]
            ordinals = [group.meta.ordinal for group in batch]
            self.check_batch(batch)
            for ordinal in ordinals:
                self.ledger.start_training(ordinal)
            self.training.update(ordinals)
            lags = [max(self.trained_lags(ordinal)) for ordinal in ordinals]
            self.event()
            await asyncio.sleep(p.update_time)
            if self.random.random() < p.bad_step:
                for ordinal in ordinals:
                    self.retire(ordinal, "dropped", "bad_step")
                self.result.happened["bad step"] += 1
            else:
                self.budget.complete_update()
                self.updates += 1
                for ordinal in ordinals:
                    self.retire(ordinal, "trained", "update")
                self.result.lags.extend(lags)
                self.result.happened["lag = S"] += max(lags) == p.max_staleness
                if self.budget.is_due(self.updates) or self.random.random() < p.early_publish:
                    self.publish_up_to = self.updates
                    self.due.set()
            self.event()

    def postpone(self, overdue: tuple[tuple[int, int], ...]) -> None:
        """Leave groups to later steps: no more of them, and no later, than this step needs."""
        assert overdue, "blocked, and nothing to postpone"
        for ordinal, expiry in overdue:
            assert ordinal in self.rollouts, "postponed what is not running"
            assert expiry > self.deadline[ordinal] >= self.updates
            self.budget.postpone(ordinal, expiry)
            self.deadline[ordinal] = self.expiry[ordinal] = expiry
            self.result.happened["postponed"] += 1
        self.check()

    def drop_all_masked(self) -> None:
        for ordinal in self.queue.all_masked():
            assert not self.trained_lags(ordinal), "dropped with tokens left"
            self.queue.remove(ordinal)
            self.retire(ordinal, "dropped", "all_masked")
            self.result.happened["all masked"] += 1
            self.event()

    async def publish(self) -> None:
        """Bring the replicas to the newest version that has to be live, one after the other."""
        while True:
            await self.due.wait()
            self.due.clear()
            version = self.publish_up_to
            delay = self.random.uniform(0.0, self.p.push_time) / len(self.replicas)
            while behind := [r for r in self.replicas if r.live < version]:
                replica = behind[0]
                await asyncio.sleep(delay)
                if not self.p.in_flight:  # let it finish what it has before it swaps
                    replica.serving = False
                    while replica.busy:
                        self.drained.clear()
                        await self.drained.wait()
                    replica.serving = True
                    self.routable.set()
                replica.live = version
            self.budget.set_live(version)  # a dead replica comes back with this version at least
            self.live = version
            self.event()


async def _run(params: Params, budget_cls: type[StalenessBudget], queue_cls: type[ExperienceQueue]) -> Result:
    return await Schedule(params, budget_cls, queue_cls).run()


def run_schedule(
    params: Params,
    budget_cls: type[StalenessBudget] = StalenessBudget,
    queue_cls: type[ExperienceQueue] = ExperienceQueue,
) -> Result:
    """Run one schedule to its end in virtual time; raises at the first promise that is broken."""
    try:
        return run_virtual(_run(params, budget_cls, queue_cls))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the others are other tasks that met the same
