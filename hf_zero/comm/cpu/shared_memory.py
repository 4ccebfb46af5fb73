"""Memory that the ranks of one machine share, and the word between them that something lies in it.

    sender      take a block | copy into it | post "call 7 is in block 2" to all peers
    receiver    claim call 7: the sender's block 2, mapped here too | read it | finish: "block 2 is read"
    sender      all peers have read block 2: it is free again

Words travel over Unix sockets, one per pair of ranks, and are 64 bytes long; blocks are anonymous files whose
descriptors travel the same way once. A sender without a fitting free block makes another one, unless it chooses to wait
until one has been read; blocks that are not taken for a while are dropped.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_zero.comm.cpu.wires import Gone, SocketWires, Wires
from hf_zero.log import logger

NUM_DETAILS = 5
Label = tuple[int, ...]  # of a call: NUM_DETAILS integers that are the same on all ranks
NO_LABEL: Label = (0,) * NUM_DETAILS
FIRST_MAIL = 100  # kinds of words from here on are those of `mail`
_WORD = struct.Struct(f"<{3 + NUM_DETAILS}q")  # kind, block, argument, details
_CALLS_PER_CHANNEL = 1 << 48
_GRAIN_BYTES = 1 << 12
_MAX_IDLE = 256  # takes of other blocks; about a step of a model of fifty layers
STALL_S = 60.0  # without a word from anybody; then a warning says who is waited for
_HOLDER = -1  # stands among a block's readers for the rank that made it


def _word(kind: int, block: int, argument: int = 0, *details: int) -> bytes:
    return _WORD.pack(kind, block, argument, *details, *NO_LABEL[len(details) :])


def call_number(channel: int, count: int) -> int:
    """The number of the `count`-th call on a channel, unlike all others."""
    return channel * _CALLS_PER_CHANNEL + count


def channel_of(call: int) -> int:
    return call // _CALLS_PER_CHANNEL


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
        last_call: the call that it was posted as the last time; of own blocks only.
    """

    def __init__(self, number: int, descriptor: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.last_take = 0
        self.last_call = -1
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        os.close(descriptor)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements from byte `offset` on."""
        return self.bytes.narrow(0, offset, numel * dtype.itemsize).view(dtype)


class Mail(NamedTuple):
    """A word that the link only carries, for those who use it.

    Attributes:
        block: data that came with it, to be given back by `finish`; None without.
    """

    peer: int
    kind: int
    block: Block | None
    argument: int
    details: tuple[int, ...]


class Mismatch(RuntimeError):
    """Two ranks have made different calls in the same place.

    Attributes:
        ours, theirs: the labels of the two calls.
    """

    def __init__(self, peer: int, ours: Label, theirs: Label) -> None:
        super().__init__(f"rank {peer} has made another call: {theirs} where this rank has {ours}")
        self.peer, self.ours, self.theirs = peer, ours, theirs


class SharedMemoryLink:
    """This rank's end of the connections to all other ranks.

    Whoever waits takes in the words of all ranks, and `attendants` may act on them, so that waiting for one thing keeps
    nothing else from going on.

    Attributes:
        timeout_s: how long an answer is waited for.
        on_mail: takes what is not the link's own business; see `mail`.
        attendants: called in every wait with what gives the peers whose next message is waited for; say whether they
            did anything.
        calls: number of the last call on each channel.
        num_subjects: how many things have been given a number, see `Collectives.new_subject`.
    """

    def __init__(self, wires: Wires, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.on_mail: Callable[[Mail], None] | None = None
        self.attendants: list[Callable[[Callable[[], AbstractSet[int]]], bool]] = []
        self.calls: Counter[int] = Counter()
        self.num_subjects = 0
        self._wires = wires
        self._peers = wires.peers
        self._mine: dict[int, Block] = {}
        self._num_made = 0
        self._num_takes = 0
        self._free: list[Block] = []
        self._readers: dict[int, set[int]] = {}  # of a block that is not free: who has still to read it
        self._theirs: dict[tuple[int, int], Block] = {}
        self._posted: dict[tuple[int, int], tuple[int, Label]] = {}  # (peer, call) -> block, label; until claimed
        self._last_call: dict[tuple[int, int], int] = {}  # that was heard of (peer, channel)
        self._gone: set[int] = set()
        self._blamed: dict[int, int] = {}  # a rank that ended because of another one, and which
        self._is_attending = False
        self._num_heard = 0

    @property
    def own_blocks(self) -> list[Tensor]:
        """The blocks that this rank has made."""
        return [block.bytes for block in self._mine.values()]

    @property
    def foreign_blocks(self) -> list[Tensor]:
        """Other ranks' blocks, mapped here."""
        return [block.bytes for block in self._theirs.values()]

    # Blocks

    def take(self, num_bytes: int, *, is_held: bool = False) -> Block:
        """A block of this rank's that nobody reads; one that `is_held` is not free again before `let_go`."""
        self._listen_to_all()
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

        def readers() -> set[int]:
            return self._readers.get(block.number, set()) if block.last_take == take else set()

        def not_posted() -> set[int]:
            # A peer reads what this rank has posted once everybody has posted as much.
            channel = channel_of(block.last_call)
            return {peer for peer in self._peers if self._last_call.get((peer, channel), -1) < block.last_call}

        self.wait_for(readers, not_posted)

    def finish(self, peer: int, block: Block) -> None:
        """`block` of `peer` has been read."""
        self._send(peer, _word(_Kind.READ, block.number), optional=True)

    # Calls

    def post(self, block: Block, call: int, label: Label = NO_LABEL) -> None:
        """Let all peers read `block` as the data of `call`; `label` is compared with theirs."""
        self._readers[block.number].update(self._peers)
        block.last_call = call
        word = _word(_Kind.POSTED, block.number, call, *label)
        for peer in self._peers:
            self._send(peer, word)

    def claim(self, peer: int, call: int, label: Label = NO_LABEL) -> Block:
        """What `peer` posted, or will post, as `call`; waits for it.

        Raises:
            Mismatch: when it was something else.
        """

        def missing() -> set[int]:
            return set() if (peer, call) in self._posted else {peer}

        self.wait_for(missing, missing)
        number, theirs = self._posted.pop((peer, call))
        if theirs != label:
            raise Mismatch(peer, label, theirs)
        return self._theirs[peer, number]

    def has_heard(self, peer: int, call: int) -> bool:
        """Whether `peer` has posted `call`, so that claiming it takes no waiting."""
        self._listen(peer)
        return (peer, call) in self._posted

    # Mail

    def mail(
        self, peers: Iterable[int], kind: int, block: Block | None, argument: int, details: Sequence[int] = ()
    ) -> None:
        """Send a word of others' making to `peers`, who are to read `block` if one is given."""
        receivers = tuple(peers)
        if block is not None:
            self._readers[block.number].update(receivers)
        word = _word(FIRST_MAIL + kind, -1 if block is None else block.number, argument, *details)
        for peer in receivers:
            self._send(peer, word)

    # Waiting

    def wait_for(
        self,
        missing: Callable[[], AbstractSet[int]],
        not_posted: Callable[[], AbstractSet[int]] | None = None,
        purpose: str = "to exchange data with it",
    ) -> None:
        """Return when nobody is missing. Takes in words, and lets the attendants act, while it waits.

        Args:
            missing: peers from whom something is waited for.
            not_posted: those among all peers whose next message this rank needs to go on.
            purpose: why it waits, for messages.

        Raises:
            RuntimeError: when one of them has stopped, or none has said anything for `timeout_s`.
        """
        if not missing():
            return
        self._listen_to_all()
        while absent := missing():
            heard = self._num_heard
            acted = self._attend(not_posted or set)
            if acted or self._num_heard != heard:
                continue  # an attendant may have taken in what is waited for
            lost = self._gone & absent
            if lost:
                raise self._stopped(min(lost))
            self._wait_for_words(min(absent), purpose)
            self._listen_to_all()

    def close(self) -> None:
        self._wires.close()

    def _wait_for_words(self, peer: int, purpose: str) -> None:
        """Sleep until anybody says anything; say why after a while."""
        if self._wires.wait(min(self.timeout_s, STALL_S)):
            return
        left = self.timeout_s - STALL_S
        if left > 0:
            logger.warning(
                "nothing from rank %d for %g seconds: this rank waits for it %s. It may be slow, or run other modules "
                "or collective calls than this one; after %g seconds this is an error",
                peer,
                STALL_S,
                purpose,
                self.timeout_s,
            )
        if left <= 0 or not self._wires.wait(left):
            raise RuntimeError(f"rank {peer} has not answered for {self.timeout_s:g} seconds ({purpose})")

    def _attend(self, awaited: Callable[[], AbstractSet[int]]) -> bool:
        if self._is_attending:  # an attendant that waits has others attend to nothing new
            return False
        self._is_attending = True
        try:
            acted = [attend(awaited) for attend in self.attendants]  # all of them
            return any(acted)
        finally:
            self._is_attending = False

    def _new_block(self, size: int) -> Block:
        descriptor = _anonymous_file(size)
        number, self._num_made = self._num_made, self._num_made + 1
        word = _word(_Kind.BLOCK, number, size)
        for peer in self._peers:
            self._send(peer, word, descriptor)
        block = Block(number, descriptor, size)
        self._mine[number] = block
        return block

    def _send(self, peer: int, word: bytes, descriptor: int | None = None, *, optional: bool = False) -> None:
        try:
            while not self._wires.send(peer, word, descriptor):
                if not self._wires.wait(self.timeout_s, room_for=peer):
                    raise RuntimeError(f"rank {peer} has not answered for {self.timeout_s:g} seconds")
                self._listen(peer)
        except Gone as gone:
            if not optional:
                self._listen(peer)  # its last words
                raise self._stopped(peer) from gone
            self._gone.add(peer)

    def _stopped(self, peer: int) -> RuntimeError:
        """Who is the cause of it: `peer`, or the rank because of which `peer` has ended. The others learn it too."""
        self._gone.add(peer)
        culprit = peer
        while culprit in self._blamed:
            culprit = self._blamed.pop(culprit)
        for other in self._peers:
            self._send(other, _word(_Kind.BLAMED, culprit), optional=True)
        return RuntimeError(f"rank {culprit} has stopped" + (f", and then rank {peer}" if peer != culprit else ""))

    def _listen_to_all(self) -> None:
        for peer in self._peers:
            self._listen(peer)

    def _listen(self, peer: int) -> None:
        """Take in what `peer` has said so far."""
        while peer not in self._gone:
            try:
                heard, descriptors = self._wires.receive(peer)
            except Gone:
                self._gone.add(peer)
                return
            if not heard:
                return
            for kind, number, argument, *details in _WORD.iter_unpack(heard):
                self._num_heard += 1
                self._take_in(peer, kind, number, argument, tuple(details), descriptors)

    def _take_in(
        self, peer: int, kind: int, number: int, argument: int, details: tuple[int, ...], descriptors: list[int]
    ) -> None:
        if kind == _Kind.POSTED:
            self._posted[peer, argument] = number, details
            self._last_call[peer, channel_of(argument)] = argument
        elif kind == _Kind.READ:
            self._strike_reader(number, peer)
        elif kind == _Kind.BLOCK:
            self._theirs[peer, number] = Block(number, descriptors.pop(), argument)
        elif kind == _Kind.DROPPED:
            del self._theirs[peer, number]
        elif kind == _Kind.BLAMED:
            self._blamed[peer] = number
        else:
            assert self.on_mail is not None, "mail for nobody"
            block = None if number < 0 else self._theirs[peer, number]
            self.on_mail(Mail(peer, kind - FIRST_MAIL, block, argument, details))

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
                self._send(peer, _word(_Kind.DROPPED, block.number), optional=True)


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
            peers[_WORD.unpack(caller.recv(_WORD.size, socket.MSG_WAITALL))[0]] = caller
        listener.close()
    return SharedMemoryLink(SocketWires(peers, _WORD.size), timeout_s)


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
                peers[peer].sendall(_word(rank, 0))
    except OSError:  # another file system or another user: a container of its own
        return None
    return peers


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _anonymous_file(num_bytes: int) -> int:
    descriptor = os.memfd_create("hf_zero")
    os.ftruncate(descriptor, num_bytes)
    return descriptor
