"""``asyncrl report``: runs side by side in one HTML file."""

from __future__ import annotations

import logging
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from asyncrl.errors import UsageError
from asyncrl.recorded import read_run

log = logging.getLogger(__name__)


def write_report(folders: Sequence[Path], file: Path) -> None:
    """Write the page of the runs in ``folders``. UsageError where one is none, or the page cannot be had."""
    runs = [read_run(folder) for folder in folders]
    require_plotly()
    from asyncrl.report.page import render

    page = render(runs)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html: {file} cannot be written: {error.strerror}") from error
    log.info("wrote %s (%.1f MB)", file, len(page) / 1e6)


def require_plotly() -> None:
    """UsageError where the package that draws is missing."""
    if find_spec("plotly") is None:
        raise UsageError("found no package plotly; expected it for reports: pip install 'asyncrl[report]'")


def open_in_browser(file: Path) -> None:
    """Show it, where there is a browser; else say where it is."""
    if not webbrowser.open(file.resolve().as_uri()):
        log.warning("found no browser to open; the report is at %s", file.resolve())
