"""Settings of every test process: quiet tokenizers, and one torch thread, as the engines use."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# An example takes longer than the default deadline of 0.2 s when other processes have the processor.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")
