"""Memory that the ranks of one machine share, and the word between them that something lies in it.

    sender      take a block | copy into it | post "call 7 is in block 2" to all peers
    receiver    claim call 7: the sender's block 2, mapped here too | read it | finish: "block 2 is read"
    sender      all peers have read block 2: it is free again

Words travel over Unix sockets, one per pair of ranks, and are 24 bytes long; blocks are anonymous files whose
descriptors travel the same way once. A sender without a fitting free block makes another one, unless it chooses to wait
until one has been read; blocks that are not taken for a while are dropped.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

_WORD = struct.Struct("<qqq")  # kind, block, argument
_GRAIN_BYTES = 1 << 12
_MAX_IDLE = 256  # takes of other blocks; about a step of a model of fifty layers
_READ_BYTES = 128 * _WORD.size
_HOLDER = -1  # stands among a block's readers for the rank that made it


class _Kind(IntEnum):
    BLOCK = 0  # a new block of so many bytes; its descriptor comes along
    POSTED = 1  # the data of this call lie in the block
    READ = 2  # the receiver is done with the block
    DROPPED = 3  # the block is gone
    BLAMED = 4  # the sender ends, because this rank has stopped


class Block:
    """One piece of shared memory, mapped into this process.

    Attributes:
        last_take: the number of its last use; of own blocks only.
    """

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.last_take = 0
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        os.close(descriptor)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements from byte `offset` on."""
        return self.bytes.narrow(0, offset, numel * dtype.itemsize).view(dtype)


class SharedMemoryLink:
    """This rank's end of the connections to all other ranks.

    Attributes:
        timeout_s: how long an answer is waited for.
    """

    def __init__(self, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self._peers = peers
        self.timeout_s = timeout_s
        self._mine: dict[int, Block] = {}
        self._num_made = 0
        self._num_takes = 0
        self._free: list[Block] = []
        self._readers: dict[int, set[int]] = {}  # of a block that is not free: who has still to read it
        self._theirs: dict[tuple[int, int], Block] = {}
        self._posted: dict[tuple[int, int], int] = {}  # (peer, call) -> block, until claimed
        self._gone: set[int] = set()
        self._blamed: dict[int, int] = {}  # a rank that ended because of another one, and which
        for peer in peers.values():
            peer.setblocking(False)

    @property
    def own_blocks(self) -> list[Tensor]:
        """The blocks that this rank has made."""
        return [block.bytes for block in self._mine.values()]

    @property
    def foreign_blocks(self) -> list[Tensor]:
        """Other ranks' blocks, mapped here."""
        return [block.bytes for block in self._theirs.values()]

    def take(self, num_bytes: int, *, is_held: bool = False) -> Block:
        """A block of this rank's that nobody reads; one that `is_held` is not free again before `let_go`."""
        for peer in self._peers:
            self._listen(peer)
        self._num_takes += 1
        size = max(1, -(-num_bytes // _GRAIN_BYTES)) * _GRAIN_BYTES
        # A block that is much larger stays for those who need it, or they would make another one.
        fitting = [block for block in self._free if size <= block.num_bytes <= size + size // 4]
        if fitting:
            block = min(fitting, key=lambda block: block.num_bytes)
            self._free.remove(block)
        else:
            block = self._new_block(size)
        block.last_take = self._num_takes
        self._readers[block.number] = {_HOLDER} if is_held else set()
        self._drop_idle()
        return block

    def let_go(self, block: Block) -> None:
        """The holder is done with `block`."""
        self._strike_reader(block.number, _HOLDER)

    def wait_until_read(self, block: Block, take: int) -> None:
        """Return when all peers have read what was put into `block` at that take. It must have been let go."""
        while block.last_take == take and (readers := self._readers.get(block.number)):
            self._await_word(min(readers))

    def post(self, block: Block, call: int) -> None:
        """Let all peers read `block` as the data of `call`."""
        self._readers[block.number].update(self._peers)
        word = _WORD.pack(_Kind.POSTED, block.number, call)
        for peer in self._peers:
            self._send(peer, word)

    def claim(self, peer: int, call: int) -> Block:
        """What `peer` posted, or will post, as `call`; waits for it."""
        while (peer, call) not in self._posted:
            self._await_word(peer)
        return self._theirs[peer, self._posted.pop((peer, call))]

    def has_heard(self, peer: int, call: int) -> bool:
        """Whether `peer` has posted `call`, so that claiming it takes no waiting."""
        self._listen(peer)
        return (peer, call) in self._posted

    def finish(self, peer: int, block: Block) -> None:
        """`block` of `peer` has been read."""
        self._send(peer, _WORD.pack(_Kind.READ, block.number, 0), optional=True)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _new_block(self, size: int) -> Block:
        descriptor = _anonymous_file(size)
        number, self._num_made = self._num_made, self._num_made + 1
        word = _WORD.pack(_Kind.BLOCK, number, size)
        for peer in self._peers:
            self._send(peer, word, descriptor)
        block = Block(number, descriptor, size)
        self._mine[number] = block
        return block

    def _send(self, peer: int, word: bytes, descriptor: int | None = None, *, optional: bool = False) -> None:
        way = self._peers[peer]
        while True:
            try:
                sent = way.send(word) if descriptor is None else socket.send_fds(way, [word], [descriptor])
                assert sent == len(word), "a word is sent whole or not at all"
                return
            except BlockingIOError:
                self._await(peer, select.POLLIN | select.POLLOUT)
                self._listen(peer)
            except (BrokenPipeError, ConnectionResetError) as error:
                if not optional:
                    self._listen(peer)  # its last words
                    raise self._stopped(peer) from error
                self._gone.add(peer)
                return

    def _await_word(self, peer: int) -> None:
        if peer in self._gone:
            raise self._stopped(peer)
        self._await(peer, select.POLLIN)
        self._listen(peer)

    def _stopped(self, peer: int) -> RuntimeError:
        """Who is the cause of it: `peer`, or the rank because of which `peer` has ended. The others learn it too."""
        self._gone.add(peer)
        culprit = peer
        while culprit in self._blamed:
            culprit = self._blamed.pop(culprit)
        for other in self._peers:
            self._send(other, _WORD.pack(_Kind.BLAMED, culprit, 0), optional=True)
        return RuntimeError(f"rank {culprit} has stopped" + (f", and then rank {peer}" if peer != culprit else ""))

    def _await(self, peer: int, events: int) -> None:
        poller = select.poll()
        poller.register(self._peers[peer], events)
        if not poller.poll(self.timeout_s * 1000):
            raise RuntimeError(f"rank {peer} has not answered for {self.timeout_s:g} seconds")

    def _listen(self, peer: int) -> None:
        """Take in what `peer` has said so far."""
        while peer not in self._gone:
            try:
                heard, descriptors, _, _ = socket.recv_fds(self._peers[peer], _READ_BYTES, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                heard, descriptors = b"", []
            if not heard:
                self._gone.add(peer)
            for kind, number, argument in _WORD.iter_unpack(heard):
                if kind == _Kind.POSTED:
                    self._posted[peer, argument] = number
                elif kind == _Kind.READ:
                    self._strike_reader(number, peer)
                elif kind == _Kind.DROPPED:
                    del self._theirs[peer, number]
                elif kind == _Kind.BLAMED:
                    self._blamed[peer] = number
                else:
                    self._theirs[peer, number] = Block(number, descriptors.pop(), argument)

    def _strike_reader(self, number: int, reader: int) -> None:
        self._readers[number].remove(reader)
        if not self._readers[number]:
            del self._readers[number]
            self._free.append(self._mine[number])

    def _drop_idle(self) -> None:
        idle = [block for block in self._free if self._num_takes - block.last_take > _MAX_IDLE]
        for block in idle:
            self._free.remove(block)
            del self._mine[block.number]
            for peer in self._peers:
                self._send(peer, _WORD.pack(_Kind.DROPPED, block.number, 0), optional=True)


def connect(
    rank: int, world: int, gather_objects: Callable[[object], list[object]], timeout_s: float
) -> SharedMemoryLink | None:
    """Link all ranks; None, on every rank, when they do not share a machine or it cannot do this. Collective."""
    with tempfile.TemporaryDirectory(prefix="hf_zero-") as folder:
        listener = _listen_at(f"{folder}/{rank}", world)
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
            peers[_WORD.unpack(caller.recv(_WORD.size, socket.MSG_WAITALL))[0]] = caller
        listener.close()
    return SharedMemoryLink(dict(sorted(peers.items())), timeout_s)


def _listen_at(path: str, world: int) -> socket.socket | None:
    try:
        os.close(_anonymous_file(_GRAIN_BYTES))
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
                peers[peer].sendall(_WORD.pack(rank, 0, 0))
    except OSError:  # another file system or another user: a container of its own
        return None
    return peers


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _anonymous_file(num_bytes: int) -> int:
    descriptor = os.memfd_create("hf_zero")
    os.ftruncate(descriptor, num_bytes)
    return descriptor
