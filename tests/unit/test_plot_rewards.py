"""The picture of rewards: what it reads from a run folder, and that a PNG comes out."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_script() -> ModuleType:
    file = Path(__file__).parents[2] / "scripts" / "plot_rewards.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "quick"
    folder.mkdir(parents=True)
    lines = [{"step": 0, "eval/reward_mean": 0.1}]
    lines += [{"step": i, "reward/mean": i / 10} for i in range(1, 5)]
    lines[-1]["eval/reward_mean"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_training_and_evaluation_are_told_apart(run: Path) -> None:
    curve = script.read_curve(run)
    assert (curve.name, curve.steps, curve.rewards) == ("quick", (1, 2, 3, 4), (0.1, 0.2, 0.3, 0.4))
    assert (curve.eval_steps, curve.eval_rewards) == ((0, 4), (0.1, 0.5))


def test_means_look_back_and_never_ahead() -> None:
    assert script.trailing_means([1.0, 0.0, 2.0, 6.0], 2) == [1.0, 0.5, 1.0, 4.0]
    assert script.trailing_means([1.0, 0.0], 1) == [1.0, 0.0]


def test_a_picture_of_two_runs(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "only-eval").mkdir()
    (tmp_path / "only-eval" / "metrics.jsonl").write_text('{"step": 0, "eval/reward_mean": 0.2}\n')
    output = tmp_path / "out.png"
    assert script.main([str(run), str(tmp_path / "only-eval"), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("text", "message"), [(None, "found no"), ('{"step": 0}\n', "none with a reward")])
def test_folders_with_nothing_to_draw(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit) as caught:
        script.main([str(tmp_path)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
