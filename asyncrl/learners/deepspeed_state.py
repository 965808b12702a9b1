"""Where DeepSpeed keeps a rank's masters and moments, by ZeRO stage.

In flat tensors: one a parameter group and rank (stages 1 and 2, and bfloat16), or one a group of whole
parameters' parts (stage 3); or nowhere, so that the parameters are their own masters (stage 0 in float32).

Nothing here imports deepspeed: it reads attributes that its optimizers put on parameters.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from asyncrl.learners.optimizer_state import Fragment
from asyncrl.learners.tensor import TensorParallel


def find_fragments(
    module: nn.Module, optimizer: Any, rank: int, tensors: TensorParallel | None = None
) -> list[Fragment]:
    """This rank's part of each trained parameter that it has one of.

    ``optimizer`` is DeepSpeed's, or the plain one where it wraps none around it. ``tensors`` says which
    parameters ranks divide, where they do: below ZeRO 3, and with an optimizer of DeepSpeed's.
    """
    found = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            fragment = _of_shard(name, parameter, optimizer, rank)
        elif hasattr(parameter, "_hp_mapping"):
            fragment = _of_partition(name, parameter, optimizer, tensors)
        else:
            fragment = Fragment(name, tuple(parameter.shape), 0, parameter.numel(), parameter, 0)
        if fragment is not None:
            found.append(fragment)
    return found


def _of_partition(name: str, parameter: Any, zero: Any, tensors: TensorParallel | None) -> Fragment | None:
    """Below ZeRO 3: a rank's flat masters hold a run of all parameters one after the other."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None  # all of it is with other ranks
    owner = zero.optimizer.param_groups[mapping.param_group_index]["params"][0]
    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
    slab = None if tensors is None else tensors.slabs.get(name)
    shape = tuple(parameter.shape) if tensors is None or slab is None else tensors.shapes[name]
    return Fragment(name, shape, lp.start, hp.numel, owner, hp.start, slab)


def _of_shard(name: str, parameter: Any, zero: Any, rank: int) -> Fragment | None:
    """ZeRO 3: parts of one size on all ranks, with padding at the end of the last."""
    group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    start = rank * length
    numel = min(length, parameter.ds_numel - start)
    if numel <= 0:
        return None  # padding alone
    owner = zero.fp32_partitioned_groups_flat[group]
    return Fragment(name, tuple(parameter.ds_shape), start, numel, owner, offset)
