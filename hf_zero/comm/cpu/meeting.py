"""How the ranks of one machine meet: sockets in a temporary folder, until every rank is linked to every other one."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_zero.comm.cpu.blocks import anonymous_file
from hf_zero.comm.cpu.shared_memory import WORD, SharedMemoryLink, pack_word
from hf_zero.comm.cpu.wires import SocketWires
from hf_zero.log import logger


def connect(
    rank: int, world: int, gather_objects: Callable[[object], list[object]], timeout_s: float
) -> SharedMemoryLink | None:
    """Link all ranks; None, on every rank, when they do not share a machine or it cannot do this. Collective."""
    with _socket_folder() as folder:
        listener = None if folder is None else _listen_at(f"{folder}/{rank}", world)
        addresses = gather_objects([_machine(), f"{folder}/{rank}"] if listener is not None else None)
        peers = _call(rank, addresses)
        if not all(gather_objects(peers is not None)):
            for peer in (peers or {}).values():
                peer.close()
            if listener is not None:
                listener.close()
            return None
        assert listener is not None and peers is not None
        for _ in range(world - 1 - rank):
            caller, _ = listener.accept()  # all have called before anyone came here
            peers[WORD.unpack(caller.recv(WORD.size, socket.MSG_WAITALL))[0]] = caller
        listener.close()
    return SharedMemoryLink(SocketWires(peers, WORD.size), timeout_s)


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


def _call(rank: int, addresses: list[object]) -> dict[int, socket.socket] | None:
    """Connections to the lower ranks; None when some rank cannot be reached."""
    peers: dict[int, socket.socket] = {}
    try:
        for peer, address in enumerate(addresses):
            if not isinstance(address, list) or address[0] != _machine():
                return None
            path = str(address[1])
            if peer < rank:
                peers[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peers[peer].connect(path)
                peers[peer].sendall(pack_word(rank, 0))
    except OSError:  # another file system or another user: a container of its own
        return None
    return peers


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()
