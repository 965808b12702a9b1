"""What a reward model reads: a prompt with its answer, as token ids of its own vocabulary.

Invariants:
- Where the two tokenizers have one vocabulary and no template is asked for, the tokens are those that were
  sampled: nothing is decoded and tokenised again.
- An input that is too long loses its beginning, for a model scores by the end, and is marked as cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asyncrl.config import DataSection
from asyncrl.data.templates import prompt_key, prompt_messages
from asyncrl.errors import ConfigError
from asyncrl.types import Task, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EncodedAnswer:
    """One input."""

    ids: tuple[int, ...]
    cut: bool
    """Whether it lost its beginning."""


class AnswerEncoder:
    """Puts prompts and answers together for the model that ``own`` is the tokenizer of.

    ``policys``: the tokenizer that answers are decoded with. ``limit``: longest input in tokens, None for no
    limit. Raises ConfigError if ``template`` is chat and ``own`` has no chat template.
    """

    def __init__(
        self,
        own: PreTrainedTokenizerBase,
        policys: PreTrainedTokenizerBase,
        data: DataSection,
        *,
        template: Literal["auto", "chat", "none"],
        limit: int | None,
    ) -> None:
        self.chat = uses_chat(own, template)
        self.same_tokens = not self.chat and own.get_vocab() == policys.get_vocab()
        """Whether the policy's own tokens are read."""
        self._own = own
        self._own.truncation_side = "left"
        self._policys = policys
        self._data = data
        self._limit = limit

    def encode(self, task: Task, answer: Trajectory) -> EncodedAnswer:
        """``answer`` to ``task``: all that followed the prompt, what came from an environment included."""
        if self.same_tokens:
            ids = (*answer.prompt_ids.tolist(), *answer.token_ids.tolist())
            if self._limit is None or len(ids) <= self._limit:
                return EncodedAnswer(ids, False)
            return EncodedAnswer(ids[-self._limit :], True)
        text = self._text(task, answer)
        # A chat template writes its special tokens itself.
        special = not self.chat
        # Not verbose: it would warn of a length that is dealt with below.
        ids = tuple(self._own(text, add_special_tokens=special, verbose=False)["input_ids"])
        if self._limit is None or len(ids) <= self._limit:
            return EncodedAnswer(ids, False)
        # By the tokenizer, which keeps the special tokens around what is left.
        kept = self._own(text, add_special_tokens=special, truncation=True, max_length=self._limit)
        return EncodedAnswer(tuple(kept["input_ids"]), True)

    def _text(self, task: Task, answer: Trajectory) -> str:
        completion = str(self._policys.decode(answer.token_ids.tolist(), skip_special_tokens=True))
        if not self.chat:
            return task.prompt + completion
        key = prompt_key(self._data, list(task.row))
        messages = prompt_messages(self._data, key, task.row, task.uid)
        messages.append({"role": "assistant", "content": completion})
        return str(self._own.apply_chat_template(messages, tokenize=False))


def uses_chat(tokenizer: PreTrainedTokenizerBase, template: Literal["auto", "chat", "none"]) -> bool:
    """Whether answers go through ``tokenizer``'s chat template. Raises ConfigError if it lacks one."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if template == "chat" and not has_template:
        raise ConfigError(
            "reward_model.template: found 'chat', but the reward model's tokenizer has no chat template; "
            "expected one: set reward_model.template to none, or use another model"
        )
    return has_template and template != "none"
