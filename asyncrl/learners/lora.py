"""Low-rank adapters on the policy (LoRA), by peft: what trains is A and B, what counts is W + s B A.

Invariants:
- The base weights take no gradient and keep their bits.
- A merged weight is computed in float32 and rounded once, to the dtype that was asked for. Nothing that
  trains changes by it.
- Under Hugging Face names the policy has the tensors of its base, and no others.
- A and B have names of their own for pushes of adapters alone.
- peft is imported here alone, and only where there is an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config import LoraSection
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learners.policy import tensor_spec
from asyncrl.weight_sync.adapters import low_rank_delta
from asyncrl.weight_sync.base import AdapterSpec, Manifest

_ALL = "all-linear"
_NAME = "default"
"""peft's own name for an adapter that is alone."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one weight matrix W: scaling * B @ A."""

    a: nn.Parameter  # (rank, in)
    b: nn.Parameter  # (out, rank)
    scaling: float
    transposed: bool
    """Whether W is (in, out), as in a Conv1D, and not (out, in)."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.a, self.b]

    def delta(self) -> Tensor:
        """What the adapter adds to W, in W's shape, float32."""
        return low_rank_delta(self.a, self.b, self.scaling, transposed=self.transposed)

    @torch.no_grad()
    def merge(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor: W and what the adapter adds to it."""
        return (weight.float() + self.delta()).to(dtype)


class LoraAdapter:
    """Puts adapters into ``model``, freezes the rest, and knows which belongs to what.

    A starts from ``section.seed``, the same on every rank, and B at 0: the policy starts as its base.
    ``model`` keeps its class and is trained as before. Raises ConfigError where peft is missing, or for
    modules that are not there or cannot be merged.
    """

    def __init__(self, model: Any, section: LoraSection) -> None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ConfigError(
                f"learner.lora: found it set, but peft cannot be imported ({error}); pip install "
                "'asyncrl[lora]', or set learner.lora to null"
            ) from error
        targets = section.target_modules
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=0.0,
            # Alone it is a keyword, in a list a name.
            target_modules=targets[0] if targets == (_ALL,) else list(targets),
        )
        linear = _linear_names(model)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(section.seed)
                # In the dtype of the weights: float32 copies are the optimizer's.
                self._peft: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise _unusable(targets, linear, str(error)) from error
        self.pairs: Mapping[str, LowRank] = _pairs(model, targets, linear)
        """By the Hugging Face name of the weight."""
        self.specs = tuple(
            AdapterSpec(name, f"{name}.lora_A", f"{name}.lora_B", pair.scaling, pair.transposed)
            for name, pair in self.pairs.items()
        )
        """The pairs, and the names under which they travel where adapters travel alone."""
        # Now, while every tensor is whole on every rank.
        self.manifest: Manifest = tuple(tensor_spec(name, p) for name, p in self.travelling().items())

    def travelling(self) -> dict[str, nn.Parameter]:
        """A and B of each pair, by the names of ``specs``."""
        found: dict[str, nn.Parameter] = {}
        for spec in self.specs:
            pair = self.pairs[spec.weight]
            found |= {spec.a: pair.a, spec.b: pair.b}
        return found

    def base(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The frozen parameters by Hugging Face name, in the base model's order."""
        named = model.named_parameters()
        return {name.replace(".base_layer.", "."): p for name, p in named if not p.requires_grad}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters, by peft's names."""
        return {name: p for name, p in self._peft.named_parameters() if p.requires_grad}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block, the model computes what its base does. Without gradients alone."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [layer for layer in self._peft.modules() if isinstance(layer, BaseTunerLayer)]
        # Not by peft's own context, which changes requires_grad under the optimizer's hooks.
        for layer in layers:
            layer._disable_adapters = True
        try:
            if not all(layer.disable_adapters for layer in layers):
                raise InvariantError(
                    f"peft {version('peft')} did not turn its adapters off by the switch that 0.21 has"
                )
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """The adapter alone, as peft loads it. ``state``: whole tensors under the names of ``trained``."""
        self._peft.save_pretrained(folder, state_dict=dict(state), save_embedding_layers=False)


def _pairs(model: Any, targets: tuple[str, ...], linear: list[str]) -> dict[str, LowRank]:
    from peft.tuners.lora import Linear, LoraLayer
    from transformers.pytorch_utils import Conv1D

    pairs, head = {}, model.get_output_embeddings()
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base: Any = layer.get_base_layer()
        if layer is head or not isinstance(layer, Linear) or not isinstance(base, nn.Linear | Conv1D):
            what = "the output embedding" if layer is head else f"a {type(base).__name__}"
            raise _unusable(targets, linear, f"{path} is {what}, whose adapter cannot be merged here")
        pairs[f"{path}.weight"] = LowRank(
            a=layer.lora_A[_NAME].weight,
            b=layer.lora_B[_NAME].weight,
            scaling=layer.scaling[_NAME],
            transposed=layer.fan_in_fan_out,
        )
    return pairs


def _linear_names(model: Any) -> list[str]:
    """Last names of the linear layers, but for the output embedding."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    modules = model.named_modules()
    found = {path for path, m in modules if isinstance(m, nn.Linear | Conv1D) and m is not head}
    return sorted({path.rpartition(".")[2] for path in found})


def _unusable(targets: tuple[str, ...], linear: list[str], why: str) -> ConfigError:
    return ConfigError(
        f"learner.lora.target_modules: found {', '.join(targets)}: {why}; expected {_ALL}, or some of the "
        f"model's linear layers: {', '.join(linear)}"
    )
