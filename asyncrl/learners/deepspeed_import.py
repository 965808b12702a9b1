"""Checkpoints that DeepSpeed wrote itself, as other trainers keep them, to a Hugging Face folder.

Import alone: asyncrl writes its own format. DeepSpeed's files are pickles, which run whatever code is in
them, so that the caller has to say that they may.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from asyncrl.errors import CheckpointError
from asyncrl.learners.policy import load_policy, save_policy


def import_deepspeed(checkpoint: Path, target: Path, model_path: str, *, trust_remote_code: bool) -> None:
    """Write the float32 weights of a ZeRO ``checkpoint`` of the model ``model_path`` to ``target``.

    ``checkpoint`` is what was given to DeepSpeed's ``save_checkpoint``: a folder with a file ``latest``.
    Raises CheckpointError for one that is not, or is of another model, and for a ``target`` that exists.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if target.exists():
        raise CheckpointError(f"found {target}, which is there already; expected a folder to make")
    if not (checkpoint / "latest").is_file():
        raise CheckpointError(
            f"found no file 'latest' in {checkpoint}; expected the folder that DeepSpeed's save_checkpoint "
            "was given, with a folder for each step in it"
        )
    model = load_policy(
        model_path, dtype=torch.float32, trust_remote_code=trust_remote_code, checkpointing=False
    )
    try:
        found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    except Exception as error:  # what a damaged pickle raises is not to be foreseen
        raise CheckpointError(f"DeepSpeed cannot read {checkpoint}: {error!r}") from error
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        shape, saved = tuple(parameter.shape), found.get(name)
        if saved is None or tuple(saved.shape) != shape:
            raise CheckpointError(
                f"{checkpoint} has {'no tensor' if saved is None else tuple(saved.shape)} for {name}; "
                f"expected {shape}, as {model_path} has it"
            )
        state[name] = saved.float().contiguous()
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    save_policy(part, model, state, model_path, trust_remote_code=trust_remote_code)
    part.rename(target)
