"""The report's page of runs of every kind: whole, torn, going on, of one step, of another version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.errors import UsageError
from asyncrl.recorded import differing_settings, read_run
from asyncrl.report.summary import label_runs, lag_counts, samples_at, seconds_at, share, summary_rows
from asyncrl.timeline import TraceEvent
from asyncrl.trace_file import TraceFile
from asyncrl.trace_reading import read_trace

CONFIG: dict[str, Any] = {
    "run": {"name": "one", "dir": "runs", "steps": 4},
    "schedule": {"pipeline_depth": 1, "max_staleness": 2},
    "data": {"train": {"path": "a.jsonl"}},
}


def line(step: int, **figures: float) -> dict[str, Any]:
    """A step of 10 s of which the learner waited 2 s; 8 samples."""
    return {
        "step": step,
        "policy_version": step,
        "time": 5.0 + 10.0 * step,
        "timing_s/step": 10.0,
        "timing_s/train": 7.0,
        "timing_s/wait_for_batch": 2.0,
        "timing_s/wait_for_policy": 5.0,
        "timing_s/weight_sync_stall": 1.0,
        "perf/samples_per_s": 0.8,
        "perf/tokens_per_s": 100.0,
        "reward/mean": step / 10,
        **{name.replace("__", "/"): value for name, value in figures.items()},
    }


FIRST = {"step": 0, "policy_version": 0, "time": 5.0, "eval/reward_mean": 0.25}


def make_run(
    folder: Path,
    lines: list[dict[str, Any]],
    *,
    torn: str = "",
    lags: tuple[int, ...] = (),
    config: dict[str, Any] | None = CONFIG,
) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(record) + "\n" for record in lines)
    (folder / "metrics.jsonl").write_text(text + torn)
    ledger = [{"ordinal": n, "state": "trained", "lag": lag} for n, lag in enumerate(lags)]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ledger))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_summary_is_over_all_steps(tmp_path: Path) -> None:
    lines = [FIRST, *(line(step) for step in range(1, 5))]
    lines[-1]["timing_s/step"] = 30.0
    lines[-1]["timing_s/wait_for_batch"] = 24.0
    lines[-1]["eval/reward_mean"] = 0.5
    run = read_run(make_run(tmp_path / "one", lines, lags=(0, 0, 0, 2)))
    assert share(run.steps, "wait_for_batch") == pytest.approx((3 * 2 + 24) / 60)
    assert share(run.steps, "train", "weight_sync_stall") == pytest.approx(4 * 8 / 60)
    assert share(run.steps, "eval") is None
    assert samples_at(run) == pytest.approx({0: 0, 1: 8, 2: 16, 3: 24, 4: 48})
    assert seconds_at(run)[2] == 20.0
    assert lag_counts(run) == {0: 3, 2: 1}
    rows = summary_rows(run)
    assert rows["steps"] == "4 of 4"
    assert rows["lag, mean and largest"] == "0.50, 2"
    assert rows["held-out reward"] == "0.250 → 0.500"
    assert rows["wall time"] == "40.0 s"
    assert "lines that were cut off" not in rows


def test_what_is_not_whole_is_left_out_and_counted(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one", [FIRST, line(1)], torn='{"step": 2, "policy_ver'))
    assert [record["step"] for record in run.lines] == [0, 1]
    rows = summary_rows(run)
    assert rows["steps"] == "1 of 4, not at its end"
    assert rows["lines that were cut off"] == "1"


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found no .*metrics.jsonl; expected the folder of a run"):
        read_run(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2


def test_only_settings_that_differ_are_listed() -> None:
    other = {**CONFIG, "schedule": {"pipeline_depth": 0, "max_staleness": 2}, "log": {"trackers": []}}
    del other["data"]
    assert differing_settings([CONFIG, other]) == {
        "schedule.pipeline_depth": (1, 0),
        "data.train.path": ("a.jsonl", None),
        "log.trackers": (None, []),
    }
    assert differing_settings([CONFIG, CONFIG]) == {}
    assert differing_settings([]) == {}


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a" / "run", [FIRST]),
        make_run(tmp_path / "b" / "run", [FIRST]),
        make_run(tmp_path / "c", [FIRST]),
    ]
    assert label_runs([read_run(folder) for folder in folders]) == ["a/run", "b/run", "c"]
    assert label_runs([read_run(folders[2]), read_run(folders[2])]) == ["c", "c (2)"]


EVENTS = [
    TraceEvent("generator 0", "slot 10", "version 0", 0.0, 1.0, {"tokens": 3}),
    TraceEvent("controller", "train", "train", 1.0, 69.0),
    TraceEvent("generator 0", "slot 2", "version 1", 60.0, 70.0, {"tokens": 9}),
]


def trace(path: Path) -> Path:
    file = TraceFile(path, offset=0.0, limit_bytes=1 << 20)
    file.write(EVENTS)
    file.close()
    return path


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.json")
    found = read_trace(path)
    assert sorted(found.events, key=lambda event: event.end) == sorted(EVENTS, key=lambda event: event.end)
    assert found.tracks == (("controller", "train"), ("generator 0", "slot 2"), ("generator 0", "slot 10"))
    last = read_trace(path, last_s=60.0)
    assert [event.track for event in last.events] == ["train", "slot 2"]
    assert last.tracks == (("controller", "train"), ("generator 0", "slot 2"))
    assert read_trace(tmp_path / "none.json").events == ()


def test_a_trace_that_is_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole = trace(tmp_path / "trace.json").read_bytes()
    cut = tmp_path / "cut.json"
    counts = []
    for size in (*range(0, len(whole), 7), len(whole)):
        cut.write_bytes(whole[:size])
        counts.append(len(read_trace(cut).events))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)


def test_runs_of_every_kind_come_onto_one_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="needs plotly, which asyncrl[report] brings")
    whole = make_run(tmp_path / "whole", [FIRST, *(line(n) for n in range(1, 5))], lags=(0, 1, 1, 2))
    trace(whole / "trace.json")
    going_on = make_run(tmp_path / "going-on", [FIRST, line(1), line(2)], torn='{"st')
    one_step = make_run(
        tmp_path / "one-step", [line(1)], config={**CONFIG, "schedule": {"pipeline_depth": 0}}
    )
    started = make_run(tmp_path / "started", [])
    # Of another version: no config, fewer figures, others that are unknown, one that is no number.
    foreign = make_run(
        tmp_path / "<i>foreign",
        [
            {"step": 1, "reward/mean": 0.5, "timing_s/step": 3.0, "new/thing": 1},
            line(2, reward__mean=float("nan")),
        ],
        config=None,
    )
    folders = [whole, going_on, one_step, started, foreign]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", *map(str, folders), "--html", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "<i>foreign" not in text
    assert "&lt;i&gt;foreign" in text
    start = text.index('<script id="figures" type="application/json">')
    figures = json.loads(text[text.index(">", start) + 1 : text.index("</script>", start)])
    titles = [
        "Reward by step",
        "Held-out reward",
        "Throughput",
        "Lag",
        "Learner&#x27;s time",
        "Timeline of whole",
    ]
    assert all(f"<h2>{title}</h2>" in text for title in titles)
    assert text.count("<h2>Timeline") == 1
    names = {trace["name"] for trace in figures["chart-0"]["data"]}
    assert names == {"whole", "going-on", "one-step", "<i>foreign"}
    lag = next(f for f in figures.values() if f["data"][0].get("customdata") == [1, 2, 1])
    assert lag["data"][0]["y"] == [0.25, 0.5, 0.25]
    assert "schedule.pipeline_depth" in text
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in text
