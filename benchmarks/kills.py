"""A run that is killed again and again, in every phase, and loses nothing.

    python benchmarks/kills.py --kills 100 --undisturbed 4 --out runs/kills
    python benchmarks/kills.py --kills 100 --out runs/kills-to-the-bit --deterministic
    python benchmarks/kills.py --kills 10 --out runs/kills-replayed --replay
    python benchmarks/kills.py --kills 5 --spread 3 --out runs/kills-short --config mine.yaml run.steps=12

First the run is made undisturbed, as often as asked for: how far apart their rewards end is the noise that
those of the killed ones are seen in. Then, with a checkpoint of every step, it is started again and again and
gets SIGKILL each time: in turn while it starts, samples, updates, pushes and writes a checkpoint, at a moment
drawn from ``--seed`` (``killed_run.py`` counts the phases), within ``--spread`` steps. Where a run comes to
its end before all kills are made, another one follows. At the end of each: every ordinal was retired exactly
once, every step has one line, no lag was beyond the bound. With ``--deterministic`` the parameters have the
bits of the undisturbed run's. With ``--replay``, which is for overlapped runs too, a learner that nobody
kills trains what the killed run trained, batch by batch, and has to come to the same bits.

``<out>/kills.json`` holds what was done. Started again with the same arguments, this goes on from there;
``--kills`` and ``--undisturbed`` may have become more, and ``--spread`` another.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.bench.machine import describe_machine
from asyncrl.checkpoint.files import replace_file
from asyncrl.config_load import load_config
from asyncrl.models.create import ensure_model

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import PHASES, Moment

ROOT = Path(__file__).parent.parent
TO_THE_BIT = ("run.deterministic=true", "schedule.pipeline_depth=0", "schedule.max_staleness=0")
QUIET = ("checkpoint.every=1", "log.trackers=[]", "log.rollouts_every=0", "log.display=lines")
RECORDED = "log.rollouts_every=1"
SHOWN_LINES = 30
log = logging.getLogger("kills")


@dataclass
class Records:
    """All that ``kills.json`` holds."""

    arguments: dict[str, Any]
    """What has to be the same when it is gone on from."""
    undisturbed: list[dict[str, Any]] = field(default_factory=list)
    """How the runs end that nobody kills, and ``seconds`` by phase."""
    kills: list[dict[str, Any]] = field(default_factory=list)
    """Of each: number, run, spread, what was asked for, and the phase and second in which it came."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """How those that were killed ended."""

    def write(self, path: Path) -> None:
        replace_file(path, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @staticmethod
    def read(path: Path, arguments: dict[str, Any]) -> Records:
        """What there is, or new ones. SystemExit where it was made with other arguments."""
        if not path.exists():
            return Records(arguments)
        found = Records(**json.loads(path.read_text()))
        if found.arguments != arguments:
            raise SystemExit(
                f"{path} was made with {found.arguments}, found {arguments}: give these, or another --out"
            )
        return found


@dataclass(frozen=True)
class Draws:
    """Where the kills come."""

    seed: int
    spread: int
    """Steps after the start of a process within which it is killed."""
    groups_per_step: int

    def draw(self, number: int, seconds: dict[str, float], attempt: int = 0) -> Moment:
        """The moment of a kill: phases take turns, the rest is drawn from the seed and the kill's ``number``.

        ``seconds``: how long each phase usually is. ``attempt``: how often the moment did not come before the
        run's end, so that another is drawn.
        """
        phase = PHASES[number % len(PHASES)]
        chance = random.Random(f"{self.seed}-{number}-{attempt}")
        return Moment(phase, self._occurrence(phase, chance), chance.random() * seconds[phase])

    def _occurrence(self, phase: str, chance: random.Random) -> int:
        if phase == "start-up":
            return 1
        if phase == "rollout":  # one a group
            return chance.randint(1, self.spread * self.groups_per_step)
        # The first push is of the start-up.
        return chance.randint(1, self.spread) + (phase == "push")


@dataclass(frozen=True)
class Life:
    """How one process ended."""

    killed: dict[str, Any] | None
    """The report's line of the kill; None where the run came to its end."""
    training_s: float | None
    """From its start to its first update; None where it was killed before."""
    seconds: dict[str, float]
    """Of each phase, the usual duration; empty for one that was killed."""


class Runs:
    """Starts runs of one config into ``folder``."""

    def __init__(self, config: Path, folder: Path, overrides: Sequence[str], timeout_s: float) -> None:
        self._config = config
        self._folder = folder
        self._overrides = (*QUIET, *overrides)
        self._timeout_s = timeout_s

    def live(self, name: str, moment: Moment | None) -> Life:
        """Start or resume a run, until its end or ``moment``. SystemExit for any other end."""
        report, output = self._folder / f"{name}.report", self._folder / f"{name}.log"
        report.unlink(missing_ok=True)
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "killed_run.py"),
            str(report),
            str(moment or "none"),
        ]
        command += self._train(name)
        code = self._run(command, output)
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        said = {line["event"]: line for line in lines}
        if code != 0 and "killed" not in said:
            raise SystemExit(self._ended(name, code, output))
        return Life(
            said.get("killed"),
            said["training"]["after_s"] if "training" in said else None,
            said["ended"]["seconds"] if "ended" in said else {},
        )

    def replay(self, name: str) -> str:
        """Train the batches of a run that has ended, at one go: the checksum that it comes to."""
        again = f"{name}-replayed"
        command = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            *self._train(again),
            f"run.replay={self._folder / name}",
        ]
        output = self._folder / f"{again}.log"
        if (code := self._run(command, output)) != 0:
            raise SystemExit(self._ended(again, code, output))
        last = (self._folder / again / "metrics.jsonl").read_text().splitlines()[-1]
        return str(json.loads(last)["model/checksum"])

    def _train(self, name: str) -> list[str]:
        command = ["train", "--config", str(self._config), *self._overrides]
        return [*command, f"run.dir={self._folder}", f"run.name={name}"]

    def _run(self, command: Sequence[str], output: Path) -> int:
        with output.open("ab") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=self._timeout_s)
        return done.returncode

    @staticmethod
    def _ended(name: str, code: int, output: Path) -> str:
        tail = output.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        return "\n".join([f"{name} ended with exit code {code}, after:", *tail])

    def verify(self, name: str) -> dict[str, Any]:
        """How a run ended. AssertionError where something was lost, or there twice, or too old."""
        folder = self._folder / name
        config = load_config(folder / "config.yaml", ())
        ends = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ordinals, last = sorted(end["ordinal"] for end in ends), lines[-1]
        assert ordinals == list(range(len(ordinals))), f"{name}: an ordinal was lost, or retired twice"
        assert len(ends) == last["ledger/submitted"], (
            f"{name}: {len(ends)} ends of {last['ledger/submitted']}"
        )
        steps = [line["step"] for line in lines]
        assert steps == list(range(len(steps))), f"{name}: steps {steps}"
        assert last["policy_version"] == config.run.steps, f"{name} ended at {last['policy_version']}"
        bound, largest = config.schedule.max_staleness, max(line.get("staleness/max", 0) for line in lines)
        assert largest <= bound, f"{name}: lag {largest}, max_staleness {bound}"
        return {
            "run": name,
            "steps": steps[-1],
            "ordinals": len(ordinals),
            "lag_max": largest,
            "eval_reward": last.get("eval/reward_mean"),
            "checksum": last["model/checksum"],
        }


def perform(records: Records, file: Path, runs: Runs, draws: Draws, *, kills: int, undisturbed: int) -> None:
    """All that is missing: undisturbed runs, then kills, until the last of the killed runs has ended."""
    asked = records.arguments
    while len(records.undisturbed) < undisturbed:
        name = f"undisturbed-{len(records.undisturbed)}"
        life = runs.live(name, None)
        if not life.seconds:
            raise SystemExit(f"{name} was over before: remove its folder")
        records.undisturbed.append({**runs.verify(name), "seconds": life.seconds})
        log.info("%s: %s", name, records.undisturbed[-1])
        records.write(file)
    while True:
        number, name = len(records.kills), f"killed-{len(records.runs)}"
        over = number >= kills
        if over and (not records.kills or records.kills[-1]["run"] != name):
            return  # the run of the last kill has ended
        usual = records.undisturbed[0]["seconds"]
        moment = None if over else draws.draw(number, usual, attempt=len(records.runs))
        life = runs.live(name, moment)
        if life.killed is None:
            ended = runs.verify(name)
            if asked["replay"]:
                ended["replayed"] = replayed = runs.replay(name)
                assert replayed == ended["checksum"], f"{name}: {ended['checksum']}, replayed {replayed}"
            records.runs.append(ended)
            if asked["deterministic"]:
                expected = records.undisturbed[0]["checksum"]
                assert ended["checksum"] == expected, f"{name}: {ended['checksum']}, undisturbed {expected}"
            log.info("%s came to its end as it should: %s", name, ended)
        else:
            phase, after_s = life.killed["phase"], life.killed["after_s"]
            kill = {"number": number, "run": name, "spread": draws.spread, "asked": str(moment)}
            kill |= {"phase": phase, "after_s": after_s}
            records.kills.append({**kill, "training_s": life.training_s})
            log.info("kill %d of %d: %s in its %s", number + 1, kills, name, phase)
        records.write(file)


def report(records: Records) -> str:
    """The table of kills by phase, and how the runs ended."""
    lines = ["| phase | kills |", "| --- | --- |"]
    for phase in PHASES:
        lines.append(f"| {phase} | {sum(kill['phase'] == phase for kill in records.kills)} |")
    for spread, count in sorted(Counter(kill["spread"] for kill in records.kills).items()):
        lines += ["", f"{count} of them came within {spread} steps of a start."]
    first = sum(kill["phase"] == "push" and kill["training_s"] is None for kill in records.kills)
    if first:
        lines += ["", f"{first} of the pushes were those that a start begins with."]
    starts = [kill["training_s"] for kill in records.kills if kill["training_s"] is not None]
    if starts:
        lines += ["", f"From a start to the first update: {statistics.median(starts):.1f} s (median)."]
    lines += ["", "| run | steps | ordinals | largest lag | eval reward | checksum |", "| --- " * 6 + "|"]
    for run in (*records.undisturbed, *records.runs):
        reward = "" if run["eval_reward"] is None else f"{run['eval_reward']:.3f}"
        cells = (run["run"], run["steps"], run["ordinals"], run["lag_max"], reward, run["checksum"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for name, ended in (("undisturbed", records.undisturbed), ("killed", records.runs)):
        rewards = [run["eval_reward"] for run in ended if run["eval_reward"] is not None]
        if len(rewards) > 1:
            mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
            lines += ["", f"Eval reward, {name}: {mean:.3f}, standard deviation {spread:.3f}."]
    return "\n".join(lines)


def page(records: Records) -> str:
    asked, machine = records.arguments, describe_machine()
    flags = "".join(f" --{flag}" for flag in ("deterministic", "replay") if asked[flag])
    return "\n".join(
        [
            "# A run that is killed again and again",
            "",
            f"`python benchmarks/kills.py --kills {len(records.kills)} "
            f"--undisturbed {len(records.undisturbed)} --seed {asked['seed']}{flags}`,",
            f"over `configs/{asked['config']}` with {', '.join(asked['overrides']) or 'no other settings'};",
            f"{machine['processor']}, {machine['cores']} cores. Every ordinal was retired exactly once,",
            "every step has one line, and no lag was beyond the bound.",
            "",
            report(records),
            "",
        ]
    )


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--undisturbed", type=at_least_one, default=1, help="runs that nobody kills (default 1)"
    )
    parser.add_argument("--spread", type=at_least_one, default=20, help="steps of a life (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; the run has its own")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--deterministic", action="store_true", help="synchronous, and equal to the bit")
    parser.add_argument("--replay", action="store_true", help="compare with a learner that nobody kills")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest life of one process")
    parser.add_argument("--page", type=Path, help="write what came of it here, as Markdown")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    asked.out.mkdir(parents=True, exist_ok=True)
    overrides = [*TO_THE_BIT] if asked.deterministic else []
    overrides += [RECORDED] if asked.replay else []
    overrides += asked.overrides
    arguments = {
        "seed": asked.seed,
        "config": asked.config.name,
        "deterministic": asked.deterministic,
        "replay": asked.replay,
        "overrides": overrides,
    }
    config = load_config(asked.config, [*overrides, f"run.dir={asked.out.resolve()}"])
    if config.model.path is None:
        ensure_model(config)  # or the undisturbed run's start-up would be the only one to make it
    file = asked.out / "kills.json"
    records = Records.read(file, arguments)
    runs = Runs(asked.config, asked.out.resolve(), overrides, asked.timeout_s)
    draws = Draws(asked.seed, asked.spread, config.rollout.groups_per_step)
    perform(records, file, runs, draws, kills=asked.kills, undisturbed=asked.undisturbed)
    text = page(records)
    sys.stdout.write(text)
    if asked.page is not None:
        asked.page.write_text(text)


if __name__ == "__main__":
    main()
