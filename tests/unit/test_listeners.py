"""What listens: real processes with real sockets, told apart as doctor tells them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.doctor import listening
from asyncrl.listeners import Listener, described, find_listeners
from asyncrl.sentinel import MARK

CODE = """
import socket, sys
opened = []
for address in sys.argv[1:]:
    opened.append(socket.create_server((address, 0)))
print(*(s.getsockname()[1] for s in opened), flush=True)
sys.stdin.read()
"""


@contextmanager
def process(
    file: Path, *addresses: str, title: str = sys.executable, **environment: str
) -> Iterator[tuple[int, list[int]]]:
    """One that listens on these addresses until the block is left: its pid and its ports."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(CODE)
    clean = {key: value for key, value in os.environ.items() if key not in (MARK, "RAY_AUTH_MODE")}
    child = subprocess.Popen(
        [title, str(file), *addresses],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, **environment},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.pid, [int(port) for port in child.stdout.readline().split()]
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait()


def of(pid: int) -> list[Listener]:
    return [socket for socket in find_listeners().sockets if socket.pid == pid]


def test_ours_are_found_with_the_addresses_that_they_are_on(tmp_path: Path) -> None:
    with process(tmp_path / "worker.py", "127.0.0.1", "0.0.0.0", **{MARK: "x"}) as (pid, ports):
        found = {socket.port: socket for socket in of(pid)}
        assert set(found) == set(ports)
        inside, outside = (found[port] for port in ports)
        assert (inside.address, inside.is_loopback) == ("127.0.0.1", True)
        assert (outside.address, outside.is_loopback) == ("0.0.0.0", False)
        assert outside.guard is None
        assert "worker.py" in outside.process
        (line,) = described([outside])
        assert line == f"0.0.0.0 port {ports[1]}: {outside.process} (pid {pid})"
        findings = {finding.found: finding for finding in listening()}
        (warned,) = (finding for text, finding in findings.items() if text.startswith(line))
        assert warned.status == "warn"
        assert "beyond loopback" in warned.found
        assert "no guard of it is known" in warned.found


@pytest.mark.parametrize(("mode", "guard"), [("token", "Ray's token"), ("disabled", None), ("", None)])
def test_rays_are_guarded_where_authentication_is_on(tmp_path: Path, mode: str, guard: str | None) -> None:
    environment = {"RAY_AUTH_MODE": mode} if mode else {}
    file = tmp_path / "site-packages" / "ray" / "worker.py"
    with process(file, "0.0.0.0", "127.0.0.1", **environment) as (pid, ports):
        found = {socket.port: socket for socket in of(pid)}
        assert found[ports[0]].guard == guard
        # Of a single address: a process group, which asks nobody.
        assert found[ports[1]].guard is None
        (finding,) = (f for f in listening() if f"port {ports[0]}:" in f.found)
        assert finding.status == ("ok" if guard else "warn")
        assert bool(finding.remedy) is (guard is None)


def test_rays_agents_are_guarded_on_any_address_and_its_workers_on_all_of_them_alone(tmp_path: Path) -> None:
    for title, guard in (("ray::RuntimeEnvAgent", "Ray's token"), ("ray::LearnerActor", None)):
        with process(tmp_path / "a.py", "127.0.0.1", title=title, RAY_AUTH_MODE="token") as (pid, _):
            (found,) = of(pid)
            assert found.guard == guard


def test_strangers_are_none_of_its_business(tmp_path: Path) -> None:
    with process(tmp_path / "stranger.py", "0.0.0.0") as (pid, _):
        parents_are_ours = MARK in os.environ
        assert parents_are_ours or of(pid) == []
