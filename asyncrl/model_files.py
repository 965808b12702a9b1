"""The files of a Hugging Face model that say what it is, read without loading the model.

Invariants:
- What is wrong with a model is said under the config key that names it.
- Nothing is read before it is asked for, and transformers is imported for the tokenizer alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.hub import endpoint, hub_is_offline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_REMOTE_CLASSIFIER = "AutoModelForSequenceClassification"
_VOLATILE = ("_name_or_path", "transformers_version")
"""What config.json says of who wrote it."""
_WEIGHTS = ("*.safetensors", "*.bin")
_SAMPLE_BYTES = 1 << 20
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that add nothing to tokenizer.json: two names of one."""
_CREATED = "llama"
"""What ``model.create`` makes. For some other kinds the library takes a class that is not the one named."""


def load_tokenizer(place: Path | str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """That of a folder, or of a name on the hub, as ``AutoTokenizer`` loads it; raises what that raises.

    Its import takes all of PyTorch, and seconds. A folder whose tokenizer is wholly in tokenizer.json, as
    that of ``model.create`` is, does without.
    """
    if isinstance(place, Path) and (place / "tokenizer.json").is_file() and _is_plain(place):
        from transformers import PreTrainedTokenizerFast

        plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(str(place))
        return plain
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(place), trust_remote_code=trust_remote_code
    )
    return found


def _is_plain(folder: Path) -> bool:
    tokenizer, model = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for file in (folder / "tokenizer_config.json", folder / "config.json")
    )
    plain = tokenizer.get("tokenizer_class") in _PLAIN_TOKENIZERS and "auto_map" not in tokenizer
    return plain and model.get("model_type") == _CREATED


class ModelFiles:
    """Those of ``path``, a folder as seen from ``folder`` or a name on the hub; ``key`` is what names it."""

    def __init__(self, path: str, folder: Path, key: str, *, trust_remote_code: bool) -> None:
        self.path = path
        self._folder = folder
        self.key = key
        self._trusts_code = trust_remote_code

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """config.json. Raises ConfigError if it is missing or cannot be read."""
        file = self._local / "config.json" if self._local is not None else self._hub_file("config.json")
        try:
            settings: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.key}: found no config.json in {self.path}; expected a Hugging Face folder"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.key}: {file} cannot be read: {error}") from error
        return settings

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ConfigError if there is none."""
        try:
            tokenizer = load_tokenizer(self._local or self.path, trust_remote_code=self._trusts_code)
        except Exception as error:
            # The library raises whatever its parsers do.
            raise ConfigError(
                f"{self.key}: the tokenizer in {self.path} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        return tokenizer

    @property
    def architecture(self) -> str:
        """Its class by config.json; empty where that does not say."""
        names = self.settings.get("architectures") or [""]
        return str(names[0])

    @property
    def positions(self) -> int | None:
        """Longest sequence in tokens; None where there is no such limit."""
        return self._number(_POSITION_KEYS)

    @property
    def vocabulary(self) -> int | None:
        """Token ids that it has embeddings for; None where config.json does not say."""
        return self._number(("vocab_size",))

    @property
    def heads(self) -> tuple[int, int] | None:
        """Of attention, and of its keys and values; None where config.json does not say."""
        attention = self._number(("num_attention_heads", "n_head"))
        if attention is None:
            return None
        return attention, self._number(("num_key_value_heads",)) or attention

    @property
    def labels(self) -> int:
        """Of a classifier. The library writes their names, and leaves out the usual 2."""
        if self.settings.get("id2label"):
            return len(self.settings["id2label"])
        return int(self.settings.get("num_labels", 2))

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that are others for another config.json, or for other weights.

        Weights are told apart by the name, size, beginning and end of each of their files. A model on the hub
        counts as its name and its config.json.
        """
        digest = xxhash.xxh3_128()
        kept = {key: value for key, value in self.settings.items() if key not in _VOLATILE}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        if self._local is None:
            digest.update(self.path.encode())
            return digest.hexdigest()
        for path in sorted(path for ending in _WEIGHTS for path in self._local.glob(ending)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(file.read())
        return digest.hexdigest()

    def require_causal(self) -> None:
        """Raise ConfigError if it is no causal language model."""
        if not self.architecture.endswith(("ForCausalLM", "LMHeadModel")):
            raise self._of_wrong_kind("a causal language model (...ForCausalLM)")

    def require_scores(self) -> None:
        """Raise ConfigError if it is no sequence classifier of one label."""
        own_code = self._trusts_code and _REMOTE_CLASSIFIER in (self.settings.get("auto_map") or {})
        if not self.architecture.endswith("ForSequenceClassification") and not own_code:
            raise self._of_wrong_kind("a sequence classifier (...ForSequenceClassification)")
        if self.labels != 1:
            raise ConfigError(
                f"{self.key}: found {self.labels} labels in {self.path} (id2label, num_labels); expected 1, "
                "whose logit is the score"
            )

    def _number(self, keys: Sequence[str]) -> int | None:
        """The first of ``keys`` that config.json, or its part about text, has a number for."""
        for block in (self.settings, self.settings.get("text_config") or {}):
            for key in keys:
                if isinstance(block.get(key), int):
                    return int(block[key])
        return None

    def _of_wrong_kind(self, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.key}: found the architecture {self.architecture or '(none)'} in {self.path}; expected "
            f"{expected}"
        )

    @cached_property
    def _local(self) -> Path | None:
        """The folder; None for a name on the hub. Raises ConfigError for what can be neither."""
        path = self.path
        place = self._folder / path
        if place.is_dir():
            return place
        if place.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
            state = "a file" if place.exists() else "no such folder"
            raise ConfigError(f"{self.key}: found {state} at {place}; expected a Hugging Face folder")
        return None

    def _hub_file(self, file: str) -> Path:
        """A file on the hub, or in its local cache. Raises ConfigError if it is in neither."""
        name, key = self.path, self.key
        offline = hub_is_offline()
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(name, file, local_files_only=offline))
        except Exception as error:
            # No such name, no access, not in the cache: the library has a kind of its own for each.
            if offline:
                raise ConfigError(
                    f"{key}: found neither a folder {name!r} nor a model of that name in the hub's local "
                    f"cache, and the hub at {endpoint()} cannot be reached or is switched off; expected one "
                    f"of these: connect, or set {key} to a Hugging Face folder"
                ) from error
            raise ConfigError(
                f"{key}: found neither a folder {name!r} nor a model of that name on the hub: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error


def model_fingerprints(config: Config, folder: Path | None = None) -> dict[str, str]:
    """Fingerprints of the models that ``config`` starts from, by key; none for one that a run makes.

    Relative paths are taken from ``folder`` (default: the current one). Raises ConfigError.
    """
    paths = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if config.has_critic else None,
        "reference.path": config.reference.path if config.algorithm.needs_reference else None,
    }
    trusts = config.model.trust_remote_code
    return {
        key: ModelFiles(path, folder or Path.cwd(), key, trust_remote_code=trusts).fingerprint
        for key, path in paths.items()
        if path is not None
    }
