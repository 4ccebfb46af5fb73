"""Words between the ranks of one machine: short messages of one size, in order between any two ranks."""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping


class Gone(Exception):
    """The rank at the other end has stopped."""


class Wires(ABC):
    """One rank's connections to all others.

    Attributes:
        peers: the other ranks, ascending.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self.peers = tuple(sorted(peers))

    @abstractmethod
    def send(self, peer: int, word: bytes, descriptor: int | None = None) -> bool:
        """Send one word, with an open file if one is given; False where there is no room for it yet.

        Raises:
            Gone: when the peer has stopped.
        """

    @abstractmethod
    def receive(self, peer: int) -> tuple[bytes, list[int]]:
        """Whole words that have arrived and the files that came with them, without waiting; empty when there are none.

        Raises:
            Gone: when the peer has stopped, and has said nothing more before that.
        """

    @abstractmethod
    def wait(self, timeout_s: float, *, room_for: int | None = None) -> bool:
        """Wait until any message arrives, or there is room to send to `room_for`; False on a timeout."""

    def close(self) -> None:
        return None


class SocketWires(Wires):
    """Unix sockets."""

    def __init__(self, sockets: Mapping[int, socket.socket], word_bytes: int) -> None:
        super().__init__(sockets)
        self._sockets = dict(sockets)
        self._read_bytes = 128 * word_bytes
        self._poller = select.poll()
        for way in self._sockets.values():
            way.setblocking(False)
            self._poller.register(way, select.POLLIN)

    def send(self, peer: int, word: bytes, descriptor: int | None = None) -> bool:
        way = self._sockets[peer]
        try:
            sent = way.send(word) if descriptor is None else socket.send_fds(way, [word], [descriptor])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Gone from error
        assert sent == len(word), "a word is sent whole or not at all"
        return True

    def receive(self, peer: int) -> tuple[bytes, list[int]]:
        try:
            heard, descriptors, _, _ = socket.recv_fds(self._sockets[peer], self._read_bytes, 1)
        except BlockingIOError:
            return b"", []
        except ConnectionResetError:
            heard, descriptors = b"", []
        if not heard:
            self._forget(peer)
            raise Gone
        return heard, list(descriptors)

    def wait(self, timeout_s: float, *, room_for: int | None = None) -> bool:
        if room_for is None:
            return bool(self._poller.poll(timeout_s * 1000))
        poller = select.poll()
        poller.register(self._sockets[room_for], select.POLLIN | select.POLLOUT)
        return bool(poller.poll(timeout_s * 1000))

    def close(self) -> None:
        for way in self._sockets.values():
            way.close()

    def _forget(self, peer: int) -> None:
        """A connection that has ended would be ready for ever."""
        try:
            self._poller.unregister(self._sockets[peer])
        except KeyError:
            return
