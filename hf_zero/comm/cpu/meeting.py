"""How the ranks of one host meet: sockets in a temporary folder, until every rank is linked to every other one."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hf_zero.comm.cpu.blocks import anonymous_file
from hf_zero.comm.cpu.shared_memory import WORD, SharedMemoryLink, SocketWires, pack_word
from hf_zero.comm.mesh import Hosts
from hf_zero.log import logger


def connect(
    rank: int, hosts: Hosts, gather_objects: Callable[[object], list[object]], timeout_s: float
) -> tuple[SharedMemoryLink | None, frozenset[int]]:
    """Link all ranks of each host. Collective.

    Returns:
        This rank's link to the others of its host, None where it is alone or where they cannot share memory; and the
        hosts that have one, the same on all ranks.
    """
    beside = hosts.beside(rank)
    with _socket_folder() as folder:
        listener = None if folder is None else _listen_at(f"{folder}/{rank}", len(beside))
        addresses = gather_objects(None if listener is None else f"{folder}/{rank}")
        peers = _call(rank, {peer: addresses[peer] for peer in beside})
        done = gather_objects(peers is not None)
        linked = frozenset(
            host
            for host in range(hosts.num_hosts)
            if len(hosts.ranks_on(host)) > 1 and all(done[each] for each in hosts.ranks_on(host))
        )
        if hosts.of_rank[rank] not in linked:
            for peer in (peers or {}).values():
                peer.close()
            if listener is not None:
                listener.close()
            return None, linked
        assert listener is not None and peers is not None
        for _ in range(len(beside) - 1 - beside.index(rank)):
            caller, _ = listener.accept()  # all have called before anyone came here
            peers[WORD.unpack(caller.recv(WORD.size, socket.MSG_WAITALL))[0]] = caller
        listener.close()
    return SharedMemoryLink(SocketWires(peers, WORD.size), timeout_s), linked


@contextmanager
def _socket_folder() -> Iterator[str | None]:
    """A folder for the time of meeting; None where none can be made: no temporary folder, or none with room."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="hf_zero-")
    except OSError as error:
        logger.warning("ranks do not share memory: no temporary folder can be made (%s); TMPDIR names one", error)
        yield None
        return
    with folder as name:
        yield name


def _listen_at(path: str, world: int) -> socket.socket | None:
    try:
        os.close(anonymous_file(1))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(world)
        return listener
    except (OSError, AttributeError):  # not Linux, no room, or a folder whose name is too long for a socket
        return None


def _call(rank: int, addresses: Mapping[int, object]) -> dict[int, socket.socket] | None:
    """Connections to the lower ranks of this host; None when some rank of it cannot be reached."""
    peers: dict[int, socket.socket] = {}
    try:
        for peer, address in addresses.items():
            if not isinstance(address, str):
                return None
            if peer < rank:
                peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peers[peer].connect(address)
                peers[peer].sendall(pack_word(rank, 0))
    except OSError:  # another file system or another user: a container of its own
        return None
    return peers


def host_name() -> str:
    """The same for ranks of one host: its name, and that of the running system (clones of a host share one of them)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.uname().nodename
    except OSError:  # not Linux
        return os.uname().nodename
