"""Which network interface leads to the other ranks, where a host's own name does not say so."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def name_gloo_interface(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set GLOO_SOCKET_IFNAME where gloo would listen on a loopback address that no other host can reach.

    gloo takes the address that the host's own name stands for, and many distributions write 127.0.1.1 beside that name.
    The interface is then the one from which MASTER_ADDR is reached. What the user has set stays.
    """
    master = environment.get("MASTER_ADDR", "")
    if environment.get(GLOO_INTERFACE) or not master or not _is_loopback(socket.gethostname()):
        return None
    address = address_towards(master)
    interface = None if address is None or _is_loopback(address) else _interface_of(address)
    if interface is not None:
        environment[GLOO_INTERFACE] = interface
    return interface


def address_towards(host: str) -> str | None:
    """This host's address on the way to `host`; None when there is no way. Nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def _is_loopback(host: str) -> bool:
    """Whether gloo would end up on the loopback interface with this name; it also does where a name is unknown."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError, UnicodeError):
        return True


def _interface_of(address: str) -> str | None:
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            return str(name)
    return None
