"""The report in a real browser: drawn without a word in the console, and without a request to anyone."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.bench.modes import MODES
from asyncrl.cli import app
from asyncrl.config_load import dump_config
from asyncrl.simulate.run import simulate
from asyncrl.simulate.workload import parse_simulation

from .browser import chromium, find_chromium

pytest.importorskip("plotly", reason="needs plotly, which asyncrl[report] brings")

WORKLOAD = {
    "workload": {
        "lengths": {"log_normal": {"median": 20, "sigma": 0.8}},
        "generation": {"token_s": 0.05},
        "learner": {"step_s": 0.5},
        "push": {"send_s": 0.1},
    },
    "run": {"steps": 12},
    "rollout": {"group_size": 2, "groups_per_step": 4},
    "schedule": {"pipeline_depth": 1, "max_staleness": 2},
    "generators": {"slots": 8},
}
CHARTS = 10
"""Three of rewards, throughput, lag, both sides' time, length bias, two timelines."""


def test_a_browser_shows_the_report(tmp_path: Path) -> None:
    command = find_chromium()
    if command is None:
        pytest.skip("found no chromium: apt-get install chromium")
    for mode in ("sync", "async"):
        config = parse_simulation(WORKLOAD, MODES[mode])
        simulate(config, out=tmp_path / mode)
        (tmp_path / mode / "config.yaml").write_text(dump_config(config))
    file = tmp_path / "report.html"
    folders = [str(tmp_path / mode) for mode in ("sync", "async")]
    result = CliRunner().invoke(app, ["report", *folders, "--html", str(file)])
    assert result.exit_code == 0, result.output

    backgrounds = []
    with chromium(command, tmp_path / "profile") as page:
        for width, dark in ((1280, False), (390, True)):
            page.show(
                file, width=width, height=900, dark=dark, until="document.documentElement?.dataset.drawn"
            )
            assert page.evaluate("document.title") == "sync against async"
            assert int(page.evaluate("document.documentElement.dataset.drawn")) == CHARTS
            assert (
                page.evaluate("document.querySelectorAll('.main-svg .trace, .trace.bars').length") >= CHARTS
            )
            # Nothing is wider than the window, which a phone would have to scroll.
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.screenshot(tmp_path / f"{width}.png")
        assert page.complaints == []
        assert {url for url in page.requests if not url.startswith(("data:", "blob:"))} == {
            file.resolve().as_uri()
        }
    assert len(set(backgrounds)) == 2, "light and dark differ"
    assert (tmp_path / "390.png").stat().st_size > 20_000
