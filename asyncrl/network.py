"""Which of its addresses a machine talks to another one from; nothing is sent to find out."""

from __future__ import annotations

import socket

import psutil


def own_address(peer: str) -> str:
    """This machine's address on the route to ``peer``: on the way to loopback, loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def interface_towards(peer: str) -> str | None:
    """The name of the interface on the route to ``peer``; None where no interface has that address."""
    address = own_address(peer)
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in found):
            return str(name)
    return None
