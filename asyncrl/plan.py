"""What a run will do, from the config and the facts that ``check`` has found: the page it prints."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import yaml
from rich.table import Table

from asyncrl.algorithms.names import PRESETS
from asyncrl.config import Config, EnvironmentSection, ReferenceSection
from asyncrl.config_halves import absent_parts
from asyncrl.data.prompts import Prompts
from asyncrl.data.stream import PromptStream
from asyncrl.halves.recording import Recording
from asyncrl.placement import deal_cores


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model without loading it."""

    source: str
    architecture: str
    positions: int | None
    """Longest sequence in tokens; None where the model has no such limit."""
    vocabulary: int
    chat: bool
    """Whether prompts go through its chat template."""


@dataclass(frozen=True, slots=True)
class SampleScore:
    """One row, scored for real."""

    completion: str
    total: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid run: who runs where, how much of it, and which knob binds."""

    config: Config
    model: ModelFacts
    prompts: Prompts
    """The data, opened and measured: a run goes on with it."""
    score: SampleScore | None
    """By the reward functions; None where the reward model is all that scores."""
    recording: Recording | None = None
    """What is trained on in place of new rollouts."""

    @property
    def stream(self) -> PromptStream | Recording:
        """The tasks of the run: a pure function of the ordinal, and its fingerprint."""
        return self.prompts.train if self.recording is None else self.recording

    @property
    def samples(self) -> int:
        """Answers that are trained on in the whole run."""
        rollout = self.config.rollout
        return self.config.run.steps * rollout.groups_per_step * rollout.group_size

    @property
    def tokens_per_step(self) -> int:
        """Upper bound of the response tokens of one update."""
        rollout = self.config.rollout
        return rollout.groups_per_step * rollout.group_size * rollout.max_new_tokens

    @property
    def epochs(self) -> float:
        """Times that the whole run goes through the training rows."""
        return self.config.run.steps * self.config.rollout.groups_per_step / self.prompts.report.trainable

    def table(self) -> Table:
        """The page, a row a subject."""
        config = self.config
        run, rollout, schedule = config.run, config.rollout, config.schedule
        depth, binding = effective_depth(config)
        outstanding = (depth + 1) * rollout.groups_per_step
        table = Table(title=f"plan of {run.name}", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("folder", str(run.folder))
        if run.rollout_only or self.recording is not None:
            table.add_row("half", self._half_text())
        table.add_row("model", self._model_text())
        table.add_row("data", str(self.prompts.report))
        table.add_row("reward", self._reward_text())
        if config.environment is not None:
            table.add_row("environment", environment_text(config.environment, rollout.max_new_tokens))
        table.add_row("algorithm", algorithm_text(config))
        table.add_row(
            "length",
            f"{run.steps} steps x {rollout.groups_per_step} groups x {rollout.group_size} samples = "
            f"{self.samples} samples, {self.epochs:.2f} epochs",
        )
        table.add_row(
            "one step",
            f"at most {self.tokens_per_step} response tokens; the longest sequence has "
            f"{config.max_sequence_tokens} tokens, a micro-batch {config.learner.micro_batch_tokens}",
        )
        table.add_row(
            "depth",
            f"{depth} ({'synchronous' if depth == 0 else 'overlapped'}); {binding} binds; at most "
            f"{outstanding} groups = {outstanding * rollout.group_size} samples are outstanding",
        )
        table.add_row(
            "staleness",
            f"no token older than {schedule.max_staleness} versions is trained on; "
            f"{_every(schedule.publish_every)} version is pushed; at the bound: {schedule.at_bound}",
        )
        if config.placement.mode == "colocated":
            table.add_row("turns", turns_text(config))
        table.add_row("slots", slots_text(config, outstanding * rollout.group_size))
        if config.placement.address is not None:
            table.add_row("nodes", cluster_text(config))
        for name, text in placement_rows(config):
            table.add_row(name, text)
        return table

    def _half_text(self) -> str:
        run = self.config.run
        if self.recording is None:
            return f"{run.steps} batches of the start model are put on record in rollouts/; nobody trains"
        return f"{run.steps} recorded batches of {run.replay} are trained on; nobody samples, or evaluates"

    def _model_text(self) -> str:
        model = self.model
        positions = "no limit of positions" if model.positions is None else f"{model.positions} positions"
        return (
            f"{model.source}: {model.architecture}, {positions}, vocabulary {model.vocabulary}, "
            f"{self.config.model.dtype}; prompts {'by chat template' if model.chat else 'as plain text'}"
        )

    def _reward_text(self) -> str:
        model = self.config.reward_model
        terms = [f"{f.weight:g} x {f.name or f.path}" for f in self.config.reward.functions]
        environment = self.config.environment
        terms += [] if environment is None else [f"{environment.reward_weight:g} x the environment's own"]
        terms += [] if model is None else [f"{model.weight:g} x the reward model {model.path}"]
        weights = ", ".join(terms)
        if self.score is None:
            return weights
        by = "" if model is None and environment is None else " by the functions"
        shown = repr(self.score.completion[:40])
        return f"{weights}; one row scored for real{by}: {self.score.total:g} for {shown}"


def environment_text(section: EnvironmentSection, max_new_tokens: int) -> str:
    """What a trajectory goes through, and its budgets."""
    what = f"tools {', '.join(section.tools)}" if section.tools else section.name
    turns = "turns"
    if section.kind == "agent":
        what, turns = f"agent {what}", "calls"
    turn = "" if section.max_turn_tokens is None else f", at most {section.max_turn_tokens} a turn"
    time = "" if section.max_time_s is None else f", no turn begins after {section.max_time_s:g} s"
    return (
        f"{what}: at most {section.max_turns} {turns} in {max_new_tokens} tokens, the environment's included"
        f"{turn}{time}; workers beside each generator: {section.workers}"
    )


def algorithm_text(config: Config) -> str:
    """The section as it came out, what the preset says and what was set beside it, as YAML."""
    values = config.algorithm.model_dump(mode="json")
    given = PRESETS[values["preset"]]
    differing = [key for key in given if values[key] != given[key]]
    remark = f", but for {', '.join(differing)}" if differing else ""
    block = yaml.safe_dump(
        {**values, "length_norm": config.length_norm}, default_flow_style=True, sort_keys=False, width=2**20
    )
    return f"preset {values['preset']}{remark}: {block.strip()}"


def effective_depth(config: Config) -> tuple[int, str]:
    """Batches that rollouts can be ahead of the update, and the key that sets it.

    A group admitted in the last step before a push is k - 1 versions old already, so S leaves room
    for S - k + 1 batches ahead; the last batch of a run has none after it.
    """
    schedule = config.schedule
    limits = {
        "schedule.pipeline_depth": schedule.pipeline_depth,
        "schedule.max_staleness": schedule.max_staleness - schedule.publish_every + 1,
        "run.steps": config.run.steps - 1,
    }
    name = min(limits, key=lambda key: limits[key])
    return limits[name], name


def turns_text(config: Config) -> str:
    """How far ahead a colocated run may be, and what that costs."""
    turns = (
        "generators and learner take turns on the same parameters, so a push moves no bytes; each generator "
        "frees its keys and values before an update. The placement allows any depth: "
    )
    if config.generators.backend == "vllm":
        turns = (
            "generators and learner take turns on the same devices: vLLM sleeps during an update, and the "
            "learner's state is in host memory otherwise (on GPUs; on CPUs all of it stays). The placement "
            "allows any depth: "
        )
    depth = config.schedule.pipeline_depth
    if depth == 0:
        return turns + "at 0 no answer is unfinished when a turn ends"
    return turns + (
        f"at {depth} a turn ends when a batch is ready, unfinished answers wait and go on under the next "
        "version, and their keys and values are computed anew (kv_after_swap: recompute)"
    )


def slots_text(config: Config, outstanding: int) -> str:
    """Whether the engines can sample everything that is outstanding at the same time."""
    slots = config.generators.slots * config.generators.replicas
    text = f"{slots} sequences are sampled at a time, of at most {outstanding} outstanding"
    if slots >= outstanding:
        return text
    return f"{text}: generators.slots binds, the rest waits ({ceil(outstanding / slots)} rounds)"


def cluster_text(config: Config) -> str:
    """Which nodes of the cluster each side may be on, and how many generators there may be."""
    placement, generators = config.placement, config.generators
    of = "" if placement.nodes is None else f"{placement.nodes} nodes "
    sides = [("learner", placement.learner)]
    if placement.mode == "split":
        sides.append(("generators", placement.generators))
    texts = [
        f"{name} {side.strategy} on {'any node' if side.nodes is None else ', '.join(side.nodes)}"
        for name, side in sides
    ]
    text = f"{of}of the cluster at {placement.address}; {'; '.join(texts)}"
    if placement.mode == "colocated":
        return text
    return (
        f"{text}; {generators.replicas} generators to begin with, at least {generators.fewest} and at most "
        f"{generators.most} later"
    )


def placement_rows(config: Config) -> list[tuple[str, str]]:
    """Each process: its device, cores and threads."""
    generators, learner = config.generators, config.learner
    rows = []
    workers = config.reward.workers if config.reward.functions else 0
    shared = f", {generators.workers} workers share the model" if generators.workers > 1 else ""
    for i, cores in enumerate(deal_cores(generators.cpu_cores, generators.replicas)):
        rows.append(
            (
                f"generator {i}",
                f"{generators.backend} engine on {generators.device}, {_cores(cores, generators.threads)}, "
                f"{generators.slots} slots{shared}; reward workers beside it: {workers}",
            )
        )
    more = "" if learner.lora is None else f"; LoRA of rank {learner.lora.rank} alone is trained"
    if learner.shared > 1:
        what = "sequence" if learner.sequence_parallel > 1 else "layer"
        more += f"; {learner.shared} ranks share each {what}"
    beside = ""
    if config.placement.mode == "colocated":
        shared = "in the process" if generators.backend == "torch" else "in turns on the device"
        beside = f", {shared} of generator {{}}"
    for i, cores in enumerate(deal_cores(learner.cpu_cores, learner.ranks)):
        rows.append(
            (
                f"learner {i}",
                f"{learner.backend} ZeRO-{learner.zero_stage} on {learner.device}, "
                f"{_cores(cores, learner.threads)}{more}{beside.format(i)}",
            )
        )
    if config.algorithm.needs_reference and config.reference.place != "actors":
        what = "the adapters' base" if config.reference.place == "lora_base" else _follows(config.reference)
        rows.append(("reference", f"in the learner, {what}"))
    for name, role in config.roles.items():
        for i, cores in enumerate(deal_cores(role.cpu_cores, role.actors[1])):
            follows = f", {_follows(config.reference)}" if name == "reference" else ""
            rows.append((f"{name} {i}", f"on {role.device}, {_cores(cores, role.threads)}{follows}"))
    return [row for row in rows if not row[0].startswith(absent_parts(config))]


def _follows(reference: ReferenceSection) -> str:
    if reference.refresh_every == 0:
        return "frozen"
    what = "the policy" if reference.ema is None else f"an average of the policy with decay {reference.ema:g}"
    return f"takes {what} at {_every(reference.refresh_every)} version"


def _cores(cores: tuple[int, ...] | None, threads: int) -> str:
    where = "any core" if cores is None else f"core {', '.join(map(str, cores))}"
    return f"{where}, {threads} thread{'s' if threads > 1 else ''}"


def _every(n: int) -> str:
    ending = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return "every" if n == 1 else f"every {n}{ending}"
