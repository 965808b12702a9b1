"""Where the objects of ``--json`` go."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write_json(file: Path, document: object) -> None:
    """To ``file``, or to standard output for ``-``."""
    text = json.dumps(document, indent=2) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")
