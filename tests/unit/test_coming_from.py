"""The pages for those who come from other trainers: their files are real, and their keys exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.check import validate
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.sections.base import Section
from tests.unit.test_check import saved_model

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.stem.removeprefix("coming-from-") for path in DOCS.glob("coming-from-*.md"))
FILE = re.compile(r"^`([\w.]+)`[^\n]*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)`")
SMALL = ("generators.backend=torch", "generators.replicas=1", "learner.ranks=1")


def page(name: str) -> str:
    return (DOCS / f"coming-from-{name}.md").read_text()


def written(name: str, folder: Path) -> list[str]:
    """The files of a page, in ``folder``."""
    files = FILE.findall(page(name))
    for path, text in files:
        (folder / path).write_text(text)
    return [path for path, _ in files]


def chat_model(folder: Path) -> str:
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = (
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    )
    return saved_model(folder, tokenizer=tokenizer, max_position_embeddings=4096)


def test_there_is_a_page_for_each() -> None:
    assert PAGES == ["openrlhf", "trl", "verifiers", "verl"]


@pytest.mark.parametrize("name", PAGES)
def test_both_files_can_be_read_and_every_key_exists(tmp_path: Path, name: str) -> None:
    files = written(name, tmp_path)
    assert "run.yaml" in files
    for path in files:
        if path.endswith(".py"):
            ast.parse((tmp_path / path).read_text())
        elif path.endswith(".yaml"):
            parse_config(yaml.safe_load((tmp_path / path).read_text()))
        elif path.endswith(".sh"):
            subprocess.run(["sh", "-n", path], cwd=tmp_path, check=True)
        elif path.endswith(".toml"):
            import tomllib

            tomllib.loads((tmp_path / path).read_text())
    ours = [row.split("|")[2] for row in page(name).splitlines() if row.startswith("| ")]
    keys = [key for cell in ours for key in KEY.findall(cell)]
    assert len(keys) > 10
    for key in keys:
        assert exists(key), key


def exists(key: str) -> bool:
    section: type[Section] | None = Config  # type: ignore[assignment]
    for name in key.split("."):
        if section is None or name not in section.model_fields:
            return False
        section = next((kind for kind in kinds(section.model_fields[name].annotation)), None)
    return True


def kinds(hint: object) -> list[type[Section]]:
    import typing

    if isinstance(hint, type) and hasattr(hint, "model_fields"):
        return [hint]  # type: ignore[list-item]
    return [kind for part in typing.get_args(hint) for kind in kinds(part)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("trl", "run.yaml"),
        ("trl", "game.yaml"),
        ("verl", "run.yaml"),
        ("openrlhf", "run.yaml"),
        ("verifiers", "run.yaml"),
    ],
)
def test_asyncrl_check_passes_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, config: str
) -> None:
    if name == "verifiers" and importlib.util.find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed: make test-environments")
    monkeypatch.chdir(tmp_path)
    written(name, tmp_path)
    if name == "verifiers":
        subprocess.run([sys.executable, "rows.py"], cwd=tmp_path, check=True, capture_output=True)
    model = chat_model(tmp_path)
    values = yaml.safe_load((tmp_path / config).read_text())
    plan = validate(parse_config(values, (f"model.path={model}", *SMALL)), tmp_path)
    functions = values.get("reward", {}).get("functions", [])
    assert (plan.score is None) == (not functions)
    if config == "game.yaml":
        assert "Guess the number." in plan.prompts.train.task(0).prompt, "its tools are shown"
