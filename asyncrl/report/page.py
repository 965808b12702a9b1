"""The page around the charts: one HTML file with everything in it.

Invariants:
- Nothing is loaded from anywhere: the page's own policy forbids it.
- Text of runs reaches the page escaped, wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from asyncrl.recorded import RecordedRun, differing_settings
from asyncrl.report.charts import Chart, color_of, make_charts
from asyncrl.report.summary import label_runs, summary_rows
from asyncrl.report.timeline import timeline_chart

_OWN_NAME = ("run.name", "run.dir")
"""Settings that differ between any two runs."""
_SHOWN_CHARACTERS = 200


def render(runs: Sequence[RecordedRun]) -> str:
    """The page of the runs, in the order given."""
    labelled = dict(zip(label_runs(runs), runs, strict=True))
    charts = make_charts(labelled)
    charts += [chart for label, run in labelled.items() if (chart := timeline_chart(label, run)) is not None]
    title = " against ".join(labelled) if len(runs) < 4 else f"{len(runs)} runs"
    figures = {f"chart-{number}": chart.figure.to_plotly_json() for number, chart in enumerate(charts)}
    cards = [_summary(labelled), *(_chart_card(f"chart-{n}", chart) for n, chart in enumerate(charts))]
    if len(runs) > 1:
        cards.append(_differences(labelled))
    template = Template((files("asyncrl.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(_subtitle(runs)),
        cards="\n".join(cards),
        library=get_plotlyjs(),
        figures=_embedded(figures),
    )


def _subtitle(runs: Sequence[RecordedRun]) -> str:
    return "asyncrl report of " + ", ".join(str(run.folder) for run in runs)


def _card(title: str, note: str, content: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}>\n<h2>{escape(title)}</h2>\n<p>{escape(note)}</p>\n{content}\n</section>"


def _chart_card(identifier: str, chart: Chart) -> str:
    return _card(chart.title, chart.note, f'<div id="{identifier}"></div>', wide=chart.wide)


def _summary(runs: Mapping[str, RecordedRun]) -> str:
    by_run = {label: summary_rows(run) for label, run in runs.items()}
    labels = dict.fromkeys(label for rows in by_run.values() for label in rows)
    rows = {label: [found.get(label, "–") for found in by_run.values()] for label in labels}
    return _card("Summary", "Means over all steps of each run.", _table(_colors(runs), rows), wide=True)


def _differences(runs: Mapping[str, RecordedRun]) -> str:
    without = [label for label, run in runs.items() if not run.config]
    found = differing_settings([run.config for run in runs.values() if run.config])
    rows = {
        key: [_setting(value) for value in values] for key, values in found.items() if key not in _OWN_NAME
    }
    note = "Keys that the configs do not agree on." if rows else "The configs agree on every key."
    if without:
        note += f" There is no config.yaml of {', '.join(without)}."
    colors = {label: color for label, color in _colors(runs).items() if label not in without}
    return _card("Settings that differ", note, _table(colors, rows) if rows else "", wide=True)


def _colors(runs: Mapping[str, RecordedRun]) -> dict[str, str]:
    return {label: color_of(number) for number, label in enumerate(runs)}


def _setting(value: Any) -> str:
    text = "–" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _table(colors: Mapping[str, str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table with a column a run, marked with the colour that it has in the charts."""
    head = "".join(
        f'<th scope=col><span class="dot" style="background:{colors[column]}"></span>{escape(column)}</th>'
        for column in colors
    )
    body = "\n".join(
        f"<tr><th scope=row>{escape(label)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells in rows.items()
    )
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _embedded(figures: Mapping[str, Any]) -> str:
    """JSON that no HTML parser takes for anything else; null for what is no number."""
    from plotly.io.json import to_json_plotly

    text: str = to_json_plotly(figures)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
