"""The reward model: a sequence classifier of one label that scores answers, several at a time.

Invariants:
- A score is the logit that the model's own forward pass gives the prompt with its answer, up to rounding: the
  model itself finds the end of a row that is padded on the right. One that names no padding token cannot, and
  gets a row at a time.
- The scores of one call depend on the groups in it alone, to the bit.
- Nothing here has a gradient, and nothing changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from asyncrl.config import DataSection
from asyncrl.errors import ConfigError
from asyncrl.roles.base import Ratings
from asyncrl.roles.reward_text import AnswerEncoder
from asyncrl.types import Group, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """What a ``RewardModel`` is made of."""

    path: str
    """Hugging Face folder or name of the classifier and its tokenizer."""
    policy_path: str
    """That of the policy's tokenizer."""
    data: DataSection
    template: Literal["auto", "chat", "none"]
    dtype: str
    device: Literal["auto", "cpu", "cuda"]
    threads: int
    micro_batch_tokens: int
    max_tokens: int | None
    trust_remote_code: bool = False


class RewardModel:
    """A ``ScoringWorker``."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings
        self._device = torch.device(_device(settings.device))
        self._model: Any = None
        self._encoder: AnswerEncoder | None = None
        self._pad_id: int | None = None
        self._vocabulary = 0

    def start(self) -> None:
        """Raises ConfigError for a model that is no classifier of one label, or has no trained head."""
        from transformers import AutoTokenizer

        settings = self._settings
        if self._device.type == "cpu":
            torch.set_num_threads(settings.threads)
        self._model = load_classifier(
            settings.path,
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=settings.trust_remote_code,
        ).to(self._device)
        text_config = self._model.config.get_text_config()
        self._pad_id = text_config.pad_token_id
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        if self._pad_id is None:
            log.warning(
                "the reward model %s scores one answer at a time: its config.json names no pad_token_id",
                settings.path,
            )
        own, policys = (
            AutoTokenizer.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
            for path in (settings.path, settings.policy_path)
        )
        self._encoder = AnswerEncoder(
            own,
            policys,
            settings.data,
            template=settings.template,
            limit=_limit(settings.max_tokens, text_config, own),
        )

    def rate(self, groups: Sequence[tuple[Task, Group]]) -> Ratings:
        assert self._encoder is not None, "start() comes first"
        encoded = [[self._encoder.encode(task, answer) for answer in group.answers] for task, group in groups]
        rows = [row for of_group in encoded for row in of_group]
        logits = iter(self._logits([row.ids for row in rows]))
        scores = tuple(tuple(next(logits) for _ in of_group) for of_group in encoded)
        return Ratings(scores, sum(row.cut for row in rows))

    def close(self) -> None:
        self._model = self._encoder = None

    @torch.inference_mode()
    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One a row, NaN for one that the model cannot take: without a token, or with one that it lacks."""
        found = [math.nan] * len(rows)
        able = {i: len(row) for i, row in enumerate(rows) if row and max(row) < self._vocabulary}
        for chosen in micro_batches(able, 0 if self._pad_id is None else self._settings.micro_batch_tokens):
            longest = able[chosen[0]]
            ids = torch.full((len(chosen), longest), self._pad_id or 0, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for i, row in enumerate(chosen):
                ids[i, : able[row]] = torch.tensor(rows[row])
                mask[i, : able[row]] = 1
            logits = self._model(
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
            ).logits  # (B, 1)
            for row, score in zip(chosen, logits[:, 0].float().tolist(), strict=True):
                found[row] = score
        return found


def micro_batches(lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """Rows, by their ``lengths``, in batches with rows * longest row within ``tokens``, the longest first.

    A row that is longer than that is a batch of its own.
    """
    order = sorted(lengths, key=lambda row: (-lengths[row], row))
    found, start = [], 0
    while start < len(order):
        rows = max(tokens // lengths[order[start]], 1)
        found.append(order[start : start + rows])
        start += rows
    return found


def load_classifier(path: str, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The sequence classifier of a Hugging Face folder or name, on the CPU, for inference.

    Raises ConfigError if it has not one label, or if weights of its are in no file: a head that was
    made up would score at random.
    """
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    if model.config.num_labels != 1:
        raise ConfigError(
            f"reward_model.path: found {model.config.num_labels} labels in {path}; expected 1, whose "
            "logit is the score"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"reward_model.path: found no weights for {', '.join(missing[:3])} in {path} ({len(missing)} "
            "tensors in all); expected a trained sequence classifier with its head"
        )
    return model.requires_grad_(False).eval()


def _limit(max_tokens: int | None, text_config: Any, tokenizer: Any) -> int | None:
    """Longest input in tokens: what the model takes, and what was asked for or else its tokenizer says."""
    asked = tokenizer.model_max_length if max_tokens is None else max_tokens
    positions = getattr(text_config, "max_position_embeddings", None)
    # A tokenizer without a limit says 10**30.
    return min((limit for limit in (positions, asked) if limit is not None and limit < 10**9), default=None)


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("reward_model.device is cuda, but torch finds 0 CUDA devices: use auto or cpu")
    return wanted
