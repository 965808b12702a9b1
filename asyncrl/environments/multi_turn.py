"""A rollout of several turns: the model's message, the environment's answer, and so on to an end.

Invariants:
- Tokens in, tokens out: the context of a turn is what was sampled before, as sampled, with the environment's
  tokens between, which have ``loss_mask`` False and the version of the token before them.
- A trajectory ends ``stop`` when the environment says so, and ``length`` at a budget: turns, tokens or time.
  What was sampled until then stays and is scored; an observation that does not fit is left out.
- Between two turns it holds no slot of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.config import ENVIRONMENT, EnvironmentSection
from asyncrl.environments.base import ModelClient, RolloutResult
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.protocol import Message, Step
from asyncrl.environments.tokens import TurnTokens
from asyncrl.environments.turns import TurnEncoder
from asyncrl.errors import EnvironmentValueError
from asyncrl.types import Completion, FinishReason, Task
from asyncrl.waiting import now


class MultiTurn:
    """The ``Rollout`` through an environment. ``decode``: token ids as text, special tokens left out."""

    def __init__(
        self,
        pool: EnvironmentPool,
        section: EnvironmentSection,
        encoder: TurnEncoder,
        decode: Callable[[Sequence[int]], str],
        max_prompt_tokens: int,
    ) -> None:
        self._pool = pool
        self._section = section
        self._encoder = encoder
        self._decode = decode
        self._max_prompt_tokens = max_prompt_tokens

    async def __call__(self, task: Task, client: ModelClient) -> RolloutResult:
        """Play one trajectory. Raises EnvironmentFaultError for what its environment does wrong."""
        section = self._section
        ends_at = None if section.max_time_s is None else now() + section.max_time_s
        async with self._pool.session(task.uid) as session:
            given = self._encoder.messages(task.row, task.uid)
            prompt_ids = self._prompt(task, given, await session.reset(task.row, given))
            tokens = TurnTokens()
            messages: list[Mapping[str, Any]] = []
            rewards: dict[str, float] = {}
            finish: FinishReason = "length"
            for turn in range(1, section.max_turns + 1):
                completion = await self._turn(client, prompt_ids, tokens)
                tokens.sampled(completion)
                if completion.finish_reason == "abort":
                    finish = "abort"
                    break
                message = {"role": "assistant", "content": self._decode(completion.token_ids.tolist())}
                step = await session.step(message)
                messages.append(message)
                rewards |= _said_of_it(step)
                if step.done:
                    finish = "stop"
                    break
                if turn == section.max_turns or (ends_at is not None and now() >= ends_at):
                    break
                observation = self._encoder.between(tokens.ids[-1], step.messages)
                if len(tokens.ids) + len(observation) >= client.sampling.max_new_tokens:
                    break
                tokens.observed(observation)
                messages += step.messages
            if finish != "abort":
                rewards |= _said_of_it(await session.finish(finish))
        return tokens.result(prompt_ids, finish, messages, rewards)

    async def _turn(self, client: ModelClient, prompt_ids: Sequence[int], tokens: TurnTokens) -> Completion:
        """The model's next message, within what is left of the tokens."""
        whole = client.sampling
        room = whole.max_new_tokens - len(tokens.ids)
        sampling = replace(whole, max_new_tokens=min(room, self._section.max_turn_tokens or room))
        return await client.complete((*prompt_ids, *tokens.ids), sampling)

    def _prompt(self, task: Task, given: Sequence[Message], opening: Step) -> Sequence[int]:
        """The task's own prompt, or what the environment made of it."""
        if not opening.messages:
            return task.prompt_ids
        whole = opening.messages if opening.replaces else (*given, *opening.messages)
        ids = self._encoder.prompt(task.row, whole)
        if len(ids) > self._max_prompt_tokens:
            raise EnvironmentValueError(
                f"{task.uid}: found a prompt of {len(ids)} tokens with what reset of environment "
                f"{self._section.path!r} made of it; expected at most data.max_prompt_tokens = "
                f"{self._max_prompt_tokens}"
            )
        return ids


def _said_of_it(step: Step) -> dict[str, float]:
    """What a step says of the trajectory, as rewards by name: its reward, and its metrics behind a slash."""
    said = {f"{ENVIRONMENT}/{name}": value for name, value in step.metrics.items()}
    return said if step.reward is None else {ENVIRONMENT: step.reward, **said}
