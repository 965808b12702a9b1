"""The embedded engine against the truth: full forward passes of the same model."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError, GeneratorError, RolloutError
from asyncrl.generators.draws import uniform_draws
from asyncrl.generators.sampling import RowSampling, sample_tokens
from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.types import Completion, GenerationRequest

from .tiny_models import (
    VOCAB,
    ForwardPasses,
    Letters,
    full_logits,
    full_logprobs,
    request,
    running,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
)


def stage(engine: TorchEngine, model: torch.nn.Module) -> None:
    """What a receiver does: fill the staging tensors by name, outside of inference mode."""
    source = dict(model.named_parameters())
    staged = engine.stage()
    assert set(staged) == set(source)
    for name, tensor in staged.items():
        tensor.copy_(source[name].data)


def expected_tokens(model: Any, asked: GenerationRequest, answer: list[int]) -> list[int]:
    """The tokens that the request's own draws choose from the full pass's logits."""
    logits = full_logits(model, asked.prompt_ids, answer)
    rows = RowSampling.of([asked.sampling] * len(answer), torch.device("cpu"))
    draws = torch.from_numpy(uniform_draws(asked.key, len(answer)))
    return sample_tokens(logits, draws, rows)[0].tolist()


def assert_true(model: Any, asked: GenerationRequest, got: Completion, atol: float = 1e-5) -> None:
    answer = got.token_ids.tolist()
    truth = full_logprobs(model, asked.prompt_ids, answer, asked.sampling.temperature or 1.0)
    np.testing.assert_allclose(got.logprobs, truth.numpy(), atol=atol, rtol=0)


def mixed_requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    return [
        request(
            f"r{i}",
            rng.integers(0, VOCAB, rng.integers(1, 25)).tolist(),
            new=int(rng.integers(1, 30)),
            ordinal=i,
            **sampling,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gpt2])
async def test_samples_and_logprobs_are_those_of_full_passes(make, deterministic):
    model = make()
    truth = copy.deepcopy(model)
    asked = [
        *mixed_requests(8, temperature=0.8),
        request("greedy", [5, 6], new=20, temperature=0.0),
        request("plain", [7] * 20, new=20),
    ]
    async with running(model, deterministic=deterministic) as engine:  # 4 slots for 10 requests
        answers = await asyncio.gather(*(engine.generate(each) for each in asked))
        statistics = engine.statistics()
    for each, got in zip(asked, answers, strict=True):
        assert got.finish_reason == "length"
        assert len(got.token_ids) == len(got.logprobs) == len(got.versions) == each.sampling.max_new_tokens
        assert got.token_ids.tolist() == expected_tokens(truth, each, got.token_ids.tolist())
        assert_true(truth, each, got)
    assert statistics.tokens == sum(each.sampling.max_new_tokens for each in asked)
    assert (statistics.running, statistics.waiting, statistics.outstanding_tokens) == (0, 0, 0)
    assert 0 < statistics.slot_s <= 4 * statistics.busy_s


async def test_full_slots_are_counted_apart_and_answers_say_when_they_held_one():
    began = time.monotonic()
    async with running(tiny_llama(), slots=2) as engine:
        await engine.pause()  # so that both are admitted together
        asked = [request(f"r{new}", new=new, ordinal=new, ignore_eos=True) for new in (8, 20)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        await asyncio.sleep(0)
        assert engine.statistics().waiting == 2
        await engine.resume()
        answers = await asyncio.gather(*tasks)
        statistics = engine.statistics()
    assert (statistics.tokens, statistics.full_tokens) == (28, 16)
    assert 0 < statistics.full_s < statistics.busy_s
    for answer in answers:
        assert answer.stay is not None
        assert began < answer.stay[0] < answer.stay[1] < time.monotonic()


async def test_truncated_logprobs_are_renormalised():
    model = tiny_llama()
    truth = copy.deepcopy(model)
    asked = request("r", [3, 1, 4], new=20, temperature=1.3, top_k=4)
    async with running(model) as engine:
        got = await engine.generate(asked)
    kept, which = (full_logits(truth, asked.prompt_ids, got.token_ids.tolist()) / 1.3).topk(4, dim=-1)
    where = which == torch.from_numpy(got.token_ids).long()[:, None]
    assert where.any(dim=-1).all()
    np.testing.assert_allclose(got.logprobs, kept.log_softmax(-1)[where].numpy(), atol=1e-5)


async def test_a_groups_prompt_is_prefilled_once_and_again_for_each_version():
    model = tiny_llama()
    truth = copy.deepcopy(model)
    prompt = [9, 8, 7, 6, 5, 4, 3]
    asked = [request(f"r{i}", prompt, new=5 + i, sample=i) for i in range(7)]
    async with running(model) as engine:
        answers = await asyncio.gather(*(engine.generate(each) for each in asked))
        # all but the last token, which the first decoding step computes; later members copy a running row
        assert engine.statistics().prefill_tokens == len(prompt) - 1
        long = asyncio.create_task(engine.generate(request("long", prompt, new=50)))
        await ForwardPasses(engine.model).more(3)
        stage(engine, tiny_llama(1))
        before = engine.statistics().prefill_tokens
        await engine.swap_staged(1, in_flight=True, kv="keep")
        late = request("late", prompt, new=5, sample=1)
        got = await engine.generate(late)
        assert engine.statistics().prefill_tokens == before + len(prompt) - 1
        await long
    for each, answer in zip(asked, answers, strict=True):
        assert_true(truth, each, answer)
    assert len({tuple(answer.token_ids[:5].tolist()) for answer in answers}) > 1
    assert set(got.versions.tolist()) == {1}
    assert_true(tiny_llama(1), late, got)


async def test_eos_ends_an_answer_and_is_part_of_it():
    model = tiny_llama(eos_token_id=[3, 11])
    async with running(model) as engine:
        assert engine.model.generation_config.eos_token_id == [3, 11]
        asked = [request(f"r{i}", [i], new=60, ordinal=i) for i in range(12)]
        answers = await asyncio.gather(*(engine.generate(each) for each in asked))
        ignoring = await engine.generate(request("on", [0], new=60, ordinal=0, ignore_eos=True))
        assert engine.statistics().outstanding_tokens == 0
    assert Counter(answer.finish_reason for answer in answers)["stop"] >= 6
    for answer in answers:
        ids = answer.token_ids.tolist()
        assert not {3, 11} & set(ids[:-1])
        assert (ids[-1] in (3, 11)) == (answer.finish_reason == "stop")
    first = answers[0].token_ids.tolist()
    assert len(ignoring.token_ids) == 60
    assert ignoring.token_ids[: len(first)].tolist() == first


async def test_a_stop_string_ends_an_answer_where_it_first_occurs():
    free = request("free", [1, 2], new=40)
    async with running(tiny_llama(), tokenizer=Letters()) as engine:
        whole = await engine.generate(free)
        text = Letters().decode(whole.token_ids.tolist(), skip_special_tokens=False)
        stop = text[20:23]
        stopped, other = await asyncio.gather(
            engine.generate(request("s", [1, 2], new=40, stop=("nowhere to be found", stop))),
            engine.generate(request("o", [1, 2], new=40)),
        )
    end = text.index(stop) + len(stop)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert stopped.logprobs.tolist() == pytest.approx(whole.logprobs[:end].tolist(), abs=1e-5)
    assert len(other.token_ids) == 40


async def test_abort_returns_what_there_is_and_frees_the_slot():
    model = tiny_llama()
    truth = copy.deepcopy(model)
    async with running(model, slots=1) as engine:
        passes = ForwardPasses(engine.model)
        asked = request("runs", [1], new=63)
        first = asyncio.create_task(engine.generate(asked))
        second = asyncio.create_task(engine.generate(request("waits", [2], new=63)))
        third = asyncio.create_task(engine.generate(request("after", [3], new=4)))
        await passes.more(3)
        await engine.abort("waits")
        await engine.abort("runs")
        await engine.abort("unknown")
        ended, never, after = await first, await second, await third
        assert engine.statistics().outstanding_tokens == 0
    assert (ended.finish_reason, never.finish_reason, after.finish_reason) == ("abort", "abort", "length")
    assert 3 <= len(ended.token_ids) < 63
    assert len(ended.token_ids) == len(ended.logprobs) == len(ended.versions)
    assert_true(truth, asked, ended)
    assert len(never.token_ids) == len(never.logprobs) == len(never.versions) == 0


async def test_cancelling_frees_the_slot_and_the_uid():
    async with running(tiny_llama(), slots=1) as engine:
        passes = ForwardPasses(engine.model)
        asked = request("again", [1], new=63)
        tasks = [asyncio.create_task(engine.generate(each)) for each in (asked, request("w", [2], new=60))]
        await passes.more(2)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        # The same request anew must not get the remains of the cancelled one.
        whole = await engine.generate(asked)
        assert (whole.finish_reason, len(whole.token_ids)) == ("length", 63)
        statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.outstanding_tokens) == (0, 0, 0)


async def test_pause_stands_still_and_resume_goes_on_where_it_was():
    asked = request("r", [1, 2], new=50)
    async with running(tiny_llama()) as engine:
        undisturbed = await engine.generate(asked)
        passes = ForwardPasses(engine.model)
        task = asyncio.create_task(engine.generate(asked))
        await passes.more(5)
        await engine.pause()
        count = engine.statistics().tokens
        waiting = asyncio.create_task(engine.generate(request("new", [3], new=2)))
        await engine.pause()  # again: a round trip through the decode thread
        assert (engine.statistics().tokens, engine.statistics().waiting) == (count, 1)
        await engine.resume()
        got = await task
        await waiting
        assert engine.statistics().paused_s > 0
    assert got.token_ids.tolist() == undisturbed.token_ids.tolist()


def version_teller(version: int) -> Any:
    """A Llama whose every token is ``version``: nothing but the embedding reaches the head."""
    model = tiny_llama(tied=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[version] = 100.0
    return model


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_each_token_carries_the_version_that_sampled_it(kv, deterministic):
    async with running(version_teller(0), deterministic=deterministic) as engine:
        passes = ForwardPasses(engine.model)
        asked = [request(f"r{i}", [i + 1] * (i + 1), new=40 + i, ordinal=i) for i in range(7)]
        tasks = [asyncio.create_task(engine.generate(each)) for each in asked]
        for version in range(1, 6):
            await passes.more(3 + version)
            stage(engine, version_teller(version))
            pause = await engine.swap_staged(version, in_flight=True, kv=kv)
            assert pause > 0
            assert engine.live_version == version
        answers = await asyncio.gather(*tasks)
        assert engine.statistics().swaps == 5
    for each, got in zip(asked, answers, strict=True):
        assert len(got.token_ids) == each.sampling.max_new_tokens
        assert got.token_ids.tolist() == got.versions.tolist()
    # How many tokens pass while one is swapped is the machine's affair.
    assert len(set(answers[0].versions.tolist())) >= 2


async def test_a_swap_that_is_not_in_flight_lets_running_sequences_finish_first():
    async with running(version_teller(0), slots=2) as engine:
        passes = ForwardPasses(engine.model)
        asked = [request(f"r{i}", [1], new=10 + 5 * i, ordinal=i) for i in range(5)]
        tasks = [asyncio.create_task(engine.generate(each)) for each in asked]
        await passes.more(3)
        stage(engine, version_teller(1))
        await engine.swap_staged(1, in_flight=False, kv="keep")
        assert engine.live_version == 1
        assert [task.done() for task in tasks] == [True, True, False, False, False]
        answers = await asyncio.gather(*tasks)
    assert [set(got.versions.tolist()) for got in answers] == [{0}, {0}, {1}, {1}, {1}]
    assert all(got.token_ids.tolist() == got.versions.tolist() for got in answers)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
async def test_recompute_is_a_fresh_pass_under_the_new_weights_and_keep_is_not(make, deterministic):
    old, new = make(0), make(1)
    errors = {}
    for kv in ("keep", "recompute"):
        async with running(make(0), deterministic=deterministic) as engine:
            passes = ForwardPasses(engine.model)
            asked = [request(f"r{i}", [5, i, 2], new=30, ordinal=i) for i in range(4)]
            tasks = [asyncio.create_task(engine.generate(each)) for each in asked]
            await passes.more(8)
            stage(engine, new)
            await engine.swap_staged(3, in_flight=True, kv=kv)
            answers = await asyncio.gather(*tasks)
        worst = 0.0
        for each, got in zip(asked, answers, strict=True):
            answer, fresh = got.token_ids.tolist(), got.versions == 3
            assert 0 < fresh.sum() < 30
            by_old = full_logprobs(old, each.prompt_ids, answer).numpy()
            by_new = full_logprobs(new, each.prompt_ids, answer).numpy()
            np.testing.assert_allclose(got.logprobs[~fresh], by_old[~fresh], atol=1e-5)
            worst = max(worst, float(np.abs(got.logprobs - by_new)[fresh].max()))
        errors[kv] = worst
    assert errors["recompute"] < 1e-5
    assert errors["keep"] > 1e-3


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gpt2])
async def test_tied_embeddings_survive_swaps(make):
    async with running(make(0)) as engine:
        for version in (1, 2, 3):
            stage(engine, make(version))
            await engine.swap_staged(version, in_flight=True, kv="keep")
            model = engine.model
            head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
            assert head.data_ptr() == embedding.data_ptr()
            asked = request(f"r{version}", [1, 2, 3], new=20)
            got = await engine.generate(asked)
            assert_true(make(version), asked, got)
            assert set(got.versions.tolist()) == {version}


async def test_old_weights_become_the_next_staging_area():
    async with running(tiny_llama(0)) as engine:
        live = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
        staged = {name: tensor.data_ptr() for name, tensor in engine.stage().items()}
        assert not set(live.values()) & set(staged.values())
        stage(engine, tiny_llama(1))
        await engine.swap_staged(1, in_flight=True, kv="keep")
        assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == staged
        assert {name: tensor.data_ptr() for name, tensor in engine.stage().items()} == live


async def test_nothing_is_lost_when_weights_are_swapped_under_load():
    async with running(tiny_llama(0), slots=3) as engine:
        passes = ForwardPasses(engine.model)
        asked = mixed_requests(25)
        tasks = [asyncio.create_task(engine.generate(each)) for each in asked]
        for version in range(1, 9):
            await passes.more(3)
            stage(engine, tiny_llama(version))
            await engine.swap_staged(version, in_flight=version % 3 != 0, kv="keep")
        answers = await asyncio.gather(*tasks)
        statistics = engine.statistics()
    for each, got in zip(asked, answers, strict=True):
        assert len(got.token_ids) == each.sampling.max_new_tokens
        assert (np.diff(got.versions) >= 0).all()
    assert statistics.tokens == sum(len(got.token_ids) for got in answers)
    assert (statistics.swaps, statistics.live_version, statistics.outstanding_tokens) == (8, 8, 0)


async def test_a_fault_in_the_decode_thread_fails_all_that_wait():
    async with running(tiny_llama(), slots=2) as engine:
        model, passes = engine.model, ForwardPasses(engine.model)
        tasks = [asyncio.create_task(engine.generate(request(f"r{i}", new=60, ordinal=i))) for i in range(5)]
        await passes.more(2)
        engine.check_health()

        def explode(*_: object) -> None:
            raise RuntimeError("the device is gone")

        model.register_forward_pre_hook(explode)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, GeneratorError) for result in results)
        assert "the device is gone" in str(results[0])
        assert "Traceback" in str(results[0])
        for call in (engine.generate(request("late")), engine.pause(), engine.abort("r1")):
            with pytest.raises(GeneratorError, match="the device is gone"):
                await call
        with pytest.raises(GeneratorError, match="the device is gone"):
            engine.check_health()


async def test_weights_that_are_not_finite_are_an_error_and_not_a_sample():
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    async with running(tiny_llama()) as engine:
        stage(engine, broken)
        await engine.swap_staged(1, in_flight=True, kv="keep")
        with pytest.raises(GeneratorError, match=r"5 of 5 log-probs are not finite at version 1"):
            await engine.generate(request("r", new=5))


async def test_close_fails_what_still_runs():
    engine = TorchEngine(tiny_llama(), slots=1, max_sequence=64, device="cpu")
    await engine.start()
    passes = ForwardPasses(engine.model)
    tasks = [asyncio.create_task(engine.generate(request(f"r{i}", new=60))) for i in range(3)]
    await passes.more(1)
    await engine.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, GeneratorError)
        assert "closed" in str(result)
    with pytest.raises(GeneratorError, match="closed"):
        await engine.generate(request("late"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("r", [1] * 50, new=15), r"65 tokens \(50 of prompt and up to 15 new\).*slot holds 64"),
        (request("r", [], new=5), "empty prompt"),
        (request("r", [VOCAB], new=5), "vocabulary has 48"),
        (request("r", new=0), "max_new_tokens is 0"),
        (request("r", temperature=-1.0), "temperature -1.0"),
        (request("r", stop=("x",)), "no tokenizer"),
    ],
)
async def test_a_request_that_can_never_be_served_is_refused_alone(bad, words):
    async with running(tiny_llama()) as engine:
        with pytest.raises(RolloutError, match=words):
            await engine.generate(bad)
        assert len((await engine.generate(request("good", [1] * 50, new=14))).token_ids) == 14


async def test_misuse_is_named():
    engine = TorchEngine(tiny_llama(), slots=1, max_sequence=64, device="cpu")
    with pytest.raises(GeneratorError, match="not started"):
        await engine.generate(request("r"))
    async with running(tiny_llama()) as engine:
        with pytest.raises(GeneratorError, match="0 of 21 tensors were staged"):
            await engine.swap_staged(1, in_flight=True, kv="keep")
        stage(engine, tiny_llama(1))
        await engine.swap_staged(2, in_flight=True, kv="keep")
        with pytest.raises(GeneratorError, match="version 1, but 2 is live"):
            await engine.swap_staged(1, in_flight=True, kv="keep")
        task = asyncio.create_task(engine.generate(request("twice", new=60)))
        await asyncio.sleep(0)
        with pytest.raises(GeneratorError, match="twice is already running"):
            await engine.generate(request("twice"))
        await task


@pytest.mark.parametrize(
    ("options", "length", "words"),
    [
        ({}, 129, "128 positions, but prompt and answer may take 129"),
        ({"sliding_window": 16}, 64, "sliding window of 16 tokens, shorter than the 64"),
        ({"layer_types": ["full_attention", "linear_attention"]}, 64, "layers of type linear_attention"),
    ],
)
async def test_models_that_slots_cannot_serve_are_refused(options, length, words):
    model = tiny_llama()
    for name, value in options.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=words):
        await TorchEngine(model, slots=2, max_sequence=length, device="cpu").start()


async def test_a_path_is_loaded_with_its_eos_and_dtype(tmp_path):
    tiny_llama(eos_token_id=20).save_pretrained(tmp_path)
    async with running(str(tmp_path), dtype="bfloat16") as engine:
        assert next(engine.model.parameters()).dtype == torch.bfloat16
        asked = [request(f"r{i}", [i], new=40, ordinal=i) for i in range(6)]
        answers = await asyncio.gather(*(engine.generate(each) for each in asked))
    assert any(got.finish_reason == "stop" and got.token_ids[-1] == 20 for got in answers)
    for each, got in zip(asked, answers, strict=True):
        assert_true(tiny_llama(), each, got, atol=0.2)
