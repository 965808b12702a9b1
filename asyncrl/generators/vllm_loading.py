"""How staged tensors become the weights that vLLM computes with: in place, or in a twin beside it.

A layer's weights are not what was pushed: projections are stacked, shards cut out, and on CPU everything
is repacked for its kernels. vLLM's loaders do that; here it is decided where, and when generation waits.

- ``InPlace`` loads into the model itself, between two steps: generation stands still for all of it. The
  only way where the addresses of weights are captured, as in CUDA graphs.
- ``Twin`` loads into a second model while the first computes, and between two steps the two exchange their
  weights. Generation stands still for some references; the price is the memory of a second model.

Invariants:
- vLLM's layerwise reload does the loading either way: layers may keep their weights repacked, and take
  plain ones only between its two calls.
- A layer that shares its weights with another (a tied head) is repacked with it: vLLM's reload repacks only
  layers that tensors were loaded into.
- A parameter that no pushed tensor reached is an error.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.errors import WeightSyncError

_REPACKED = ("cpu_linear", "_cpu_unpacked_conv_weight")
"""Attributes beside the parameters in which vLLM keeps a layer's repacked weights on CPU."""


class WeightLoading(Protocol):
    """Two halves of a load: ``build`` while generation goes on, in a thread; ``commit`` between two steps."""

    def build(self, tensors: Mapping[str, Tensor]) -> None: ...

    def commit(self) -> None: ...


def choose_loading(model: nn.Module, vllm_config: Any, device: torch.device) -> WeightLoading:
    """A twin on CPU, for models all of whose weights are where ``Twin`` looks for them; else in place.

    ``generators.vllm.additional_config: {asyncrl_loading: in_place}`` saves the twin's memory.
    """
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    methods = [m.quant_method for m in model.modules() if getattr(m, "quant_method", None) is not None]
    asked = (vllm_config.additional_config or {}).get("asyncrl_loading", "auto")
    if asked not in ("auto", "in_place"):
        raise ValueError(f"additional_config.asyncrl_loading: found {asked!r}; expected auto or in_place")
    if asked == "auto" and device.type == "cpu" and all(type(method) in plain for method in methods):
        return Twin(model, vllm_config)
    return InPlace(model, vllm_config.model_config)


class InPlace:
    """Loads into the model that computes."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._tensors: Mapping[str, Tensor] | None = None

    def build(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def commit(self) -> None:
        tensors, self._tensors = self._tensors, None
        assert tensors is not None, "build() comes first"
        load(self._model, self._model_config, tensors)


class Twin:
    """Loads into a second model, which never computes, and exchanges its weights with the first's."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        config = _apart(vllm_config)
        self._model_config = config.model_config
        self._twin = DummyModelLoader(LoadConfig(load_format="dummy")).load_model(
            vllm_config=config, model_config=config.model_config
        )
        live = dict(model.named_modules(remove_duplicate=False))
        _release_shared(self._twin, set(live.values()))
        self._pairs = [
            (live[name], layer)
            for name, layer in self._twin.named_modules()
            if type(layer) is type(live[name])
        ]

    def build(self, tensors: Mapping[str, Tensor]) -> None:
        load(self._twin, self._model_config, tensors)

    def commit(self) -> None:
        for live, twin in self._pairs:
            for name, parameter in live._parameters.items():
                live._parameters[name], twin._parameters[name] = twin._parameters[name], parameter
            for name in _REPACKED:
                if name in vars(live):
                    mine, its = getattr(live, name), getattr(twin, name)
                    setattr(live, name, its)
                    setattr(twin, name, mine)


def load(model: Any, model_config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load named tensors by vLLM's loaders. Raises WeightSyncError when parameters are left over."""
    names = {name for name, _ in model.named_parameters()}
    shared = _shared_layers(model)
    with torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors.items())
        finalize_layerwise_reload(model, model_config)
        for layer in shared:
            layer.quant_method.process_weights_after_loading(layer)
    missing = sorted(names - loaded) if loaded is not None else []
    if missing:
        raise WeightSyncError(
            f"{len(missing)} of {len(names)} parameters of vLLM's model were not in the push: "
            f"{', '.join(missing[:5])}"
        )


def _shared_layers(model: nn.Module) -> list[Any]:
    """Layers whose weight is another layer's, which stands before them."""
    seen: set[int] = set()
    shared = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        if weight.data_ptr() in seen and getattr(layer, "quant_method", None) is not None:
            shared.append(layer)
        seen.add(weight.data_ptr())
    return shared


def _apart(vllm_config: Any) -> Any:
    """The config of a second model of the same shape: it registers nothing, and compiles nothing."""
    apart = copy.copy(vllm_config)
    compilation = apart.compilation_config = copy.copy(vllm_config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops, compilation.disabled_custom_ops = Counter(), Counter()
    return apart


def _release_shared(twin: nn.Module, live: set[nn.Module]) -> None:
    """Take out of the twin what vLLM caches and gave to both models, as rotary embeddings."""
    for layer in list(twin.modules()):
        for name, child in layer._modules.items():
            if child in live:
                layer._modules[name] = nn.Module()
