"""The memory that the ranks of a host share, as one group of them uses it: ranks are those of the group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from hf_zero.comm.cpu.blocks import Block, OwnBlocks
from hf_zero.comm.cpu.shared_memory import NO_LABEL, Label, Mail, SharedMemoryLink, call_number

CHANNELS_PER_GROUP = 8


class GroupLink:
    """A view of the one link of this process, so that a wait in any group looks after all of them.

    Attributes:
        link: to all ranks of the host, which it knows by their ranks in the world.
        ranks: of the world, in the order of the group.
        rank: this one's place in there.
    """

    def __init__(self, link: SharedMemoryLink, ranks: Sequence[int], rank: int, number: int = 0) -> None:
        """`number`: of the group; the same on all its ranks, and unlike those of other groups that share a rank."""
        self.link = link
        self.ranks = tuple(ranks)
        self.rank = rank
        self._number = number
        self._place = {each: place for place, each in enumerate(self.ranks)}
        self._peers = tuple(each for place, each in enumerate(self.ranks) if place != rank)

    @property
    def own(self) -> OwnBlocks:
        return self.link.own

    @property
    def own_tensors(self) -> list[Tensor]:
        return self.link.own.tensors

    def new_subject(self) -> int:
        """See `Collectives.new_subject`."""
        self.link.num_subjects += 1
        return self.link.num_subjects

    # Calls

    def next_call(self, channel: int) -> int:
        """The number of this rank's next call on a channel of the group."""
        channel += self._number * CHANNELS_PER_GROUP
        self.link.calls[channel] += 1
        return call_number(channel, self.link.calls[channel])

    def take(self, num_bytes: int, *, is_held: bool = False) -> Block:
        return self.link.take(num_bytes, is_held=is_held)

    def wait_until_read(self, block: Block, take: int) -> None:
        self.link.wait_until_read(block, take)

    def post(self, block: Block, call: int, label: Label = NO_LABEL) -> None:
        """Let the whole group read `block`."""
        self.link.post(self._peers, block, call, label)

    def claim(self, peer: int, call: int, label: Label = NO_LABEL) -> Block:
        return self.link.claim(self.ranks[peer], call, label)

    def finish(self, blocks: Mapping[int, Block]) -> None:
        self.link.finish({self.ranks[peer]: block for peer, block in blocks.items()})

    def has_heard(self, peer: int, call: int) -> bool:
        return self.link.has_heard(self.ranks[peer], call)

    # Mail

    def mail(
        self, peers: Iterable[int], kind: int, block: Block | None, argument: int, details: Sequence[int] = ()
    ) -> None:
        self.link.mail([self.ranks[peer] for peer in peers], self._number, kind, block, argument, details)

    def listen(self, take_in: Callable[[Mail], None], attend: Callable[[Callable[[], AbstractSet[int]]], bool]) -> None:
        """Give `take_in` the group's mail, and call `attend` in every wait of this process."""

        def attend_group(awaited: Callable[[], AbstractSet[int]]) -> bool:
            return attend(lambda: {self._place[peer] for peer in awaited() if peer in self._place})

        self.link.take_mail(self._number, lambda mail: take_in(mail._replace(peer=self._place[mail.peer])))
        self.link.attendants.append(attend_group)

    # Waiting

    def wait_for(self, missing: Callable[[], AbstractSet[int]], purpose: str) -> None:
        self.link.wait_for(lambda: {self.ranks[peer] for peer in missing()}, purpose=purpose)
