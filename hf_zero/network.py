"""Finds the network interface towards the other ranks if the host's own name does not resolve to it, and notices when a
process on another machine ends."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping, Sequence

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def name_gloo_interface(environment: MutableMapping[str, str] = os.environ, peers: Sequence[str] = ()) -> None:
    """Set GLOO_SOCKET_IFNAME if gloo would listen on a loopback address, which other hosts cannot reach.

    gloo uses the address that the host's own name resolves to, which many distributions set to 127.0.1.1.
    The chosen interface is the one towards MASTER_ADDR or one of the `peers`, or the only one.
    Does nothing for a job on a single host, or if the user has set the variable.
    """
    master = environment.get("MASTER_ADDR", "")
    if environment.get(GLOO_INTERFACE) or not master or _is_one_host(environment):
        return
    if not is_loopback(socket.gethostname()):
        return
    addresses = (address_towards(host) for host in (master, *peers))
    towards = next((address for address in addresses if address and not is_loopback(address)), None)
    interface = _interface_of(towards) if towards is not None else _only_interface()
    if interface is not None:
        environment[GLOO_INTERFACE] = interface


def address_towards(host: str) -> str | None:
    """Return this host's address on the route to `host`, or None without a route. Sends nothing."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


_CONNECT_S = 5.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # half a minute without an answer


def listen_towards(host: str) -> tuple[socket.socket, tuple[str, int]] | None:
    """Return a socket to which processes connect that watch this one, and its address on the route to `host`; None
    without a route. It needs no answers: the kernel accepts connections, and closes them when the process ends."""
    address = address_towards(host)
    if address is None:
        return None
    try:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:
        return None
    return listener, (address, listener.getsockname()[1])


def connect_to_watch(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection to a socket of `listen_towards`, which `has_ended` looks at; None if there is no way."""
    try:
        connection = socket.create_connection(address, timeout=_CONNECT_S)
    except OSError:
        return None
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def has_ended(connection: socket.socket) -> bool:
    """Whether the process at the other end has ended, or its machine does not answer."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_one_host(environment: MutableMapping[str, str]) -> bool:
    world = environment.get("WORLD_SIZE", "")
    return world != "" and world == environment.get("LOCAL_WORLD_SIZE")


def is_loopback(host: str) -> bool:
    """Whether gloo would use the loopback interface for this name, as it also does for an unknown name."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError, UnicodeError):
        return True


def _interface_of(address: str) -> str | None:
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            return str(name)
    return None


def _only_interface() -> str | None:
    states = psutil.net_if_stats()
    names = []
    for name, places in psutil.net_if_addrs().items():
        addresses = [place.address for place in places if place.family == socket.AF_INET]
        if states[name].isup and not all(map(is_loopback, addresses)):
            names.append(name)
    return str(names[0]) if len(names) == 1 else None
