"""Colocated vLLM on one GPU: buckets by CUDA IPC, and the peak of device memory over whole turns.

To be run by someone with a GPU (``pytest -m gpu tests/gpu``), vLLM for GPUs and its CUDA build of torch. It
has never been run where this was written, which has none: a failure may be the test's own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.generators.vllm_engine import VLLMEngine
from asyncrl.generators.vllm_settings import VLLMSettings
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import create_store, make_staging
from asyncrl.weight_sync.transport import join_group
from asyncrl.weight_sync.verify import state_checksum
from tests.e2e.runs import finish
from tests.e2e.vllm_models import Sender, random_llama, request, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(1800),
]
MIB, GIB = 1 << 20, 1 << 30
TIMEOUT_S = 120.0
BUCKET = 4 * MIB
MANIFEST = tuple(TensorSpec(f"layer{i}", (1000 + i, 1000), "bfloat16") for i in range(8))


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(version)
    return {
        s.name: torch.randn(s.shape, generator=generator, device="cuda").to(torch.bfloat16) for s in MANIFEST
    }


def spec_at(port: int) -> PushGroupSpec:
    return PushGroupSpec("127.0.0.1", port, "push", 0, 2, "ipc", BUCKET, TIMEOUT_S, MANIFEST, slots=(0,))


def take_over(port: int, versions: Sequence[int], told: Any) -> None:
    """The receiver, in a process of its own: the checksum of each version as it lies in its staging area."""
    group = join_group(spec_at(port).of_slot(0, 1))
    staging = make_staging(plan_buckets(MANIFEST, BUCKET), group.device)
    for version in versions:
        arrived = group.receive(version, staging)
        told.put((arrived, state_checksum(staging.tensors.items(), "sums")))
    group.close()


def test_buckets_arrive_by_cuda_ipc_and_their_memory_is_given_back() -> None:
    store = create_store("127.0.0.1", TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    versions = (1, 2, 3)
    process = context.Process(target=take_over, args=(store.port, versions, told))
    process.start()
    try:
        group = join_group(spec_at(store.port).of_slot(0, 0), store)
        for version in versions:
            sent = weights(version)

            def gather(bucket: Sequence[TensorSpec], sent: Any = sent) -> torch.Tensor:
                return torch.cat([sent[spec.name].reshape(-1) for spec in bucket])

            before = torch.cuda.memory_allocated()
            checksum, nbytes = group.send(version, gather)
            assert torch.cuda.memory_allocated() <= before, "the buckets' memory was kept"
            assert told.get(timeout=TIMEOUT_S) == (checksum, state_checksum(sent.items(), "sums"))
            assert nbytes == sum(spec.nbytes for spec in MANIFEST)
        group.close()
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.asyncio
async def test_an_engine_gives_all_of_its_memory_up_asleep_and_computes_with_what_it_wakes_with(
    tmp_path: Path,
) -> None:
    path = save(random_llama(0, torch.bfloat16), tmp_path)
    share = 0.3
    options = {"gpu_memory_utilization": share, "enforce_eager": True}
    settings = VLLMSettings(path, "bfloat16", 16, 512, shares_device=True, options=options)
    engine = VLLMEngine(settings)
    await engine.start()
    free, total = torch.cuda.mem_get_info()
    model = random_llama(1, torch.bfloat16).cuda()
    sender = Sender(engine, backend="ipc")
    try:
        await sender.hand_over(model)
        awake = torch.cuda.mem_get_info()[0]
        assert free - awake > 0.5 * share * total, "keys and values took no memory"
        running = asyncio.create_task(engine.generate(request("r", new=400)))
        while not engine.statistics().tokens:  # noqa: ASYNC110 vLLM has no event for it
            await asyncio.sleep(0.01)
        asleep = await engine.sleep()
        assert asleep.sequences == 1
        assert asleep.freed_bytes > 0.5 * share * total
        assert torch.cuda.mem_get_info()[0] > free - 512 * MIB
        await engine.make_room()
        roomy = torch.cuda.mem_get_info()[0]
        assert roomy > free - 1024 * MIB, "room for weights is more than weights"
        await sender.push(random_llama(2, torch.bfloat16).cuda())
        await engine.wake()
        answer = await asyncio.wait_for(running, TIMEOUT_S)
        assert len(answer.token_ids) == 400
        assert set(answer.versions.tolist()) == {1, 2}
    finally:
        sender.close()
        await engine.close()


@pytest.fixture
def peak() -> Iterator[list[int]]:
    """The most of the device's memory that was in use so far, looked at every 5 ms; its first entry."""
    found, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            free, total = torch.cuda.mem_get_info()
            found[0] = max(found[0], total - free)

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(look)
        yield found
        over.set()
        watching.result()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_peak_of_a_run_is_that_of_one_side_and_not_of_both(
    tmp_path: Path, peak: list[int], depth: int
) -> None:
    """The learner's state, 14 bytes of each of 400 million parameters, is more than what is allowed beside
    vLLM's share: two contexts of CUDA, and that of this process."""
    share, beside = 0.5, int(2.5 * GIB)
    total = torch.cuda.mem_get_info()[1]
    run = finish(
        tmp_path,
        "generators.backend=vllm",
        "placement.mode=colocated",
        "schedule.kv_after_swap=recompute",
        f"schedule.pipeline_depth={depth}",
        f"generators.vllm.gpu_memory_utilization={share}",
        "generators.vllm.enforce_eager=true",
        "generators.start_timeout_s=600",
        "model.create.hidden_size=1024",
        "model.create.intermediate_size=4096",
        "model.create.layers=24",
        "model.create.heads=16",
        "model.create.kv_heads=16",
        "model.dtype=bfloat16",
        "weight_sync.canary_every=1",
        "run.steps=4",
        name=f"depth{depth}",
    )
    lines = run.metrics[1:]
    assert lines[-1]["policy_version"] == 4
    freed = min(line["turns/kv_freed_mb"] for line in lines) * MIB
    assert freed > 0.8 * share * total, f"{freed / GIB:.1f} GiB of {total / GIB:.1f}"
    assert peak[0] < share * total + beside, f"{peak[0] / GIB:.1f} GiB of {total / GIB:.1f} at the peak"
