"""A learner goes on from its saved state: to the bit on as many ranks, and closely on another number."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.checkpoint.files import measure
from asyncrl.config import AlgorithmSection, ReferenceSection
from asyncrl.errors import CheckpointError
from asyncrl.learners.deepspeed_import import import_deepspeed
from asyncrl.learners.state_files import SavedState
from tests.e2e.deepspeed_worker import run_ranks
from tests.e2e.state_worker import resume, train_and_save
from tests.e2e.tiny_policy import save_tiny_policy

SAVED, END = 3, 6
Setup = tuple[str, int, int, str]
SETUPS: list[Setup] = [
    ("deepspeed", 0, 2, "float32"),
    ("deepspeed", 2, 1, "float32"),
    ("deepspeed", 3, 2, "float32"),
    ("fsdp2", 3, 2, "float32"),
    ("deepspeed", 2, 2, "bfloat16"),
    ("deepspeed", 3, 2, "bfloat16"),
    ("fsdp2", 2, 2, "bfloat16"),
]
"""Backend, ZeRO stage, ranks, dtype."""


def options_of(setup: Setup) -> dict[str, Any]:
    return dict(zip(("backend", "stage", "ranks", "dtype"), setup, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("state") / "model")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[Setup, list[dict[str, Any]]]:
    """Runs that saved their state on the way, and went on as if they had not."""
    return {
        setup: run_ranks(
            train_and_save,
            folder,
            **options_of(setup),
            end=END,
            save_at=SAVED,
            target=saved_by(folder, setup),
        )
        for setup in SETUPS
    }


def saved_by(folder: Path, setup: Setup) -> Path:
    return folder.parent / "-".join(map(str, setup))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_equal_ranks_go_on_to_the_bit(
    folder: Path, undisturbed: dict[Setup, list[dict[str, Any]]], setup: Setup
) -> None:
    source = saved_by(folder, setup)
    found = run_ranks(resume, folder, **options_of(setup), start=SAVED, end=END, source=source)
    for expected, resumed in zip(undisturbed[setup], found, strict=True):
        assert resumed["norms"] == expected["norms"][SAVED:]
        assert resumed["digests"] == expected["digests"][SAVED:], "masters, moments and counts, to the bit"
        for entry in expected["files"]:
            assert measure(source, entry.path) == entry


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("deepspeed", 2, 1), ("deepspeed", 2, 2)),
        (("deepspeed", 3, 2), ("deepspeed", 2, 1)),
        (("deepspeed", 2, 1), ("fsdp2", 3, 2)),
        (("fsdp2", 3, 2), ("deepspeed", 3, 2)),
        (("fsdp2", 3, 2), ("fsdp2", 2, 1)),
    ],
    ids=str,
)
def test_another_engine_stage_and_number_of_ranks_go_on_closely(
    folder: Path,
    undisturbed: dict[Setup, list[dict[str, Any]]],
    before: tuple[str, int, int],
    after: tuple[str, int, int],
) -> None:
    setup = (*before, "float32")
    source = saved_by(folder, setup)
    options = options_of((*after, "float32"))
    found, *_ = run_ranks(resume, folder, **options, start=SAVED, end=END, source=source)
    expected = undisturbed[setup][0]
    np.testing.assert_allclose(found["norms"], expected["norms"][SAVED:], rtol=1e-4)
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=1e-5)


def test_the_files_are_plain_safetensors_under_the_models_names(
    folder: Path, undisturbed: dict[Setup, list[dict[str, Any]]]
) -> None:
    tensors = load_file(saved_by(folder, SETUPS[1]) / "rank-00000-of-00001.safetensors")
    for name, parameter in undisturbed[SETUPS[1]][0]["parameters"].items():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert tensors[f"{kind}/{name}"].numel() == parameter.size
    # Before any of those steps a weight was elsewhere: what is saved is step SAVED's, not the last one's.
    name = "model.norm.weight"
    last = undisturbed[SETUPS[1]][0]["parameters"][name]
    assert 0 < np.abs(tensors[f"weight/{name}"].numpy() - last).max() < 0.01


def test_every_way_of_saving_holds_the_same_parameters(
    folder: Path, undisturbed: dict[Setup, list[dict[str, Any]]]
) -> None:
    first, *others = [SavedState(saved_by(folder, s)) for s in undisturbed if s[3] == "float32"]
    for other in others:
        assert other.parameters == first.parameters
        for name in first.parameters:
            np.testing.assert_allclose(other.read("weight", name), first.read("weight", name), atol=1e-5)
        with pytest.raises(CheckpointError, match=r"1 trained tensors differ, the first is new\.weight"):
            other.require({n: p.shape for n, p in other.parameters.items()} | {"new.weight": (2,)})


def test_weights_alone_are_the_policys_and_nothing_else(
    folder: Path, undisturbed: dict[Setup, list[dict[str, Any]]]
) -> None:
    for setup, ranks in undisturbed.items():
        saved = SavedState(saved_by(folder, setup) / "weights")
        assert saved.parameters.keys() == ranks[0]["parameters"].keys()
        assert {parameter.updates for parameter in saved.parameters.values()} == {0}, "no moments"
        for name, parameter in ranks[0]["parameters"].items():
            # Masters: rounded to what the model computes in, they are its parameters.
            found = saved.read("weight", name).to(getattr(torch, setup[-1])).float()
            np.testing.assert_array_equal(found.view(parameter.shape).numpy(), parameter)


@pytest.mark.parametrize("setup", SETUPS[1:3], ids=str)
def test_what_deepspeed_saved_itself_can_be_imported(
    folder: Path, undisturbed: dict[Setup, list[dict[str, Any]]], setup: Setup
) -> None:
    source, target = saved_by(folder, setup) / "deepspeed", saved_by(folder, setup) / "imported"
    import_deepspeed(source, target, str(folder), trust_remote_code=False)
    imported = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
    for name, parameter in undisturbed[setup][0]["parameters"].items():
        np.testing.assert_array_equal(imported[name].detach().numpy(), parameter)
    with pytest.raises(CheckpointError, match="is there already"):
        import_deepspeed(source, target, str(folder), trust_remote_code=False)
    with pytest.raises(CheckpointError, match="found no file 'latest'"):
        import_deepspeed(saved_by(folder, setup), target / "other", str(folder), trust_remote_code=False)


@pytest.mark.parametrize("damage", ["cut off", "no pickle at all", "empty"])
def test_what_is_damaged_of_deepspeeds_files_is_refused_by_their_folder(
    folder: Path, undisturbed: dict[Setup, list[dict[str, Any]]], tmp_path: Path, damage: str
) -> None:
    source = Path(shutil.copytree(saved_by(folder, SETUPS[1]) / "deepspeed", tmp_path / "damaged"))
    for file in source.rglob("*.pt"):
        whole = file.read_bytes()
        file.write_bytes({"cut off": whole[:-300], "no pickle at all": b"\x80\x04no", "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=r"DeepSpeed cannot read .*damaged"):
        import_deepspeed(source, tmp_path / "imported", str(folder), trust_remote_code=False)
    assert not (tmp_path / "imported").exists()


def test_a_reference_in_the_learner_goes_on_too(folder: Path) -> None:
    settings: dict[str, Any] = {
        "learns": AlgorithmSection.model_validate({"kl": "loss", "kl_coef": 1.0}),
        "reference": ReferenceSection(place="learner", refresh_every=2, ema=0.5),
    }
    target = folder.parent / "with-reference"
    saved = run_ranks(
        train_and_save, folder, stage=3, ranks=2, end=END, save_at=SAVED, target=target, **settings
    )
    assert {e.path for r in saved for e in r["files"] if e.path.startswith("reference/")} == {
        "reference/version.json",
        *(
            f"reference/rank-0000{rank}-of-00002.{end}"
            for rank in range(2)
            for end in ("json", "safetensors")
        ),
    }
    again = run_ranks(resume, folder, stage=3, ranks=2, start=SAVED, end=END, source=target, **settings)
    for before, after in zip(saved, again, strict=True):
        assert after["digests"] == before["digests"][SAVED:]
    (alone,) = run_ranks(resume, folder, stage=2, ranks=1, start=SAVED, end=END, source=target, **settings)
    np.testing.assert_allclose(alone["norms"], saved[0]["norms"][SAVED:], rtol=1e-4)
