"""benchmarks/kills.py: where it kills, and what it would find wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config_load import dump_config

from .controller_harness import config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from kills import PHASES, Draws, Moment, Records, Runs  # noqa: E402

LOOP = """
import sys, time
from pathlib import Path
from killed_run import Killer, Moment
killer = Killer(Moment.parse(sys.argv[2]), Path(sys.argv[1]))
for _ in range(4):
    with killer.under_way("rollout"):
        time.sleep(0.02)
    with killer.under_way("update"):
        time.sleep(0.3)
killer.say_durations()
"""


def loop(report: Path, moment: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run([sys.executable, "-c", LOOP, str(report), moment], cwd=BENCHMARKS, timeout=60)
    return done.returncode, [json.loads(line) for line in report.read_text().splitlines()]


def test_a_process_kills_itself_in_the_phase_that_was_asked_for(tmp_path: Path) -> None:
    code, (line,) = loop(tmp_path / "report", "update:2:0.1")
    assert code == -signal.SIGKILL
    assert (line["event"], line["phase"]) == ("killed", "update")
    assert line["occurrence"] >= 2


def test_a_phase_that_is_over_too_soon_is_not_killed_later(tmp_path: Path) -> None:
    code, (line,) = loop(tmp_path / "report", "rollout:1:60")
    assert code == 0
    assert line["event"] == "ended"
    assert line["seconds"]["update"] >= 0.3


def test_the_moments_take_turns_and_depend_on_seed_and_number_alone() -> None:
    seconds = {phase: 2.0 for phase in PHASES}
    draws = Draws(0, 3, groups_per_step=4)
    moments = [draws.draw(number, seconds) for number in range(100)]
    assert Counter(moment.phase for moment in moments) == {phase: 20 for phase in PHASES}
    assert all(0 <= moment.after_s < 2.0 for moment in moments)
    occurrences = {phase: {m.occurrence for m in moments if m.phase == phase} for phase in PHASES}
    assert occurrences["update"] == occurrences["checkpoint"] == {1, 2, 3}
    assert occurrences["push"] == {2, 3, 4}  # the first is of the start-up, which is another phase
    assert 4 < max(occurrences["rollout"]) <= 12
    assert occurrences["start-up"] == {1}
    assert [draws.draw(number, seconds) for number in range(100)] == moments
    assert [Draws(1, 3, 4).draw(number, seconds) for number in range(100)] != moments
    assert Moment.parse(str(Moment("start-up", 1, 0.25))) == Moment("start-up", 1, 0.25)


def test_records_are_gone_on_from_with_equal_arguments_alone(tmp_path: Path) -> None:
    records = Records({"seed": 0})
    records.kills.append({"number": 0})
    records.write(tmp_path / "kills.json")
    assert Records.read(tmp_path / "kills.json", {"seed": 0}) == records
    with pytest.raises(SystemExit, match="another --out"):
        Records.read(tmp_path / "kills.json", {"seed": 1})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("", ""),
        ("an ordinal twice", "an ordinal was lost, or retired twice"),
        ("an ordinal lost", "an ordinal was lost, or retired twice"),
        ("the last ordinal lost", "5 ends of 6"),
        ("a step twice", "steps"),
        ("a lag", "lag 3, max_staleness 2"),
    ],
)
def test_what_is_wrong_with_a_run_is_found(tmp_path: Path, damage: str, words: str) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config("run.steps=3")))
    ordinals, steps = [*range(6)], [0, 1, 2, 3]
    if damage == "an ordinal twice":
        ordinals[3] = 2
    if damage.endswith("ordinal lost"):
        ordinals.remove(5 if "last" in damage else 3)
    if damage == "a step twice":
        steps.insert(2, 2)
    lines: list[dict[str, Any]] = [
        {"step": step, "staleness/max": 1, "policy_version": step} for step in steps
    ]
    lines[-1] |= {"ledger/submitted": 6, "model/checksum": "c"}
    lines[1]["staleness/max"] = 3 if damage == "a lag" else 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ledger.jsonl").write_text("".join(json.dumps({"ordinal": o}) + "\n" for o in ordinals))
    runs = Runs(tmp_path / "none.yaml", tmp_path, (), 1.0)
    if words:
        with pytest.raises(AssertionError, match=words):
            runs.verify("r")
    else:
        assert runs.verify("r")["ordinals"] == 6
