"""From the config to a generator with its scorer, inside the generator's process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import ENVIRONMENT, Config
from asyncrl.environments.base import Messages, Rollout, RolloutResult, single_turn
from asyncrl.environments.forms import tool_schemas
from asyncrl.environments.multi_turn import MultiTurn
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.turns import TurnEncoder
from asyncrl.errors import RewardError, RewardValueError
from asyncrl.generators.base import Generator
from asyncrl.rewards.binder import Sample
from asyncrl.rewards.pool import RewardPool, RewardScore
from asyncrl.rollout import RolloutHost, Score
from asyncrl.serve.rollout import AgentRollout
from asyncrl.serve.server import AgentServer
from asyncrl.types import Task, Trajectory
from asyncrl.waiting import Deadlines

if TYPE_CHECKING:
    from asyncrl.weight_sync.sharing import SharedModel


class PoolScorer:
    """The ``Scorer`` over users' reward functions in worker processes."""

    def __init__(self, pool: RewardPool, environment_weight: float = 0.0) -> None:
        self._pool = pool
        self._environment_weight = environment_weight

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
            result.messages,
            uid=task.uid,
        )
        return _with_environment(_as_score(score), result, self._environment_weight)

    @property
    def scores_groups(self) -> bool:
        return self._pool.scores_groups

    async def score_group(
        self, task: Task, answers: Sequence[tuple[str, Messages, Trajectory]]
    ) -> list[Score | RewardError]:
        samples = [
            Sample(task.row, task.prompt, text, t.token_ids.tolist(), t.finish_reason, messages)
            for text, messages, t in answers
        ]
        scores = await self._pool.score_group(samples, [t.rewards for _, _, t in answers], uid=task.uid)
        return [s if isinstance(s, RewardError) else _as_score(s) for s in scores]


def _with_environment(score: Score, result: RolloutResult, weight: float) -> Score:
    """``score`` and what the environment itself said of the answer."""
    own = result.rewards.get(ENVIRONMENT, 0.0)
    return replace(score, total=score.total + weight * own, parts={**score.parts, **result.rewards})


def _as_score(score: RewardScore) -> Score:
    span = (f"reward worker {score.worker}", score.begun, score.ended)
    # A pool that was not asked has no worker to name.
    return Score(score.total, {**score.parts, **score.extras}, span if score.ended else None)


class NoFunctions:
    """The ``Scorer`` of a run without functions: of what an environment says, and a reward model adds to.

    ``needs_environment``: nothing else will add to it, so that an answer without a reward is an error.
    """

    def __init__(self, environment_weight: float = 0.0, *, needs_environment: bool = False) -> None:
        self._environment_weight = environment_weight
        self._needs_environment = needs_environment

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        if self._needs_environment and ENVIRONMENT not in result.rewards:
            raise RewardValueError(
                f"{task.uid}: found no reward from the environment, and no function that could give one; "
                'expected a number with its last step, as {"done": True, "reward": 1.0}; where a budget may '
                "end it before, give one with each step (the last counts), or return it from finish(reason)"
            )
        return _with_environment(Score(0.0), result, self._environment_weight)


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
    environments = _environments(config, folder, cores)
    deadlines = Deadlines()
    tokenizer, *_ = await asyncio.gather(
        asyncio.to_thread(_tokenizer, config, model_path),
        engine.start(),
        scorer.start(),
        *(pool.start() for pool in environments),
    )

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    server: AgentServer | None = None

    async def close() -> None:
        if server is not None:
            await server.close()
        await asyncio.gather(engine.close(), scorer.close(), *(pool.close() for pool in environments))

    rollout: Rollout = single_turn
    if config.environment is not None and config.environment.kind == "agent":
        server = AgentServer(
            config.environment,
            lambda tools: TurnEncoder(config.data, tokenizer, tools),
            decode,
            lambda: engine.live_version,
            config.data.max_prompt_tokens,
        )
        await server.start()
        rollout = AgentRollout(environments[0], config.environment, server, deadlines)
    elif config.environment is not None:
        tools = await asyncio.to_thread(tool_schemas, config.environment, folder)
        rollout = MultiTurn(
            environments[0],
            config.environment,
            TurnEncoder(config.data, tokenizer, tools),
            decode,
            config.data.max_prompt_tokens,
        )
    mask = config.algorithm.mask_truncated
    host = RolloutHost(engine, scorer, decode, rollout=rollout, mask_truncated=mask, deadlines=deadlines)
    return host, close


def _environments(config: Config, folder: Path, cores: Sequence[int]) -> list[EnvironmentPool]:
    """One, or none."""
    if config.environment is None:
        return []
    return [EnvironmentPool(config.environment, folder=folder, cores=tuple(cores))]


def _scorer(config: Config, folder: Path, cores: Sequence[int]) -> PoolScorer | NoFunctions:
    weight = 0.0 if config.environment is None else config.environment.reward_weight
    if not config.reward.functions:
        alone = config.reward_model is None and config.environment is not None
        return NoFunctions(weight, needs_environment=alone)
    pool = RewardPool(
        config.reward.functions,
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        memory_mb=config.reward.memory_mb,
        folder=folder,
        cores=cores,
        alone=config.reward_model is None and config.environment is None,
    )
    return PoolScorer(pool, weight)


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
