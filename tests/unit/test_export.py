"""A checkpoint's policy as a Hugging Face folder: the tensors that were trained, whatever was around them."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.checkpoint.files import write_file
from asyncrl.checkpoint.groups import READY
from asyncrl.checkpoint.state import CONFIG, LEARNER, STATE
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.config import Config, LoraSection
from asyncrl.config_load import dump_config, parse_config
from asyncrl.errors import CheckpointError
from asyncrl.export import config_of, export, find_checkpoint
from asyncrl.learners.lora import LoraAdapter
from asyncrl.learners.state_files import Part, write_state

from .controller_harness import BASE
from .resume_harness import state_at
from .tiny_models import VOCAB, tiny_llama

STATE_OF_STEP = state_at(1, kl_coefficient=0.0, data="")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_llama(tied=True).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


def save(
    store: CheckpointStore,
    step: int,
    config: Config,
    model: Any,
    *,
    learner: bool = True,
    weights_only: bool = False,
) -> Path:
    """What a learner of one rank writes of the model's trained parameters, and a controller beside it."""
    part = store.begin(step)
    trained = [(n, p.detach().float()) for n, p in model.named_parameters() if p.requires_grad]
    parts = [Part(name, tuple(p.shape), 0, p.numel(), 0) for name, p in trained]
    flat = ((f"weight/{name}", p.reshape(-1).contiguous()) for name, p in trained)
    entries = [write_file(part, CONFIG, dump_config(config).encode())]
    if learner:
        written = write_state(part / LEARNER, 0, 1, parts, flat)
        entries += [replace(e, path=f"{LEARNER}/{e.path}") for e in written]
    if not weights_only:
        state = replace(STATE_OF_STEP, step=step, learner=learner)
        entries += [write_file(part, STATE, state.encode()), write_file(part, READY, b"")]
    return store.seal(part, step, step, entries, weights_only=weights_only)


def test_the_export_is_what_was_trained(tmp_path: Path, model_path: Path) -> None:
    trained = tiny_llama(seed=7, tied=True)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = save(store, 1, parse_config(BASE), trained)
    export(folder, tmp_path / "hf", str(model_path))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "w1"
    with pytest.raises(CheckpointError, match="there already"):
        export(folder, tmp_path / "hf", str(model_path))


@pytest.mark.skipif(
    find_spec("peft") is None and os.environ.get("CI") != "true",
    reason="peft is not installed: pip install 'asyncrl[lora]'",
)
def test_adapters_are_merged_and_kept_beside(tmp_path: Path, model_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    adapter = LoraAdapter(model, LoraSection(rank=2, alpha=4))
    torch.manual_seed(0)
    for pair in adapter.pairs.values():
        pair.b.data.normal_(std=0.1)
    config = parse_config(BASE, ["learner.lora.rank=2", "learner.lora.alpha=4"])
    folder = save(CheckpointStore(tmp_path / "checkpoints"), 1, config, model)
    export(folder, tmp_path / "hf", str(model_path))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "hf" / "adapter" / "adapter_config.json").is_file()


def test_a_run_is_exported_as_its_best_version_whose_weights_were_kept_alone(
    tmp_path: Path, model_path: Path
) -> None:
    best = tiny_llama(seed=7, tied=True)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    save(store, 2, parse_config(BASE), best, weights_only=True)
    save(store, 3, parse_config(BASE), tiny_llama(seed=8, tied=True))
    assert find_checkpoint(tmp_path / "run") == store.path(3), "none is known to be the best"
    store.set_best(Best(2, 0.5))
    found = find_checkpoint(tmp_path / "run")
    assert found == store.weights_path(2)
    assert config_of(found) == parse_config(BASE)
    export(found, tmp_path / "hf", str(model_path))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in best.state_dict().items())


def test_a_runs_folder_stands_for_its_best_checkpoint_or_its_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        save(store, step, parse_config(BASE), tiny_llama())
    assert find_checkpoint(tmp_path) == store.path(3)
    store.set_best(Best(2, 0.5))
    assert find_checkpoint(tmp_path) == store.path(2)
    assert find_checkpoint(store.path(1)) == store.path(1)
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        find_checkpoint(tmp_path / "elsewhere")


def test_other_models_and_start_models_are_refused(tmp_path: Path, model_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    other = save(store, 1, parse_config(BASE), tiny_llama(kv_heads=1, tied=True))
    with pytest.raises(CheckpointError, match="is of another model: 4 trained tensors differ"):
        export(other, tmp_path / "hf", str(model_path))
    start = save(store, 2, parse_config(BASE), tiny_llama(tied=True), learner=False)
    with pytest.raises(CheckpointError, match="its policy is the start model"):
        export(start, tmp_path / "hf", str(model_path))
    assert not (tmp_path / "hf").exists()
