"""Groups that are handed from one rollout host to another: nothing twice, nothing changed, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.environments.base import ModelClient, Rollout, RolloutResult, single_turn
from asyncrl.errors import CodecError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length, log_normal_length, scripted_length
from asyncrl.generators.torch_generator import TorchGenerator
from asyncrl.queues.codec import decode_group
from asyncrl.rollout import GroupRequest, RolloutHost, Score
from asyncrl.simulate.clock import run_virtual
from asyncrl.snapshot import PartialGroup, Progress, decode_partial, encode_snapshot
from asyncrl.types import Completion, Group, SamplingParams, Task, Trajectory

from .tiny_models import running, tiny_llama

KEY = ("train-3", 3)


class CountingScorer:
    """The number of tokens as the reward; ``seconds`` for each, and a count of the calls."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls = 0
        self.first = asyncio.Event()

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        await asyncio.sleep(self.seconds)
        self.calls += 1
        self.first.set()
        return Score(float(len(result.token_ids)), {"tokens": float(len(result.token_ids))})


def asked(
    samples: int = 4, *, start_version: int = 0, new: int = 60, greedy_baseline: bool = False
) -> GroupRequest:
    task = Task(KEY[1], KEY[0], "", (1, 2, 3))
    return GroupRequest(
        task,
        start_version,
        samples,
        SamplingParams(new),
        seed=0,
        deadline_s=1e6,
        greedy_baseline=greedy_baseline,
    )


def host(generator: Any, scorer: CountingScorer | None = None, **options: Any) -> RolloutHost:
    return RolloutHost(generator, scorer or CountingScorer(), lambda ids: "", **options)


@dataclass
class Life:
    """What a host did with a group until it was ended."""

    payload: bytes | None
    """The encoded group, where it came to its end."""
    salvage: bytes | None
    progress: Progress | None
    tokens: int
    """Sampled in this life."""


async def live(of: RolloutHost, request: GroupRequest, at_s: float, salvage: bytes | None = None) -> Life:
    """Run a group for ``at_s`` seconds at most; where it is not done then, take a snapshot and end it."""
    await of.engine.start()
    task = asyncio.create_task(of.run_group(request, salvage))
    await asyncio.wait([task], timeout=at_s)
    taken = await of.snapshot()
    assert taken is not None
    groups, payload = taken
    tokens = of.engine.statistics().tokens
    if task.done():
        assert groups == {}
        return Life(task.result()[1], None, None, tokens)
    task.cancel()
    await asyncio.wait([task])
    await of.engine.close()
    return Life(None, payload if KEY in groups else None, groups.get(KEY), tokens)


# ------------------------------------------------------------------ the bytes


def arrays(length: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, 1000, length).astype(np.int32)
    return ids, -rng.random(length).astype(np.float32), np.sort(rng.integers(4, 9, length)).astype(np.int32)


def partial_group(finished: dict[int, int], begun: dict[int, int], start_version: int = 4) -> PartialGroup:
    def trajectory(sample: int, length: int) -> Trajectory:
        ids, logprobs, versions = arrays(length)
        prompt = np.array([1, 2, 3], np.int32)
        mask = np.ones(length, np.bool_)
        return Trajectory(sample, 0, prompt, ids, mask, logprobs, versions, 0.5, "stop", {"a": 0.5})

    trajectories = tuple(trajectory(*item) for item in finished.items())
    answers = {sample: Completion(*arrays(length), "abort") for sample, length in begun.items()}
    return PartialGroup(Group(KEY[1], KEY[0], start_version, trajectories), answers)


lengths = st.dictionaries(st.integers(0, 20), st.integers(0, 40), max_size=6)


@given(lengths, lengths)
def test_what_is_encoded_is_decoded_bit_for_bit(finished: dict[int, int], begun: dict[int, int]) -> None:
    before = partial_group(finished, begun)
    payload = encode_snapshot({("other", 1): partial_group({1: 3}, {}), KEY: before})
    after = decode_partial(payload, KEY, 4)
    assert after.progress == before.progress
    assert after.progress.tokens == sum(finished.values()) + sum(begun.values())
    assert encode_snapshot({KEY: after}) == encode_snapshot({KEY: before})
    for sample, answer in before.begun.items():
        for name in ("token_ids", "logprobs", "versions"):
            mine, theirs = getattr(answer, name), getattr(after.begun[sample], name)
            assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())


def test_a_group_is_continued_from_its_own_start_version_alone() -> None:
    payload = encode_snapshot({KEY: partial_group({0: 5}, {1: 3}, start_version=4)})
    with pytest.raises(
        CodecError, match="start version 5, but started at 4: a group that keeps tokens keeps"
    ):
        decode_partial(payload, KEY, 5)


def test_a_payload_without_the_group_or_cut_off_is_refused() -> None:
    payload = encode_snapshot({KEY: partial_group({0: 5}, {1: 3})})
    with pytest.raises(CodecError, match="no snapshot of other"):
        decode_partial(payload, ("other", 0), 4)
    with pytest.raises(CodecError, match=f"no snapshot of train-3 in {len(payload) - 1} bytes"):
        decode_partial(payload[:-1], KEY, 4)


# ------------------------------------------------------------------ from host to host


@settings(max_examples=60, deadline=None)
@given(
    deaths=st.lists(st.integers(0, 30).map(lambda tokens: (tokens + 0.5) / 10), min_size=1, max_size=4),
    slots=st.sampled_from([1, 3, 64]),
    scoring_s=st.sampled_from([0.0, 0.7]),
    greedy=st.booleans(),
)
def test_a_group_that_moves_at_any_moments_is_the_undisturbed_one_and_nothing_is_done_twice(
    deaths: list[float], slots: int, scoring_s: float, greedy: bool
) -> None:
    def generator() -> ScriptedGenerator:
        return ScriptedGenerator(slots=slots, length=log_normal_length(12, 0.7), token_s=0.1)

    async def main() -> None:
        whole = await live(host(generator()), asked(greedy_baseline=greedy), 1e6)
        scorer = CountingScorer(scoring_s)
        lives: list[Life] = []
        for at_s in [*deaths, 1e6]:
            salvage = next((each.salvage for each in reversed(lives) if each.salvage), None)
            lives.append(await live(host(generator(), scorer), asked(greedy_baseline=greedy), at_s, salvage))
            if lives[-1].payload is not None:
                break
        assert lives[-1].payload == whole.payload
        assert sum(each.tokens for each in lives) == whole.tokens
        assert scorer.calls == 4 + greedy
        kept = [each.progress.tokens for each in lives if each.progress is not None]
        assert kept == sorted(kept), "a later life lost what an earlier one had"

    run_virtual(main())


def test_an_answer_that_waits_for_its_score_is_not_sampled_again() -> None:
    async def main() -> None:
        lengths = scripted_length({(3, 0): 5, (3, 1): 40}, default=40)
        first = ScriptedGenerator(length=lengths, token_s=0.1)
        life = await live(host(first, CountingScorer(seconds=100.0)), asked(2), 1.0)
        assert life.progress == Progress(samples=2, tokens=5 + 10)
        assert life.salvage is not None
        kept = decode_partial(life.salvage, KEY, 0)
        assert {i: answer.finish_reason for i, answer in kept.begun.items()} == {0: "stop", 1: "abort"}
        second, scorer = ScriptedGenerator(length=lengths, token_s=0.1), CountingScorer()
        await live(host(second, scorer), asked(2), 1e6, life.salvage)
        assert second.statistics().tokens == 30
        assert scorer.calls == 2

    run_virtual(main())


def test_old_tokens_keep_their_versions_and_new_ones_carry_their_own() -> None:
    async def main() -> None:
        def generator(version: int) -> ScriptedGenerator:
            made = ScriptedGenerator(length=constant_length(20), token_s=0.1)
            made._versions = [version]
            return made

        request = asked(2, start_version=3)
        life = await live(host(generator(3)), request, 1.0)
        last = await live(host(generator(5)), request, 1e6, life.salvage)
        assert last.payload is not None
        group = decode_group(last.payload)
        assert group.start_version == 3
        for trajectory in group.trajectories:
            assert trajectory.versions.tolist() == [3] * 10 + [5] * 10

    run_virtual(main())


async def two_turns(task: Task, client: ModelClient) -> RolloutResult:
    """A second turn after the first one's answer."""
    first = await client.complete(task.prompt_ids)
    second = await client.complete((*task.prompt_ids, *first.token_ids.tolist()))
    ids = np.concatenate((first.token_ids, second.token_ids))
    return RolloutResult(
        prompt_ids=np.asarray(task.prompt_ids, np.int32),
        token_ids=ids,
        loss_mask=np.ones(len(ids), np.bool_),
        logprobs=np.concatenate((first.logprobs, second.logprobs)),
        versions=np.concatenate((first.versions, second.versions)),
        finish_reason=second.finish_reason,
    )


async def own_prompt(task: Task, client: ModelClient) -> RolloutResult:
    """A first turn whose prompt is not the task's."""
    answer = await client.complete((9, 9))
    return replace(await single_turn(task, Replay(answer)), prompt_ids=np.array([9, 9], np.int32))


@dataclass
class Replay:
    answer: Completion

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        return self.answer


@pytest.mark.parametrize(
    ("rollout", "at_s", "kept"),
    [(two_turns, 0.5, 5), (two_turns, 1.5, 10), (own_prompt, 0.5, 0), (single_turn, 0.5, 5)],
    ids=["first turn", "second turn", "a prompt of its own", "single turn"],
)
def test_a_rollout_is_taken_up_again_where_that_is_right(rollout: Rollout, at_s: float, kept: int) -> None:
    """In its first turn or after it, where that was the group's own request; from nothing otherwise."""

    def generator() -> ScriptedGenerator:
        return ScriptedGenerator(length=constant_length(10), token_s=0.1)

    async def main() -> None:
        whole = await live(host(generator(), rollout=rollout), asked(1), 1e6)
        life = await live(host(generator(), rollout=rollout), asked(1), at_s)
        assert (life.progress.tokens if life.progress else 0) == kept
        again = await live(host(generator(), rollout=rollout), asked(1), 1e6, life.salvage)
        assert again.payload == whole.payload
        assert again.tokens == whole.tokens - kept

    run_virtual(main())


def test_a_large_snapshot_is_followed_by_a_longer_pause() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(length=constant_length(2_000_000), token_s=1e-5)
        of = host(generator)
        await generator.start()
        task = asyncio.create_task(of.run_group(asked(2, new=2_000_000)))
        await asyncio.sleep(4.0)
        taken = await of.snapshot()
        assert taken is not None
        pause_s = len(taken[1]) / (4 << 20)
        assert len(taken[1]) > 2 * 400_000 * 12
        await asyncio.sleep(pause_s - 0.01)
        assert await of.snapshot() is None
        await asyncio.sleep(0.02)
        assert await of.snapshot() is not None
        task.cancel()

    run_virtual(main())


def test_a_group_that_has_nothing_yet_takes_no_place() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(length=constant_length(10), token_s=0.1, first_token_s=5.0)
        life = await live(host(generator), asked(), 1.0)
        assert (life.salvage, life.progress) == (None, None)

    run_virtual(main())


async def test_with_an_engine_that_promises_bits_finished_samples_are_kept_and_others_start_anew() -> None:
    request = replace(asked(4), sampling=SamplingParams(40, temperature=0.9))

    def deterministic(eos: int) -> Any:
        return running(tiny_llama(eos_token_id=[eos, eos + 1, eos + 2, eos + 3]), deterministic=True)

    async with deterministic(3) as engine:
        _, whole = await host(TorchGenerator(engine)).run_group(request)
        sizes = [len(t.token_ids) for t in decode_group(whole).trajectories]
        assert min(sizes) < max(sizes), "all end at once: the test shows nothing"
    async with deterministic(3) as engine:
        scorer = CountingScorer()
        first = host(TorchGenerator(engine), scorer)
        task = asyncio.create_task(first.run_group(request))
        await scorer.first.wait()
        taken = await first.snapshot()
        task.cancel()
    assert taken is not None
    kept = decode_partial(taken[1], KEY, 0)
    assert 0 < len(kept.group.trajectories) < 4
    assert all(answer.finish_reason != "abort" for answer in kept.begun.values())
    async with deterministic(3) as engine:
        _, again = await host(TorchGenerator(engine)).run_group(request, taken[1])
        assert engine.statistics().tokens == sum(sizes) - kept.progress.tokens
    assert again == whole
