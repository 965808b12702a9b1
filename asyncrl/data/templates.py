"""From a row to the text and the token ids that the model is prompted with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.config import DataSection
from asyncrl.data.forms import recognise
from asyncrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_key(section: DataSection, columns: Sequence[str]) -> str:
    """The column of the prompt. Raises DataError if there is none among ``columns``."""
    return recognise(section, columns).prompt_key


class PromptTemplate:
    """Renders rows with the tokenizer's chat template, or as plain text.

    A prompt is text or, as in several projects' data sets, a list of chat messages. ``key`` is its
    column. ``tools``: schemas of tools, for the chat template to describe.

    Raises DataError if ``data.template`` is chat and the tokenizer has no chat template.
    """

    def __init__(
        self,
        section: DataSection,
        tokenizer: PreTrainedTokenizerBase,
        key: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if section.template == "chat" and not has_template:
            raise DataError(
                "data.template: found 'chat', but the tokenizer has no chat template; expected one: set "
                "data.template to plain, or use an instruction-tuned model"
            )
        self.chat = has_template and section.template != "plain"
        self.key = key
        self._section = section
        self._tokenizer = tokenizer
        self._tools = tools

    def text(self, row: Mapping[str, Any], where: str) -> str:
        """The whole prompt as text. ``where`` names the row in a DataError."""
        return self.rendered(prompt_messages(self._section, self.key, row, where))

    def rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """These messages as text, up to where the model goes on."""
        if not self.chat:
            return plain_text(messages)
        tools = {"tools": list(self._tools)} if self._tools else {}
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **tools
        )
        return str(text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts. A chat template writes its special tokens itself."""
        encoded = self._tokenizer(list(texts), add_special_tokens=not self.chat)["input_ids"]
        return [list(ids) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


def plain_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A prompt without a chat template: the messages' texts, a line break between two."""
    return "\n".join(message["content"] for message in messages)


def prompt_messages(
    section: DataSection, key: str, row: Mapping[str, Any], where: str
) -> list[dict[str, str]]:
    """The prompt of a row as chat messages, ``prompt_format`` and ``system`` applied."""
    if key not in row:
        raise DataError(
            f"{where}: found the columns {', '.join(row) or '(none)'}; expected {key!r}, as in the first row"
        )
    value = row[key]
    if isinstance(value, str):
        messages = [{"role": "user", "content": _formatted(section, value, row, where)}]
    elif isinstance(value, list) and value and all(_is_message(item) for item in value):
        messages = [dict(item) for item in value]
        if messages[-1]["role"] == "user":
            content = _formatted(section, messages[-1]["content"], row, where)
            messages[-1] = {**messages[-1], "content": content}
    else:
        raise DataError(
            f"{where}, column {key!r}: found {type(value).__name__}; expected text, or a list of messages "
            "with role and content"
        )
    if section.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": section.system})
    return messages


def _formatted(section: DataSection, prompt: str, row: Mapping[str, Any], where: str) -> str:
    if section.prompt_format == "{prompt}":
        return prompt
    try:
        return section.prompt_format.format_map({**row, "prompt": prompt})
    except KeyError as error:
        raise DataError(
            f"{where}: data.prompt_format names {error}; expected prompt or one of the columns "
            f"{', '.join(row)} (a brace itself is written twice)"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(f"{where}: data.prompt_format cannot be filled in: {error}") from error


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
    )
