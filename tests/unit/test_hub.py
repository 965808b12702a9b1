"""What happens when the Hugging Face hub does not answer: said quickly, at once, with the way out."""

from __future__ import annotations

import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.check import validate
from asyncrl.config_load import parse_config
from asyncrl.errors import UsageError
from asyncrl.hub import hub_is_offline


@pytest.fixture(autouse=True)
def untouched_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test switches off is on again after it."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "")  # remembers what was there, or that nothing was


@pytest.fixture
def silent_port() -> int:
    """A port of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def refusing_port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_hub_that_does_not_answer_is_switched_off_for_all_that_follows(
    monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_port}")
    assert hub_is_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_refusal_is_an_answer(monkeypatch: pytest.MonkeyPatch, refusing_port: int) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{refusing_port}")
    assert not hub_is_offline()
    assert os.environ["HF_HUB_OFFLINE"] == ""


def test_a_user_who_switched_it_off_is_believed_without_a_look(
    monkeypatch: pytest.MonkeyPatch, refusing_port: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{refusing_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_is_offline()


def test_a_silent_server_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        start = time.monotonic()
        assert hub_is_offline(timeout_s=0.2)
        assert time.monotonic() - start < 5


def test_model_and_data_that_cannot_be_had_are_named_together(
    monkeypatch: pytest.MonkeyPatch, silent_port: int, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_port}")
    config = parse_config(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": "no-such/model"},
            "data": {"train": {"hub": "no-such/rows", "hub_config": "main"}},
            "reward": {"functions": ["exact_match"]},
        }
    )
    with pytest.raises(UsageError) as caught:
        validate(config, tmp_path)
    model, data = str(caught.value).split("\n", 1)
    assert "model.path: found neither a folder 'no-such/model'" in model
    assert "set model.path to a Hugging Face folder" in model
    assert "hub data set 'no-such/rows' (configuration main, split 'train')" in data
    assert ".jsonl or .parquet" in data
