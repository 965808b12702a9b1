"""What is read of a model's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from asyncrl.model_files import load_tokenizer
from asyncrl.models.tokenizer import character_tokenizer


def save(folder: Path, kind: str) -> None:
    character_tokenizer(64).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))


def test_a_plain_tokenizer_is_the_same_and_is_loaded_without_torch(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    script = (
        "import sys; from pathlib import Path; from asyncrl.model_files import load_tokenizer; "
        "load_tokenizer(Path(sys.argv[1]), trust_remote_code=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    ours = load_tokenizer(tmp_path, trust_remote_code=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    for text in ("1 + 2 =", "<eos> é", ""):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]


def test_any_other_is_that_of_the_library(tmp_path: Path) -> None:
    save(tmp_path, "qwen2")
    ours = load_tokenizer(tmp_path, trust_remote_code=False)
    assert type(ours) is type(AutoTokenizer.from_pretrained(tmp_path))
