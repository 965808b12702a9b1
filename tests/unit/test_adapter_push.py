"""A push of adapters alone: the engine computes with the start model and what arrived last."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.generators.torch_generator import TorchGenerator
from asyncrl.learners.policy import tensor_spec
from asyncrl.weight_sync.adapters import low_rank_delta
from asyncrl.weight_sync.base import AdapterSpec, PushGroupSpec
from asyncrl.weight_sync.broadcast import PushGroup, create_store

from .tiny_models import DEADLINE_S, full_logprobs, tiny_gpt2, tiny_llama

RANK = 3
TOKENS = (5, 3, 1, 4, 1, 5, 9, 2, 6)


def adapters_of(model: torch.nn.Module, targets: tuple[str, ...], *, transposed: bool) -> list[AdapterSpec]:
    return [
        AdapterSpec(name, f"{name}.a", f"{name}.b", 1.5, transposed)
        for name, _ in model.named_parameters()
        if name.endswith(targets)
    ]


def draw(model: torch.nn.Module, adapters: list[AdapterSpec], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    drawn = {}
    for adapter in adapters:
        out, into = reversed(shapes[adapter.weight]) if adapter.transposed else shapes[adapter.weight]
        drawn[adapter.a] = 0.2 * torch.randn(RANK, into, generator=generator)
        drawn[adapter.b] = 0.2 * torch.randn(out, RANK, generator=generator)
    return drawn


@pytest.mark.parametrize(
    ("make", "targets", "transposed"),
    [
        (tiny_llama, ("q_proj.weight", "down_proj.weight"), False),
        (tiny_gpt2, ("c_attn.weight", "c_fc.weight"), True),
    ],
)
async def test_each_version_is_the_start_model_with_the_adapters_of_that_version(make, targets, transposed):
    start = make(0)
    adapters = adapters_of(start, targets, transposed=transposed)
    versions = [draw(start, adapters, seed) for seed in range(3)]
    manifest = tuple(tensor_spec(name, tensor) for name, tensor in versions[0].items())
    store = create_store("127.0.0.1", DEADLINE_S)
    spec = PushGroupSpec(
        "127.0.0.1", store.port, "p", 0, 2, "gloo", 1 << 10, DEADLINE_S, manifest, tuple(adapters)
    )
    generator = TorchGenerator(TorchEngine(make(0), slots=2, max_sequence=64, device="cpu"))
    await generator.start()
    try:
        for version, tensors in enumerate(versions, start=1):
            if version != 2:
                # Also anew, after a swap: the start model is that of the first time.
                own = replace(spec, prefix=f"p{version}")
                sender, _ = await asyncio.gather(
                    asyncio.to_thread(PushGroup, own, store), generator.join(replace(own, rank=1))
                )
            (sent, nbytes), _ = await asyncio.gather(
                asyncio.to_thread(
                    sender.send, version, lambda b, t=tensors: torch.cat([t[s.name].reshape(-1) for s in b])
                ),
                generator.receive(version),
            )
            echo = await generator.swap(version, in_flight=True, kv="keep")
            assert (echo.version, echo.checksum) == (version, sent)
            assert nbytes == sum(tensor.nbytes for tensor in tensors.values())
            expected = make(0)
            for adapter in adapters:
                weight = expected.get_parameter(adapter.weight)
                a, b = tensors[adapter.a].double(), tensors[adapter.b].double()
                product = torch.einsum("or,ri->io" if transposed else "or,ri->oi", b, a)
                weight.data += (adapter.scaling * product).float()
            found = torch.from_numpy(await generator.score(TOKENS))
            wanted = full_logprobs(expected, TOKENS[:1], TOKENS[1:])
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
            assert (wanted - full_logprobs(start, TOKENS[:1], TOKENS[1:])).abs().max() > 0.01
        sender.close()
    finally:
        await generator.close()


def test_in_bfloat16_the_product_is_not_rounded():
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 64), (64, 2)))
    a, b = a.bfloat16(), b.bfloat16()
    found = low_rank_delta(a, b, 2.0, transposed=False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), 2.0 * (b.double() @ a.double()), rtol=1e-6, atol=1e-6)
