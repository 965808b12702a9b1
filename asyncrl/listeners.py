"""What listens on this machine for Ray and for asyncrl, who can reach it, and what guards it.

Invariants:
- Only what the system says is reported: a socket whose process may not be looked at is left out, and counted.
- A process is Ray's or ours if it, or one that it descends from, is; of the others nothing is said.
- What bears no sign of a guard counts as having none.

Of a Ray worker or a controller, the socket on all interfaces is Ray's own service, which asks for the token
where authentication is on; one on a single address may be that of a process group or its store, which ask
nobody. Ray's agents ask for it wherever they listen.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from asyncrl.sentinel import MARK

_AUTH_MODE = "RAY_AUTH_MODE"
_RAY_NAMES = ("raylet", "gcs_server")
_RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that takes connections."""

    address: str
    port: int
    pid: int
    process: str
    """The first words of its command line."""
    guard: str | None
    """What a stranger who reaches it is asked for; None: nothing."""

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True)
class Listening:
    """All of them."""

    sockets: tuple[Listener, ...]
    hidden: int
    """Listening sockets of this machine whose processes may not be looked at."""


def find_listeners() -> Listening:
    """Those of now, by process and port. Raises psutil.AccessDenied where the system shows none."""
    sockets, hidden = [], 0
    for found in psutil.net_connections("inet"):
        if found.status != psutil.CONN_LISTEN:
            continue
        try:
            family = _family(found.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            hidden += 1
            continue
        if any(map(_is_rays, family)) or any(map(_is_ours, family)):
            address, port = found.laddr[:2]
            everywhere = ipaddress.ip_address(address).is_unspecified
            guard = _guard(family) if everywhere or _is_service(family[0]) else None
            sockets.append(Listener(address, port, found.pid, _title(family[0]), guard))
    return Listening(tuple(sorted(sockets, key=lambda s: (s.pid, s.port, s.address))), hidden)


def described(sockets: Iterable[Listener]) -> Iterator[str]:
    """A line for each process and address, with its ports."""
    ports: dict[tuple[str, int, str], list[str]] = {}
    for socket in sockets:
        ports.setdefault((socket.address, socket.pid, socket.process), []).append(str(socket.port))
    for (address, pid, process), of_it in ports.items():
        yield f"{address} port {', '.join(of_it)}: {process} (pid {pid})"


def _family(pid: int | None) -> list[psutil.Process]:
    """The process, and those that it descends from. AccessDenied for a socket of nobody."""
    if pid is None:
        raise psutil.AccessDenied
    process = psutil.Process(pid)
    return [process, *process.parents()]


def _is_rays(process: psutil.Process) -> bool:
    if process.name() in _RAY_NAMES:
        return True
    words = _words(process)[:3]
    return any(word.startswith("ray::") or "-packages/ray/" in word for word in words)


def _is_service(process: psutil.Process) -> bool:
    """Whether it is one of Ray's own, and no worker's."""
    return process.name() in _RAY_NAMES or any(word in _RAY_AGENTS for word in _words(process)[:1])


def _is_ours(process: psutil.Process) -> bool:
    if MARK in _environment(process):
        return True
    words = _words(process)[:3]
    return any(w.startswith("asyncrl.") or PurePath(w).parts[-2:] == ("bin", "asyncrl") for w in words)


def _guard(family: Iterable[psutil.Process]) -> str | None:
    """Ray tells its processes by their environment; a title may lie over that of some, not of all."""
    members = list(family)
    if not any(map(_is_rays, members)):  # a controller: of the session that it started
        members = [child for child in members[0].children() if _is_rays(child)]
    modes = (_environment(process).get(_AUTH_MODE) for process in members)
    mode = next((mode for mode in modes if mode is not None), "")
    return "Ray's token" if mode.lower() == "token" else None


def _title(process: psutil.Process) -> str:
    words = [PurePath(word).name or word for word in _words(process)[:2]]
    return " ".join(words)[:60] or str(process.name())


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}
