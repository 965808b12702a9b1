"""The interface that leads to a peer."""

from __future__ import annotations

import psutil

from asyncrl.network import interface_towards, own_address


def test_the_way_to_loopback_is_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    name = interface_towards("127.0.0.1")
    assert name is not None
    assert any(entry.address == "127.0.0.1" for entry in psutil.net_if_addrs()[name])
