"""The policy as the learner sees it: any Hugging Face causal LM, with logits where they are wanted.

Invariants:
- Dropout is off: log-probs are a function of weights and tokens.
- Logits are computed at the chosen positions only, by the model's own forward, so that whatever a
  model does to its logits (scaling, capping) is done.
- Parameters keep their Hugging Face names; a tied one appears once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.attention.shared_rows import SharedRows
from asyncrl.errors import ConfigError
from asyncrl.weight_sync.base import Manifest, TensorSpec


def load_policy(
    path: str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool,
    checkpointing: bool,
    attention: str | None = None,
) -> nn.Module:
    """The model of a Hugging Face folder or name, in training mode, without dropout.

    ``attention``: which implementation, None for transformers' own choice. Raises ConfigError for one that
    the model or this machine does not have.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attention
        )
    except (ImportError, ValueError) as error:
        if attention is None:
            raise
        raise ConfigError(
            f"learner.attention: found {attention!r}, with which {path} cannot be loaded: {error}; expected "
            "auto, or one that is installed and that this model has"
        ) from error
    return prepare_policy(model, checkpointing=checkpointing)


def prepare_policy(model: Any, *, checkpointing: bool = False) -> nn.Module:
    """Turn a freshly made causal LM into one that ``selected_logits`` works with."""
    module: nn.Module = model
    module.train()  # gradient checkpointing is off in evaluation mode
    switch_dropout_off(module)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    select_at_head(model)
    return module


def select_at_head(model: Any) -> None:
    """Have the output embedding compute ``selected_logits`` alone: once, and one that replaced it."""
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"model {type(model).__name__} has no output embedding: it is not a causal LM")
    if _select not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_select)


def save_policy(
    folder: Path, model: Any, state: dict[str, Tensor], path: str, *, trust_remote_code: bool
) -> None:
    """Write ``state``, the config of ``model`` and the tokenizer of ``path`` as a Hugging Face folder."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder, state_dict=state)
    dtype = next(iter(state.values())).dtype
    if model.dtype != dtype:
        # It says what the parameters are, which may be the masters of what was saved.
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).save_pretrained(folder)


def switch_dropout_off(module: nn.Module) -> None:
    """No dropout anywhere in ``module``, in training mode too."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]


def selected_logits(
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    position_ids: Tensor | None = None,
    shared: SharedRows | None = None,
) -> Tensor:
    """Logits at ``positions``, indices into the flattened inputs: (R, L), (N,) -> (N, V).

    ``model`` is a prepared policy or an engine around one. ``position_ids`` (R, L), where given, start at 0
    with each of the sequences that share a row: models build a mask from them that keeps those apart.
    ``shared``: that these are prompts, each with all of its answers.
    """
    places = {} if position_ids is None else {"position_ids": position_ids}
    module = getattr(model, "module", model)
    if shared is not None:
        places |= shared.arguments(module)
    # By way of an attribute, because models do not pass unknown arguments on to their head.
    head = module.get_output_embeddings()
    head.selected_positions = positions
    try:
        logits: Tensor = model(input_ids=input_ids, use_cache=False, **places).logits  # (1, N, V)
    finally:
        del head.selected_positions
    return logits.squeeze(0)


def manifest_of(model: nn.Module) -> Manifest:
    """Name, shape and dtype of each parameter, in the model's order."""
    return tuple(tensor_spec(name, parameter) for name, parameter in model.named_parameters())


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """A whole tensor as it travels: in its own dtype."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _select(head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    positions = getattr(head, "selected_positions", None)
    if not isinstance(positions, Tensor):
        return None
    hidden = args[0].flatten(0, 1)  # (R * L, H)
    return (hidden.index_select(0, positions).unsqueeze(0), *args[1:])
