"""Settings of every test process: quiet tokenizers, one torch thread, as the engines use, and Ctrl-C."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# An example takes longer than the default deadline of 0.2 s when other processes have the processor.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")

# A shell script's background jobs ignore it, and so would every process that a test sends it to.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
