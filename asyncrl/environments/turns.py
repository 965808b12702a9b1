"""From an environment's messages to the tokens that follow what the model has sampled.

Invariants:
- What was sampled is never decoded and tokenised again: only what comes after it is rendered.
- The tokens between two turns are those that the chat template writes after an assistant's message of any
  content, up to where the next one begins. A template that changes earlier messages when others follow is
  refused, with ConfigError, as soon as it is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.config import DataSection
from asyncrl.data.templates import PromptTemplate, plain_text, prompt_key, prompt_messages
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\u2603"
"""The content of an assistant's message that stands for any."""


class TurnEncoder:
    """Renders what comes before and between the model's turns."""

    def __init__(
        self, data: DataSection, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._tools = tools
        self._eos = tokenizer.eos_token_id

    def messages(self, row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
        """The prompt of a row as chat messages; ``where`` names it in a DataError."""
        return prompt_messages(self._data, prompt_key(self._data, list(row)), row, where)

    def prompt(self, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """``messages`` in place of the row's own prompt."""
        template = PromptTemplate(self._data, self._tokenizer, prompt_key(self._data, list(row)), self._tools)
        return template.encode([template.rendered(messages)])[0]

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation from its beginning, up to where the next turn begins."""
        if not self._chat:
            return self.plain(plain_text(messages), begins=True)
        return self._encoded(self._rendered(messages, begins_next=True))

    def plain(self, text: str, *, begins: bool) -> list[int]:
        """Text as it stands, without the chat template; ``begins``: nothing is before it."""
        return [int(i) for i in self._tokenizer(text, add_special_tokens=begins)["input_ids"]]

    def between(self, last_id: int | None, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """What follows a turn that ended with the token ``last_id``, up to where the next turn begins.

        Without a chat template it is the messages' text as it stands: the model's text goes on behind it.
        """
        if not self._chat:
            return self._encoded("".join(str(message["content"]) for message in messages))
        head = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        before = self._rendered(head, begins_next=False)
        whole = self._rendered([*head, *messages], begins_next=True)
        start = before.rfind(_MARK)
        if start < 0 or not whole.startswith(before[: start + len(_MARK)]):
            raise ConfigError(
                "data.template: found a chat template that writes earlier messages in another way when "
                "others follow, so that turns cannot be put together token by token; expected one that "
                "only appends"
            )
        ids = self._encoded(whole[start + len(_MARK) :])
        # The end of the turn was sampled already, unless a limit or a stop string cut it off.
        return ids[1:] if last_id is not None and ids and ids[0] == last_id == self._eos else ids

    @property
    def _chat(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None)) and self._data.template != "plain"

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, begins_next: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=begins_next,
            **({"tools": list(self._tools)} if self._tools else {}),
        )
        return str(text)

    def _encoded(self, text: str) -> list[int]:
        return self.plain(text, begins=False)
