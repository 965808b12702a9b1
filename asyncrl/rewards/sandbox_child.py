"""The child of ``sandbox``: gives up everything that it may not do, then becomes the program.

``python -I -S sandbox_child.py LIMITS PARENT``, with the program as ``../program.py`` of its working
directory. It imports nothing of asyncrl. In this order, each one staying over the exec:

1. dies with its parent (prctl);
2. a network namespace of its own, and its folder on a file system of limited size (unshare, mount): where the
   kernel allows them, for the filters below forbid sockets and bound each file without them;
3. limits (setrlimit), no capabilities (capset), no new privileges (prctl);
4. files (Landlock): all access beneath the folder, reading where Python is, nothing else;
5. system calls (seccomp): no process, thread, socket, signal to others, trace, mount, or change of mode,
   owner and times, which Landlock does not cover.

Invariant: whatever of 3 to 5 cannot be had ends the child with ``REFUSED`` before the program begins.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig

REFUSED = 113

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000
_EPERM, _ENOSYS = 1, 38

# Landlock, by the version of its interface that brought them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_FS_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_READING = 0b1101  # execute, read files, read folders
_NET_RIGHTS, _SCOPES = 0b11, 0b11

# Denied system calls by name: number on x86-64, on arm64; -1 where there is none.
_DENIED = {
    "fork": (57, -1),
    "clone": (56, 220),
    "vfork": (58, -1),
    "socket": (41, 198),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),  # would reach sockets past this filter
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),  # stays when its maker is gone, as do the next three
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "lchown": (94, -1),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
}
_CLONE3, _TGKILL, _PRLIMIT64 = (435, 435), (234, 131), (302, 261)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Instructions of the filter language.
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


class Refused(Exception):
    """Something that has to be given up cannot be."""


def main() -> None:
    limits, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    _require(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(REFUSED)
    with open("../program.py", "rb") as file:
        program = file.read()
    home = os.getcwd()
    _separate(home, limits["file_mb"])
    os.chdir(home)  # into the new file system, where there is one
    with open("program.py", "wb") as file:
        file.write(program)
    _limit(limits)
    _drop_capabilities()
    _require(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _confine_files(home)
    _filter_calls()
    os.execv(sys.executable, [sys.executable, "-I", "program.py"])


def _separate(home: str, size_mb: int) -> None:
    """Namespaces of its own, as far as this kernel allows: nothing here has to succeed."""
    spaces = _CLONE_NEWNET | _CLONE_NEWNS
    uid, gid = os.getuid(), os.getgid()
    if _LIBC.unshare(spaces) != 0:
        if _LIBC.unshare(spaces | _CLONE_NEWUSER) != 0:
            return
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:
        options = f"size={size_mb}m,mode=700".encode()
        _LIBC.mount(b"tmpfs", home.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _limit(limits: dict[str, float]) -> None:
    seconds = math.ceil(limits["time_s"])
    for name, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, int(limits["memory_mb"]) << 20),
        (resource.RLIMIT_FSIZE, int(limits["file_mb"]) << 20),
        (resource.RLIMIT_NOFILE, int(limits["open_files"])),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(name, (value, value))


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _require(_LIBC.capset(header, bytes(24)), "capset")


def _confine_files(home: str) -> None:
    version = _LIBC.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise Refused(
            "found a kernel without Landlock; expected Linux 5.13 or newer, with Landlock switched on"
        )
    rights = sum(bits for since, bits in _FS_RIGHTS.items() if since <= version)
    fields = [rights]
    if version >= 4:
        fields.append(_NET_RIGHTS)
    if version >= 6:
        fields.append(_SCOPES)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = _require(
        _LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset"
    )
    _allow_beneath(rules, home, rights)
    for path in _readable():
        if os.path.isdir(path):
            _allow_beneath(rules, path, rights & _READING)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        _allow_beneath(rules, device, rights & 0b110)  # write and read a file
    _require(_LIBC.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")


def _readable() -> set[str]:
    """Where Python and the system's libraries are."""
    environment = os.path.dirname(os.path.dirname(sys.executable))
    own = {environment, sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    own |= {os.path.realpath(path) for path in own} | {os.path.dirname(os.path.realpath(sys.executable))}
    return {"/usr", "/lib", "/lib64", "/etc", *own} - {"/"}


def _allow_beneath(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _require(
        _LIBC.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0), f"landlock rule of {path}"
    )
    os.close(place)


def _filter_calls() -> None:
    if platform.machine() not in _MACHINES:
        raise Refused(f"found a {platform.machine()} processor; expected one of {', '.join(_MACHINES)}")
    column, architecture = _MACHINES[platform.machine()]
    code = _program(column, architecture, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _require(_LIBC.prctl(_PR_SET_SECCOMP, 2, filter_, 0, 0), "PR_SET_SECCOMP")


def _program(column: int, architecture: int, pid: int) -> bytes:
    """The filter, in the kernel's classic packet language; offsets are those of its ``seccomp_data``."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    deny = step(_RETURN, _ERRNO | _EPERM)
    steps = [
        step(_LOAD, 4),
        step(_EQUAL, architecture, 1, 0),
        step(_RETURN, _KILL),
        step(_LOAD, 0),
        step(_AT_LEAST, 0x40000000, 0, 1),  # x86-64: the calls of its other interface
        deny,
        step(_EQUAL, _CLONE3[column], 0, 1),
        step(_RETURN, _ERRNO | _ENOSYS),  # libraries then fall back to clone
    ]
    for numbers in _DENIED.values():
        if numbers[column] >= 0:
            steps += [step(_EQUAL, numbers[column], 0, 1), deny]
    # To itself it may send signals, as abort() does, and it may look at its own limits.
    for number, target in ((_TGKILL[column], pid), (_PRLIMIT64[column], 0)):
        steps += [
            step(_EQUAL, number, 0, 4),
            step(_LOAD, 16),  # the first argument
            step(_EQUAL, target, 1, 0),
            deny,
            step(_RETURN, _ALLOW),
        ]
    steps.append(step(_RETURN, _ALLOW))
    return b"".join(steps)


def _require(result: int, what: str) -> int:
    if result < 0:
        raise Refused(f"{what} failed: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    try:
        main()
    except (Refused, OSError) as error:
        os.write(2, f"{error}\n".encode())
        os._exit(REFUSED)
