"""What vLLM calls in each of its processes, by the entry point ``vllm.general_plugins``.

vLLM's workers are processes of their own, in which nothing of ours has been imported: the entry point
is how they get to know the way that weights arrive.
"""

from __future__ import annotations

BACKEND = "asyncrl"
"""Name of the weight transfer backend, for vLLM's ``WeightTransferConfig``."""
_MODULE = "asyncrl.generators.vllm_weights"
WORKER_EXTENSION = f"{_MODULE}.StagingWorker"
"""Qualified name of what is mixed into vLLM's worker class."""
_registered = False


def register() -> None:
    """Make the backend known to this process. Safe to call again: vLLM may."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, "StagedWeightTransfer")
    _registered = True
