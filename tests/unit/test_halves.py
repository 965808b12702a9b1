"""Half a run alone: rollouts that are only recorded, and recorded ones that are trained on.

The real controller over scripted parts under the virtual clock; files and checkpoints are real.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.attempts import GroupSource
from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.resume import prepare
from asyncrl.checkpoint.saver import Saver
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.config_halves import half_of
from asyncrl.config_load import dump_config, parse_config
from asyncrl.controller import Controller, Summary, TaskSource
from asyncrl.environments.base import RolloutResult
from asyncrl.errors import ConfigError, DataError, ReplayError
from asyncrl.evaluation import Evaluator
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.pool import GeneratorPool
from asyncrl.generators.scripted import Failure, ScriptedGenerator
from asyncrl.halves.no_learner import NoLearner
from asyncrl.halves.publisher import UnsentPublisher
from asyncrl.halves.recording import Recording, open_recording
from asyncrl.halves.replay import RecordedGroups
from asyncrl.learners.base import Learner
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.plan import placement_rows
from asyncrl.pushes import Publisher
from asyncrl.queues.codec import append_record, decode_group, encode_group, read_records
from asyncrl.rollout import RolloutHost
from asyncrl.run import root_cause
from asyncrl.run_folder import RunFolder
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import Batch, GroupMeta, ReadyGroup, Task
from asyncrl.weight_sync.publish import WeightPublisher

from .controller_harness import BASE, ScriptedScorer, Stream
from .resume_harness import Written

OVERLAPPED = ("schedule.pipeline_depth=2", "schedule.max_staleness=3")


def config_in(folder: Path, *overrides: str, name: str = "r") -> Config:
    paths = [f"run.dir={folder}", f"run.name={name}", "log.rollouts_every=1"]
    return half_of(parse_config(BASE, [*paths, *overrides]))


class Folder(Written):
    """Keeps what is trained, too, in the run's folder."""

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        super().trained(step, groups)
        self.files.trained(step, groups)


def first_token(task: Task, result: RolloutResult) -> float:
    """Equal within some groups, and not in others."""
    return float(result.token_ids[0] % 3)


def go(
    config: Config, learner: Learner | None = None, *, stop_at_step: int | None = None, spare: bool = False
) -> Summary:
    """Run ``config`` as ``asyncrl train`` does, with scripted parts in place of actors.

    ``spare``: its one generator dies, and another takes its place.
    """
    config.run.folder.mkdir(parents=True, exist_ok=True)
    recording = None if config.run.replay is None else open_recording(config, Path())
    of = Origin("data" if recording is None else recording.fingerprint, {})
    resumed = prepare(config, of)
    (config.run.folder / "config.yaml").write_text(dump_config(config))
    bound = config.schedule.max_staleness
    learner = learner or (NoLearner() if config.run.rollout_only else ScriptedLearner(max_staleness=bound))
    files = RunFolder(config.run.folder, resolve=list, rollouts_every=config.log.rollouts_every)
    observer = Folder(files=files, stop_at_step=stop_at_step)

    def replica(name: str, *, dies: bool = False) -> LocalReplica:
        death = Failure("die", after_tokens=4)
        engine = ScriptedGenerator(
            failure=lambda request: death if dies and request.key.ordinal == 3 else None
        )
        return LocalReplica(name, RolloutHost(engine, ScriptedScorer(first_token), lambda ids: ""))

    async def main() -> Summary:
        tasks: TaskSource = Stream()
        source: GroupSource | None = None
        if recording is not None:
            pool, tasks = GeneratorPool([], min_replicas=0), recording
            source = RecordedGroups(recording, lambda: pool.newest_version, list)
        else:
            pool = GeneratorPool([replica("generator 0", dies=spare)], restart=replica)
        publisher: Publisher = UnsentPublisher(pool)
        if recording is None and not config.run.rollout_only:
            publisher = WeightPublisher(
                learner,
                pool,
                backend="gloo",
                bucket_bytes=1 << 20,
                timeout_s=1000.0,
                in_flight=True,
                kv="keep",
                clock=asyncio.get_running_loop().time,
            )
        controller = Controller(
            config,
            tasks,
            pool,
            learner,
            publisher,
            Evaluator(pool, (), config),
            observer,
            source=source,
            saver=Saver(
                config.checkpoint,
                CheckpointStore(config.run.folder / "checkpoints"),
                learner,
                resolve=list,
                lines_on_disk=files.on_disk,
                config_text=dump_config(config),
                of=of,
                last_step=None if resumed is None else resumed.state.step,
            ),
            resumed=resumed,
        )
        observer.check = controller.ledger.check
        run = asyncio.ensure_future(controller.run())
        if stop_at_step is not None:
            await observer.reached.wait()
            controller.request_stop("SIGTERM")
        return await run

    try:
        return run_virtual(main())
    except BaseExceptionGroup as error:
        raise root_cause(error) from None
    finally:
        files.close()


def lines(config: Config, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.folder / name).read_text().splitlines()]


def batches(config: Config) -> list[list[bytes]]:
    """The records of each file of ``rollouts/``."""
    found = []
    for file in sorted((config.run.folder / "rollouts").glob("step_*.msgpack")):
        with file.open("rb") as opened:
            found.append(list(read_records(opened)))
    return found


def content(batches: Sequence[Batch]) -> list[tuple[int, list[GroupMeta], list[tuple[float, ...]]]]:
    """What a learner was given, without the numbers that each run gives its groups."""

    def bare(meta: GroupMeta) -> GroupMeta:
        return replace(meta, ordinal=0, checksum=0, nbytes=0)

    return [(b.version, [bare(i.meta) for i in b.items], [i.advantages for i in b.items]) for b in batches]


# --------------------------------------------------------------------------------- recording


def test_a_recording_counts_every_prompt_and_no_update(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.rollout_only=true", "run.steps=4", *OVERLAPPED)
    summary = go(config)
    assert (summary.steps, summary.policy_version) == (4, 0)
    recorded = [decode_group(record) for batch in batches(config) for record in batch]
    assert [len(batch) for batch in batches(config)] == [2] * 4
    assert {v for group in recorded for t in group.trajectories for v in t.versions.tolist()} == {0}
    ends = lines(config, "ledger.jsonl")
    assert {(end["state"], end["reason"]) for end in ends} == {("dropped", "recorded")}
    # None was begun that is not on record.
    assert (
        sorted(end["ordinal"] for end in ends) == sorted(group.ordinal for group in recorded) == [*range(8)]
    )
    assert {end["lag"] for end in ends} == {0}
    metrics = lines(config, "metrics.jsonl")
    assert [(line["step"], line["policy_version"]) for line in metrics] == [(step, 0) for step in range(5)]
    assert (metrics[-1]["ledger/dropped"], metrics[-1]["ledger/trained"]) == (8, 0)
    assert all(line["staleness/max"] == 0 for line in metrics[1:])


def test_a_recording_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.rollout_only=true", "run.steps=5", *OVERLAPPED)
    whole = config_in(tmp_path, "run.rollout_only=true", "run.steps=5", *OVERLAPPED, name="whole")
    first = go(config, stop_at_step=2)
    assert 2 <= first.steps < 5
    assert go(config).steps == 5 - first.steps
    go(whole)
    ordinals = sorted(end["ordinal"] for end in lines(config, "ledger.jsonl"))
    assert ordinals == [*range(10)]

    def answers(config: Config) -> dict[int, list[list[int]]]:
        groups = [decode_group(record) for batch in batches(config) for record in batch]
        return {g.ordinal: [t.token_ids.tolist() for t in g.trajectories] for g in groups}

    assert answers(config) == answers(whole)
    assert prepare(config, Origin("data", {})).finished  # type: ignore[union-attr]


def test_a_generator_that_dies_while_recording_is_replaced_at_the_start_model(tmp_path: Path) -> None:
    config = config_in(tmp_path, "run.rollout_only=true", "run.steps=3", *OVERLAPPED)
    assert go(config, spare=True).steps == 3
    assert lines(config, "metrics.jsonl")[-1]["generator/restarts"] >= 1


def test_a_recording_cannot_be_gone_on_from_as_a_run_or_the_other_way(tmp_path: Path) -> None:
    go(config_in(tmp_path, "run.rollout_only=true", "run.steps=2"))
    with pytest.raises(ConfigError, match=r"run\.rollout_only: found False, .* made with True"):
        go(config_in(tmp_path, "run.steps=4"))


# --------------------------------------------------------------------------------- replaying


@pytest.mark.parametrize("settings", [(), OVERLAPPED, (*OVERLAPPED, "algorithm.filter_zero_variance=drop")])
def test_a_replay_trains_what_the_run_trained_at_the_same_lags(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    recorded = config_in(tmp_path, "run.steps=6", *settings)
    first = ScriptedLearner(max_staleness=recorded.schedule.max_staleness, step_s=1.0, push_s=0.25)
    go(recorded, first)
    config = config_in(
        tmp_path, "run.steps=6", *settings, f"run.replay={recorded.run.folder}", name="replayed"
    )
    again = ScriptedLearner(max_staleness=config.schedule.max_staleness)
    summary = go(config, again)
    assert content(again.batches) == content(first.batches)
    assert again.lags == first.lags
    assert not settings or max(lag for lags in again.lags for lag in lags if lag is not None) >= 1
    assert summary.policy_version == 6
    assert [end["ordinal"] for end in lines(config, "ledger.jsonl") if end["state"] == "trained"] == sorted(
        ordinal for ordinals in again.ordinals for ordinal in ordinals
    )
    for line, before in zip(lines(config, "metrics.jsonl"), lines(recorded, "metrics.jsonl"), strict=True):
        same = ("step", "policy_version", "staleness/mean", "staleness/max", "reward/mean", "ledger/trained")
        assert [line.get(key) for key in same] == [before.get(key) for key in same]
        assert line["ledger/submitted"] == sum(
            line[f"ledger/{s}"]
            for s in ("running", "ready", "training", "trained", "filtered", "dropped", "failed")
        )
        assert "perf/generator_busy" not in line, "there are no generators"


def test_a_replay_of_one_policy_lags_as_far_as_it_has_come(tmp_path: Path) -> None:
    recorded = config_in(tmp_path, "run.rollout_only=true", "run.steps=4", *OVERLAPPED)
    go(recorded)
    replay = ("run.steps=4", f"run.replay={recorded.run.folder}")
    with pytest.raises(DataError, match=r"lag 3 versions .*max_staleness = 2: raise it to 3"):
        go(config_in(tmp_path, *replay, "schedule.max_staleness=2", name="tight"))
    learner = ScriptedLearner(max_staleness=3)
    config = config_in(tmp_path, *replay, "schedule.max_staleness=3", name="wide")
    go(config, learner)
    assert learner.lags == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [line["staleness/max"] for line in lines(config, "metrics.jsonl")[1:]] == [0, 1, 2, 3]


def test_a_replay_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    recorded = config_in(tmp_path, "run.steps=6", *OVERLAPPED)
    first = ScriptedLearner(max_staleness=3, step_s=1.0)
    go(recorded, first)
    settings = ("run.steps=6", *OVERLAPPED, f"run.replay={recorded.run.folder}")
    config = config_in(tmp_path, *settings, name="replayed")
    one, two = ScriptedLearner(max_staleness=3), ScriptedLearner(max_staleness=3)
    go(config, one, stop_at_step=2)
    go(config, two)
    assert content([*one.batches, *two.batches]) == content(first.batches)
    other = config_in(tmp_path, "run.rollout_only=true", "run.steps=6", name="other")
    go(other)
    wide = ("run.steps=6", "schedule.max_staleness=9", f"run.replay={other.run.folder}")
    with pytest.raises(ConfigError, match=r"data\.train: the prompts, or their order"):
        go(config_in(tmp_path, *wide, name="replayed"))


@pytest.mark.parametrize(
    ("depth", "text"),
    [(0, r"tokens of version 1, but the policy is at 0"), (1, r"has 4 groups, and all were used")],
)
def test_an_update_that_is_skipped_puts_a_replay_out_of_step(tmp_path: Path, depth: int, text: str) -> None:
    settings = ("run.steps=4", "rollout.groups_per_step=1", f"schedule.pipeline_depth={depth}")
    recorded = config_in(tmp_path, *settings)
    go(recorded, ScriptedLearner(max_staleness=2, step_s=1.0))
    config = config_in(tmp_path, *settings, f"run.replay={recorded.run.folder}", name="replayed")
    with pytest.raises(ReplayError, match=text):
        go(config, ScriptedLearner(max_staleness=2, bad_steps=[0]))


def recording_of(config: Config) -> Recording:
    return open_recording(config, Path())


def test_what_cannot_be_replayed_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    recorded = config_in(tmp_path, "run.steps=4", "schedule.pipeline_depth=0")
    go(recorded, ScriptedLearner(max_staleness=2))
    folder = recorded.run.folder

    def config(*overrides: str, run: Path = folder) -> Config:
        return config_in(tmp_path, "run.steps=4", f"run.replay={run}", *overrides, name="again")

    assert len(recording_of(config())) == 8
    for overrides, text in (
        (("run.steps=5",), r"run\.steps: found 5, but .* holds 4 batches"),
        (("rollout.groups_per_step=3",), r"holds 2 groups, rollout\.groups_per_step = 3"),
        (("rollout.temperature=0.5",), r"rollout\.temperature: found 0\.5, but .* recorded with 1\.0"),
        (("rollout.max_new_tokens=4",), r"has a sequence of \d+ tokens; expected at most .* = 12"),
        (("run.name=r",), r"the run's own folder"),
        ((f"run.replay={tmp_path}",), r"run\.replay: found no .*metrics\.jsonl"),
    ):
        with pytest.raises((ConfigError, DataError), match=text):
            recording_of(config(*overrides))

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    sparse = copy("sparse")
    (sparse / "rollouts" / "step_000001.msgpack").unlink()
    with pytest.raises(DataError, match=r"holds tokens of version 1, but its batch is number 0"):
        recording_of(config("run.steps=3", run=sparse))
    torn = copy("torn")
    last = torn / "rollouts" / "step_000004.msgpack"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"step_000004\.msgpack cannot be read: .* ends after"):
        recording_of(config(run=torn))
    twice = copy("twice")
    shutil.copy(twice / "rollouts" / "step_000001.msgpack", twice / "rollouts" / "step_000002.msgpack")
    with pytest.raises(DataError, match=r"is in step_000001\.msgpack too"):
        recording_of(config(run=twice))
    untrained = copy("untrained")
    record = (untrained / "rollouts" / "step_000001.msgpack").open("rb")
    with record:
        group, *others = (decode_group(r) for r in read_records(record))
    masked = tuple(replace(t, loss_mask=t.loss_mask & False) for t in group.trajectories)
    with (untrained / "rollouts" / "step_000001.msgpack").open("wb") as file:
        for one in (replace(group, trajectories=masked), *others):
            append_record(file, encode_group(one))
    with pytest.raises(DataError, match=r"would be dropped by this config \(no_trained_token\)"):
        recording_of(config(run=untrained))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("run.rollout_only=true", "run.replay=x"), r"run\.replay: found 'x' with run\.rollout_only true"),
        (
            ("run.replay=x", "placement.mode=colocated"),
            r"placement\.mode: found .colocated.",
        ),
        (("run.rollout_only=true", "checkpoint.resume=y"), r"checkpoint\.resume: found 'y'"),
    ],
)
def test_halves_that_contradict_the_rest(overrides: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config(BASE, overrides)


def test_a_half_goes_by_settings_without_the_other(tmp_path: Path) -> None:
    whole = ("algorithm.kl=reward", "reference.refresh_every=1", "weight_sync.overlap=true")
    recording = config_in(tmp_path, "run.rollout_only=true", *whole)
    assert not recording.algorithm.needs_reference
    assert recording.log.rollouts_every == 1
    replay = config_in(tmp_path, "run.replay=x", *whole, *OVERLAPPED, "generators.backend=vllm")
    assert replay.algorithm.needs_reference
    assert (replay.schedule.pipeline_depth, replay.schedule.max_staleness) == (0, 3)
    assert replay.generators.backend == "torch"
    assert half_of(parse_config(BASE)) == parse_config(BASE)


def test_a_plan_names_the_actors_that_there_are() -> None:
    def named(*overrides: str) -> list[str]:
        rows = placement_rows(half_of(parse_config(BASE, ["algorithm.preset=ppo", *overrides])))
        return [name for name, _ in rows]

    assert named() == ["generator 0", "learner 0", "critic 0"]
    assert named("run.rollout_only=true") == ["generator 0"]
    assert named("run.replay=x") == ["learner 0", "critic 0"]
