"""From the config to a generator with its scorer, inside the generator's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.environments.base import RolloutResult
from asyncrl.generators.base import Generator
from asyncrl.rewards.pool import RewardPool
from asyncrl.rollout import RolloutHost, Score
from asyncrl.types import Task

if TYPE_CHECKING:
    from asyncrl.weight_sync.sharing import SharedModel


class PoolScorer:
    """The ``Scorer`` over users' reward functions in worker processes."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        score = await self._pool.score(
            task.row,
            task.prompt,
            completion,
            result.token_ids.tolist(),
            result.finish_reason,
            uid=task.uid,
        )
        return Score(score.total, score.parts, (f"reward worker {score.worker}", score.begun, score.ended))


class NoFunctions:
    """The ``Scorer`` of a run without functions: a sum of nothing, to which a reward model adds its score."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        return Score(0.0)


async def build_host(
    config: Config,
    model_path: str,
    folder: Path,
    cores: Sequence[int],
    engine_cores: tuple[int, ...] | None = None,
    shared: SharedModel | None = None,
) -> tuple[RolloutHost, Callable[[], Awaitable[None]]]:
    """A started engine with its rollout host, and what closes both.

    Reward functions are looked up from ``folder``. ``cores`` are those that reward workers may use;
    the engine itself may be pinned to fewer, ``engine_cores``. With ``shared`` it has the parameters of a
    learner in this process, and starts asleep.
    """
    scorer = _scorer(config, folder, cores)
    engine = _engine(config, model_path, engine_cores, shared)
    tokenizer, _, _ = await asyncio.gather(
        asyncio.to_thread(_tokenizer, config, model_path), engine.start(), scorer.start()
    )

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    async def close() -> None:
        await asyncio.gather(engine.close(), scorer.close())

    host = RolloutHost(engine, scorer, decode, mask_truncated=config.algorithm.mask_truncated)
    return host, close


def _scorer(config: Config, folder: Path, cores: Sequence[int]) -> PoolScorer | NoFunctions:
    if not config.reward.functions:
        return NoFunctions()
    pool = RewardPool(
        config.reward.functions,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        folder=folder,
        cores=cores,
        alone=config.reward_model is None,
    )
    return PoolScorer(pool)


def _engine(
    config: Config, model_path: str, engine_cores: tuple[int, ...] | None, shared: SharedModel | None
) -> Generator:
    settings = config.generators
    if settings.backend == "vllm":
        from asyncrl.generators.vllm_engine import VLLMEngine
        from asyncrl.generators.vllm_settings import VLLMSettings

        return VLLMEngine(
            VLLMSettings(
                model_path,
                config.model.dtype,
                settings.slots,
                longest_sequence(config),
                device=settings.device,
                threads=settings.threads,
                cores=engine_cores,
                trust_remote_code=config.model.trust_remote_code,
                seed=config.run.seed,
                shares_device=config.placement.mode == "colocated",
                options=settings.vllm,
            )
        )
    from asyncrl.generators.shared import SharedTorchGenerator
    from asyncrl.generators.torch_engine import TorchEngine
    from asyncrl.generators.torch_generator import TorchGenerator

    engine = TorchEngine(
        model_path if shared is None else shared.model,
        slots=settings.slots,
        max_sequence=longest_sequence(config),
        dtype=config.model.dtype,
        device=settings.device if shared is None else shared.device,
        deterministic=config.run.deterministic,
        threads=settings.threads,
        tokenizer=model_path,
        trust_remote_code=config.model.trust_remote_code,
        asleep=shared is not None,
    )
    return TorchGenerator(engine) if shared is None else SharedTorchGenerator(engine, shared)


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest answer, evaluation included."""
    answer = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    return config.data.max_prompt_tokens + answer


def _tokenizer(config: Config, model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=config.model.trust_remote_code)
