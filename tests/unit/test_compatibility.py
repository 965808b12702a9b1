"""What of a config may change over a resume, and what is refused before anything is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.checkpoint.compatibility import Origin, changes, is_sampled_anew, require_compatible
from asyncrl.checkpoint.state import RunState
from asyncrl.errors import ConfigError
from asyncrl.model_files import model_fingerprints

from .controller_harness import config
from .resume_harness import state_at

KL = "algorithm.kl=loss"
MOVING = (KL, "reference.refresh_every=2")
GAE = "algorithm.advantage=gae"
OF = Origin("data", {"model.path": "a"})
STATE = state_at(4, models={"model.path": "a"})


def go_on(
    folder: Path,
    before: tuple[str, ...],
    after: tuple[str, ...],
    origin: Origin = OF,
    state: RunState = STATE,
) -> bool:
    """Whether ready groups would be kept. Raises ConfigError."""
    now = config(*after)
    changed = changes(config(*before).model_dump(mode="json"), now)
    require_compatible(folder, state, changed, now, origin)
    return not is_sampled_anew(changed)


@pytest.mark.parametrize(
    ("before", "after", "keeps_ready"),
    [
        ((), ("learner.ranks=2", "learner.zero_stage=3"), True),
        ((), ("learner.lr=1.0e-3", "run.steps=7", "eval.every=3", "generators.replicas=2"), True),
        ((), ("placement.mode=colocated", "schedule.pipeline_depth=0", "schedule.max_staleness=0"), False),
        ((), ("model.dtype=bfloat16",), False),
        ((), ("rollout.groups_per_step=4", "rollout.group_size=4"), False),
        ((), ("reward_model.path=judge",), False),
        # A reference that never moved is the start model, wherever it is and whenever it begins.
        ((), (KL,), False),
        ((KL,), (), False),
        ((KL,), (KL, "reference.place=learner"), False),
        ((KL, "reference.place=learner"), MOVING, False),
    ],
)
def test_what_may_change(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...], keeps_ready: bool
) -> None:
    assert go_on(tmp_path, before, after) is keeps_ready


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((), ("run.seed=1",), r"run\.seed: found 1, the checkpoint was made with 0"),
        ((), ("run.steps=3",), r"run\.steps: found 3, the checkpoint is at policy version 4"),
        ((), ("learner.lora.rank=4",), r"learner\.lora\.rank: found 4, the checkpoint was made with None"),
        (("learner.lora.rank=4",), (), r"learner\.lora\.rank: found None, the checkpoint was made with 4"),
        (
            ("learner.lora.rank=4",),
            ("learner.lora.rank=4", "learner.lora.alpha=8"),
            r"learner\.lora\.alpha: found 8\.0, the checkpoint was made with 32\.0",
        ),
        ((), (GAE,), "found gae, but the checkpoint holds no critic"),
    ],
)
def test_what_may_not(tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        go_on(tmp_path, before, after)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        go_on(tmp_path, (), ("run.seed=1", "run.steps=3"), Origin("other", {"model.path": "b"}))
    for key in ("run.seed", "run.steps", "data.train", "model.path"):
        assert f"  {key}: " in str(caught.value)


@pytest.mark.parametrize("place", ["actors", "learner"])
def test_a_reference_that_followed_the_policy_stays_what_it_is(tmp_path: Path, place: str) -> None:
    (tmp_path / ("reference" if place == "actors" else "learner/reference")).mkdir(parents=True)
    before = (*MOVING, f"reference.place={place}")
    other = "learner" if place == "actors" else "actors"
    with pytest.raises(ConfigError, match=f"reference.place: found '{other}'.*expected place {place}"):
        go_on(tmp_path, before, (*MOVING, f"reference.place={other}"))
    with pytest.raises(ConfigError, match=r"reference\.refresh_every: found 0"):
        go_on(tmp_path, before, (KL, f"reference.place={place}"))
    go_on(
        tmp_path, before, (KL, "reference.refresh_every=4", "reference.ema=0.5", f"reference.place={place}")
    )
    go_on(tmp_path, before, ())  # without one it is let go


def test_other_models_are_refused_where_their_weights_come_from_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: found 'none', which is not the model of the check"):
        go_on(tmp_path, (), (), Origin("data", {"model.path": "b"}))
    critic = (GAE, "critic.path=value")
    other = Origin("data", {"model.path": "a", "critic.path": "c"})
    (tmp_path / "critic").mkdir()
    with pytest.raises(ConfigError, match=r"critic\.path: found 'value'.*fingerprint c, expected None"):
        go_on(tmp_path, (GAE,), critic, other)
    go_on(tmp_path, critic, critic, other, replace(STATE, models=other.models))
    referred = Origin("data", {"model.path": "a", "reference.path": "d"})
    go_on(tmp_path, (KL,), (KL, "reference.path=teacher"), referred)
    (tmp_path / "reference").mkdir()
    with pytest.raises(ConfigError, match=r"reference\.path: found 'teacher'"):
        go_on(tmp_path, MOVING, (*MOVING, "reference.path=teacher"), referred)


def save_model(folder: Path, *, width: int = 4, value: float = 0.0, version: str = "5.19.0") -> Path:
    folder.mkdir()
    settings = {"architectures": ["LlamaForCausalLM"], "hidden_size": width, "transformers_version": version}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({"weight": torch.full((width, width), value)}, folder / "model.safetensors")
    return folder


def test_a_model_is_known_by_its_files_wherever_they_are(tmp_path: Path) -> None:
    def fingerprint(folder: Path) -> str:
        return model_fingerprints(config(f"model.path={folder}"))["model.path"]

    first = fingerprint(save_model(tmp_path / "first"))
    assert len(first) == 32
    assert fingerprint(save_model(tmp_path / "moved", version="5.20.0")) == first
    assert fingerprint(save_model(tmp_path / "wider", width=8)) != first
    assert fingerprint(save_model(tmp_path / "trained", value=0.5)) != first
