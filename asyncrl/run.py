"""``asyncrl train``: put the parts of a run together, run it, and leave nothing behind.

Invariants:
- Config and data errors come before any model is loaded, and exit with 2.
- The first SIGINT or SIGTERM ends the run after the running update and a checkpoint of it, or at once where
  none has begun; the second ends it now.
- One process at a time writes to a run's folder.
- A failure of infrastructure may start it again here, from its last checkpoint: see ``restarts``.
- However a run ends, its actors and worker processes end with it; ``sentinel`` sees to it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from asyncrl.check import validate
from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.files import replace_file
from asyncrl.checkpoint.groups import payloads_of, with_payloads
from asyncrl.checkpoint.resume import Resumed, prepare
from asyncrl.checkpoint.saver import Saver
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.config_load import dump_config
from asyncrl.controller import Controller, Summary
from asyncrl.display import Display, lag, make_display
from asyncrl.errors import UsageError
from asyncrl.evaluation import Evaluator
from asyncrl.generators.pool import GeneratorPool
from asyncrl.hub import model_place
from asyncrl.learners.base import Learner
from asyncrl.ledger import Retired
from asyncrl.model_files import model_fingerprints
from asyncrl.restarts import Restarts
from asyncrl.roles.annotator import Annotator
from asyncrl.run_folder import RunFolder, claimed
from asyncrl.sentinel import Sentinel
from asyncrl.stop_signals import StopSignals
from asyncrl.timeline import unix_offset
from asyncrl.tracking import open_tracker
from asyncrl.types import Metrics, ReadyGroup, Task
from asyncrl.weight_sync.canary import DEFAULT_TOLERANCE, Canary, canary_tokens

if TYPE_CHECKING:
    from asyncrl.placement import Placement
    from asyncrl.plan import Plan
    from asyncrl.roles.base import Role

log = logging.getLogger(__name__)


class RunObserver:
    """Sends what the controller reports to the run's folder and to the display."""

    def __init__(self, folder: RunFolder, display: Display) -> None:
        self._folder = folder
        self._display = display

    def retired(self, retired: Retired) -> None:
        self._folder.retired(retired)

    def stepped(self, record: Metrics) -> None:
        self._folder.check()
        self._display.step(record)

    def evaluated(self, result: Metrics) -> None:
        self._display.evaluation(result)

    def recorded(self, record: Metrics) -> None:
        self._folder.metrics(record)

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        self._folder.trained(step, groups)

    def phase(self, name: str) -> None:
        self._display.phase(name)


@dataclass(slots=True)
class Parts:
    """Everything that one run is made of."""

    controller: Controller
    pool: GeneratorPool
    learner: Learner
    annotator: Annotator
    display: Display
    files: RunFolder


def train(config: Config, signals: StopSignals) -> int:
    """Run the config to its end; returns the exit code.

    Raises UsageError for what the user can fix, Interrupted for a signal before there was a run to end.
    """
    console = Console(stderr=True)
    set_up_logging(console)
    log.info("checking config, data and rewards")
    plan = validate(config)
    config = plan.config
    with claimed(config) as folder:
        origin = Origin(plan.stream.fingerprint, model_fingerprints(config))
        store = CheckpointStore(folder.resolve() / "checkpoints")
        restarts = Restarts(
            config.run.max_restarts, config.run.restart_backoff_s, lambda: max(store.steps(), default=-1)
        )

        def attempt() -> int:
            again = restarts.total > 0 and bool(store.steps())
            resumed = prepare(from_own(config) if again else config, origin)
            if resumed is not None and resumed.finished:
                log.info(
                    "nothing is left to do: %s has all of its %d steps; raise run.steps to go on",
                    folder,
                    config.run.steps,
                )
                return 0
            replace_file(folder / "config.yaml", dump_config(config).encode())
            with Sentinel() as sentinel:
                return _train(folder, plan, origin, resumed, console, sentinel, signals)

        try:
            code = restarts.run(attempt, wanted=lambda: signals.received is None)
        except UsageError:
            raise
        except Exception as error:
            log.error("the run failed", exc_info=root_cause(error))
            steps = store.steps()
            if steps:
                log.error("start the same command again to go on from the checkpoint of step %d", max(steps))
            return 1
    if restarts.total:
        log.info("the run was started again %d times", restarts.total)
    return code


def from_own(config: Config) -> Config:
    """The config that goes on from the checkpoints of its own folder, though the run was to begin anew."""
    if config.checkpoint.resume != "never":
        return config
    checkpoint = config.checkpoint.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"checkpoint": checkpoint})


def _train(
    folder: Path,
    plan: Plan,
    origin: Origin,
    resumed: Resumed | None,
    console: Console,
    sentinel: Sentinel,
    signals: StopSignals,
) -> int:
    """The run itself, in a folder that is ready for it. Raises what ended it."""
    from asyncrl.placement import close_session, open_session

    config = plan.config
    for line in str(plan.prompts.report).splitlines():
        log.info("%s", line)
    try:
        # Before the model, which may take minutes to come: a place that is not there shows at once.
        with signals.kept():
            placement = open_session(config)
        if placement.logs is not None:
            sentinel.watch(placement.logs)
        signals.check()
        model_path = resolve_model(config, console)
        signals.check()
        parts = build(model_path, plan, origin, placement, folder, console, resumed)
        try:
            summary = asyncio.run(_run(parts, signals))
        finally:
            parts.display.close()
            parts.files.close()
    except Exception as error:
        cause = root_cause(error)
        if cause is not error and isinstance(cause, UsageError):  # found by an actor, of the model itself
            raise cause from error
        raise
    finally:
        close_session()
    print_summary(console, config, folder, summary)
    return 0 if summary.stopped_by is None else 128 + signal.Signals[summary.stopped_by]


def resolve_model(config: Config, console: Console) -> str:
    """The folder or hub name of the model; a small one is made on first use."""
    path = config.model.path
    if path is not None:
        return model_place(path)
    from asyncrl.models import ensure_model, show_progress

    with show_progress(console) as progress:
        return str(ensure_model(config, progress).resolve())


def build(
    model_path: str,
    plan: Plan,
    origin: Origin,
    placement: Placement,
    folder: Path,
    console: Console,
    resumed: Resumed | None = None,
) -> Parts:
    """Create the actors and the controller over them; nothing runs yet."""
    from asyncrl.placement import fetch_payloads
    from asyncrl.roles.build import build_reference_role, build_reward_model
    from asyncrl.roles.moving import MovingReference
    from asyncrl.sides import build_generators_alone, build_learner_alone, build_sides

    config, prompts = plan.config, plan.prompts
    display = make_display(config, console)
    after = None if resumed is None else resumed.state.step
    files = RunFolder(
        folder,
        resolve=fetch_payloads,
        rollouts_every=config.log.rollouts_every,
        trackers=[partial(open_tracker, name, folder, config, after) for name in config.log.trackers],
        trace_bytes=config.log.trace_mb << 20,
        clock_offset_s=unix_offset(),
    )
    samples, trains = plan.recording is None, not config.run.rollout_only
    if plan.recording is not None:
        sides = build_learner_alone(config, model_path, placement, plan.recording)
    elif trains:
        canary = make_canary(config, prompts.train.iterate())
        sides = build_sides(config, model_path, placement, canary, files.timeline)
    else:
        sides = build_generators_alone(config, model_path, placement, files.timeline)
    pool, learner = sides.pool, sides.policy
    critics: list[Role] = []
    reference: Role | None = None
    if trains:
        learner, critics = build_learner(config, model_path, placement, sides.policy)
        reference = build_reference_role(config, model_path, placement, learner)
    moving = reference if isinstance(reference, MovingReference) else None
    # Recorded rewards are whole: its score is in them.
    reward_model = build_reward_model(config, model_path, placement) if samples else None
    annotator = Annotator([*([] if reference is None else [reference]), *critics], reward_model)
    controller = Controller(
        config,
        plan.stream,
        pool,
        learner,
        sides.publisher,
        Evaluator(
            pool, prompts.eval if samples else (), config, reward_model, prompts.eval_sets if samples else {}
        ),
        RunObserver(files, display),
        source=sides.source,
        annotator=annotator,
        reference=moving,
        turns=sides.turns,
        saver=Saver(
            config.checkpoint,
            CheckpointStore(folder.resolve() / "checkpoints"),
            learner,
            resolve=fetch_payloads,
            lines_on_disk=files.on_disk,
            config_text=dump_config(config),
            of=origin,
            reference=moving,
            last_step=None if resumed is None or resumed.elsewhere else resumed.state.step,
        ),
        resumed=None if resumed is None else in_object_store(resumed),
        timeline=files.timeline,
    )
    return Parts(controller, pool, learner, annotator, display, files)


def in_object_store(resumed: Resumed) -> Resumed:
    """With references in place of the payloads of ready groups, so that actors fetch them as any other's."""
    from asyncrl.placement import store_payloads

    groups = [group for group, _ in resumed.ready]
    stored = with_payloads(groups, store_payloads(payloads_of(groups)))
    starts = (start for _, start in resumed.ready)
    return replace(resumed, ready=tuple(zip(stored, starts, strict=True)))


def build_learner(
    config: Config, model_path: str, placement: Placement, policy: Learner
) -> tuple[Learner, list[Role]]:
    """The learner, and the critic, if there is one, as a role; the learner's updates are its own too."""
    from asyncrl.learners.actor_critic import ActorCritic
    from asyncrl.learners.critic_group import RayCritic
    from asyncrl.placement import deal_cores

    if not config.has_critic:
        return policy, []
    settings = config.critic
    critic = RayCritic(
        config,
        model_path if settings.path is None else model_place(settings.path),
        placement,
        cores=deal_cores(settings.cpu_cores, settings.ranks),
    )
    learner = ActorCritic(
        policy, critic, warmup_steps=settings.warmup_steps, max_bad_steps=config.learner.max_bad_steps
    )
    return learner, [critic]


def make_canary(config: Config, tasks: Iterable[Task]) -> Canary | None:
    """The run's canary, of the prompts of its first ``tasks``; None where it is switched off."""
    sync = config.weight_sync
    if sync.canary_every == 0:
        return None
    # Less one: vLLM scores a prompt only if it can sample a token after it.
    tokens = canary_tokens(tasks, config.max_sequence_tokens - 1)
    tolerance = sync.canary_tolerance
    return Canary(
        tokens,
        every=sync.canary_every * config.schedule.publish_every,
        tolerance=DEFAULT_TOLERANCE[config.model.dtype] if tolerance is None else tolerance,
        overlap=sync.overlap,
    )


async def _run(parts: Parts, signals: StopSignals) -> Summary:
    with signals.listened_to(parts.controller.request_stop):
        try:
            return await parts.controller.run()
        finally:
            # The learner last: generators listen to its store for what they are to receive.
            for closing in (parts.pool.close(), parts.annotator.close(), parts.learner.close()):
                await asyncio.gather(closing, return_exceptions=True)


def root_cause(error: BaseException) -> BaseException:
    """The one exception inside nested groups of one; else the group itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def set_up_logging(console: Console) -> None:
    """Log through ``console``, so that lines and the live display do not overwrite each other."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("asyncrl")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def print_summary(console: Console, config: Config, folder: Path, summary: Summary) -> None:
    """How the run ended, and where everything is."""
    table = Table(
        title=f"{config.run.name}: {summary.steps} steps in {summary.wall_s:.0f} s", show_header=False
    )
    if summary.stopped_by:
        table.add_row("stopped by", summary.stopped_by)
    before, after = summary.eval_before, summary.eval_after
    if before and after:
        was, now = before["eval/reward_mean"], after["eval/reward_mean"]
        table.add_row("eval reward before", f"{was:.3f}")
        table.add_row("eval reward after", f"{now:.3f}  ({now - was:+.3f})")
    if "staleness/max" in summary.last:
        table.add_row("lag of the last step", lag(summary.last, config.schedule.max_staleness))
        table.add_row("last step", f"{summary.last['perf/tokens_per_s']:,.0f} trained tokens/s")
    counts = summary.counts
    table.add_row(
        "groups",
        ", ".join(f"{counts[state]} {state}" for state in ("trained", "filtered", "dropped", "failed")),
    )
    if summary.checksum:
        table.add_row("model checksum", summary.checksum)
    table.add_row("folder", str(folder))
    console.print(table)
