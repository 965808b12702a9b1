"""Reference inputs and outputs in float64, for the formulas of ``asyncrl.algorithms``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

PATH = Path(os.environ.get("ASYNCRL_VECTORS", Path(__file__).parent.parent / "data" / "vectors.json"))
CASES: list[dict[str, Any]] = json.loads(PATH.read_text())["cases"]


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
