"""A unit of stage 3: parameters that are gathered and released together, with one collective per dtype.

    between uses    shard            one row per rank, this rank has its own (with hpZ: and some of other ranks')
    gathering       W rows           in one buffer from a pool, or each where its rank has put it
    in use          full             every parameter whole and aligned; `parameter.data` is a view of it

`full` is one storage object, emptied and refilled: views that autograd saved (`weight.t()`) are right again once the
unit is gathered for backward, and memory that is released really is free. (Where a user has views, see `leave_views`.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from hf_zero.comm import Collectives, Gathering, Pending, Rows
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.comm.quantized import PlainRows, RoundedRows, StoredMessages, rounded
from hf_zero.comm.rows import own_shard
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event
from hf_zero.kernels.accumulate import read_rows
from hf_zero.layout import RowLayout
from hf_zero.layout.buckets import KeptRows, ShardSlot
from hf_zero.offload.quantized import QuantizedVector
from hf_zero.offload.vector import Store, Vector, part_of
from hf_zero.params.sharded_parameter import HEAP, ShardedParameter

# Buffers that gathers write to, of one engine.


class GatherBuffers:
    """Receive buffers that rotate: fresh ones would be paged in anew at every gather.

    A buffer is at most twice as long as what it is taken for, so that many small units can be under way. What is free
    goes before more than the longest is there, unless more is taken. Buffers change lanes: the taker of one waits
    until its giver has read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime = runtime_of(device)
        self._free: dict[torch.dtype, list[tuple[Tensor, Event]]] = {}
        self._longest: dict[torch.dtype, int] = {}
        self._num_taken: Counter[torch.dtype] = Counter()  # elements

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        self._longest[dtype] = max(numel, self._longest.get(dtype, 0))

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A buffer of at least `numel` elements, for the lane that asks."""
        free = self._free.setdefault(like.dtype, [])
        fitting = [index for index, (buffer, _) in enumerate(free) if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            buffer, is_read = free.pop(min(fitting, key=lambda index: free[index][0].numel()))
            self._runtime.wait(is_read)
        else:
            room = self._longest.get(like.dtype, 0) - self._num_taken[like.dtype] - numel
            while free and sum(buffer.numel() for buffer, _ in free) > max(room, 0):
                free.pop(0)
            buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        self._num_taken[like.dtype] += buffer.numel()
        return buffer

    def give(self, rows: Rows) -> None:
        """`rows` have been read."""
        rows.give_back()
        if rows.buffer is not None:
            is_read = self._runtime.record(rows.buffer)
            self._runtime.keep_until(is_read, rows.buffer)  # its memory belongs to another lane
            self._num_taken[rows.buffer.dtype] -= rows.buffer.numel()
            self._free.setdefault(rows.buffer.dtype, []).append((rows.buffer, is_read))


def digest(values: Tensor) -> Tensor:
    """0-dim int64, equal for equal bits. Rows and columns of a table of them count by number, so order matters too."""
    parts = values.detach().reshape(-1).view(torch.uint8)
    words = parts[: parts.numel() // 8 * 8].view(torch.int64)  # sums of other integers are many times slower
    width = max(1, math.isqrt(words.numel()))
    table = words[: words.numel() // width * width].view(-1, width)
    sums = torch.cat([table.sum(1), table.sum(0), words[table.numel() :], parts[words.numel() * 8 :].long()])
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


# With hpZ a rank keeps rows of other ranks, too: which, and how it gets what those have updated.
#
#     four ranks, two groups      rank 0   1   2   3
#         its own row                  0   1   2   3
#         kept                        0 2 1 3 0 2 1 3
#         gathered                    among ranks 0 and 1, and among 2 and 3
#         after an update             row 0 goes from rank 0 to rank 2, row 2 the other way; and 1 and 3 alike


def kept_rows(world: int, rank: int, across: Collectives) -> KeptRows:
    """Of shard number `rank` among `world`, where the ranks of `across` keep the same rows."""
    group = world // across.size
    return KeptRows(group=group, place=rank % group, own=across.rank, count=across.size)


class Renewal(Pending):
    """Updated parts of rows on their way to all ranks that keep these rows."""

    def __init__(self, stored: Vector, rows: KeptRows, layout: RowLayout, across: Collectives) -> None:
        self._stored = stored
        with torch.inference_mode(False), torch.no_grad():
            stored.fetch()
            self._place = stored.take().view(rows.count, -1)[:, : layout.trained_numel]
            self._rows = self._place.contiguous()  # itself, where everything is trained
            self._pending = across.all_gather(self._rows.view(-1))

    def wait(self) -> None:
        self._pending.wait()
        with torch.inference_mode(False), torch.no_grad():
            if self._rows.data_ptr() != self._place.data_ptr():
                self._place.copy_(self._rows)
            self._stored.release(changed=True)
            self._stored.join()
            if self._stored.leaves_late:
                self._stored.flush()


class UnitPart:
    """The parameters of one dtype in a unit."""

    def __init__(
        self,
        layout: RowLayout,
        members: Sequence[ShardedParameter],
        store: Store,
        device: torch.device,
        on_device: Callable[[Vector], Vector] = lambda kept: kept,
        form: PlainRows | None = None,
        across: Collectives | None = None,
    ) -> None:
        """Collective, where several ranks keep the same rows.

        Args:
            members: in the order of `layout.slots`. Their chunks move into one vector of `store`, with those of other
                ranks that this one keeps.
            on_device: through which it comes to where gathers start.
            form: what of it travels; None: all as it is.
            across: ranks that keep the same rows, each its own and those of the others; None: no others do.
        """
        self.layout = layout
        self.members = tuple(members)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.device = device
        self.form = form or PlainRows()
        self._across = across or LoneCollectives()
        self.rows = kept_rows(layout.world, members[0].groups.shard.rank, self._across)
        name = f"weights of {members[0].name or 'a unit'} and following"
        self.stored = store.adopt(name, self._rows_to_keep(self._joined()))
        kept = [self._kept_row(index) for index in range(self.rows.count)]
        self.kept = kept[self.rows.own]
        for slot, member in zip(layout.slots, members, strict=True):
            chunks = [(self.rows.row(i), part_of(row, slot.offset, slot.chunk)) for i, row in enumerate(kept)]
            member.move(chunks.pop(self.rows.own)[1], device)
            member.beside = chunks
            member.as_gathered = None if self.form.is_exact else partial(self._as_gathered, slot)
        self._make_room()
        self._row = on_device(self.stored)
        self._is_fetched = False
        self._sent: Tensor | None = None  # what of this rank's row gathers bring, until it is put back

    def _make_room(self) -> None:
        """A storage for the whole parameters, empty so far."""
        self._full = torch.empty(self.layout.full_numel, dtype=self.dtype, device=self.device)
        self._views = tuple(
            self._full.narrow(0, slot.full_offset, slot.numel).view(member.shape)
            for slot, member in zip(self.layout.slots, self.members, strict=True)
        )
        self._by_row: list[_RowPlan] = []  # made at the first gather whose rows do not lie in one buffer
        self._num_bytes = self._full.untyped_storage().nbytes()
        self._full.untyped_storage().resize_(0)
        self._num_own_uses = self._num_uses()

    def _num_uses(self) -> int:
        """Uses of the storage, by tensors anywhere."""
        count: int = torch._C._storage_Use_Count(self._full.untyped_storage()._cdata)
        return count

    def leave_views(self) -> None:
        """Before what inference has kept is released: views taken of it (`detach()`, a state dict) stay valid,
        as they are. Emptied, they would be read from nowhere."""
        in_plans = sum(len(plan.places) for plan in self._by_row)
        shown = sum(not member.unshard_count for member in self.members)
        if self._num_uses() > self._num_own_uses + in_plans + shown:
            self._make_room()

    @property
    def address(self) -> int:
        """Of the whole parameters, while they are gathered."""
        return self._full.untyped_storage().data_ptr()

    def _joined(self) -> Tensor:
        """The members' chunks as one new tensor, with zeros between them."""
        row = torch.zeros(self.layout.row_numel, dtype=self.dtype, device=self.members[0].shard.device)
        for slot, member in zip(self.layout.slots, self.members, strict=True):
            with member.opened() as chunk:
                row.narrow(0, slot.offset, slot.chunk).copy_(chunk)
        return row

    def _rows_to_keep(self, row: Tensor) -> Tensor:
        """This rank's row and those of others that it keeps, as they are kept."""
        own = RoundedRows().sent(row) if type(self.form) is StoredMessages else row
        if self.rows.count == 1:
            return own
        rows = torch.empty(self.rows.count * own.numel(), dtype=own.dtype, device=self.device)
        own_shard(rows, self.rows.own, self.rows.count).copy_(own)
        self._across.all_gather(rows).wait()
        return rows

    def _kept_row(self, index: int) -> Vector:
        """The values of one of the kept rows."""
        numel = self.stored.numel // self.rows.count
        row = self.stored if self.rows.count == 1 else part_of(self.stored, index * numel, numel)
        if type(self.form) is StoredMessages:
            return QuantizedVector(row, self.layout.row_numel, self.dtype)
        return row

    @property
    def is_at_hand(self) -> bool:
        """Whether this rank's row is always where a gather starts from."""
        return self._row.tensor is not None

    def fetch(self) -> None:
        """Bring the rows that this rank keeps to where a gather can start from them."""
        if not self._is_fetched:
            self._is_fetched = True
            self._row.fetch()

    def open_row(self) -> Tensor:
        """This rank's rows on the device that gathers, as they travel (1-D), until `put_back`."""
        self.fetch()
        if self._sent is None:
            self._sent = self.form.sent(self._row.take().view(self.rows.count, -1)).view(-1)
        return self._sent

    def put_back(self) -> None:
        """Undo `fetch`: the rows are not needed any more."""
        self._sent = None
        if self._is_fetched:
            self._is_fetched = False
            self._row.release(changed=False)

    def unpack(self, rows: Rows, buffers: GatherBuffers) -> None:
        """Take in what a gather has brought; parameters in use keep what they show."""
        storage = self._full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._num_bytes)
        opened = self.form.opened(rows, self.layout, self._full, buffers.take, self.rows.count)
        self._unpack(opened)
        buffers.give(rows)
        if opened is not rows:
            buffers.give(opened)
        self.put_back()
        for member, view in zip(self.members, self._views, strict=True):
            member.unsharded = view
            if not member.unshard_count:
                member.show(view)

    def refill(self, buffers: GatherBuffers) -> Pending:
        """Gather weights that have been updated into a part that stays gathered. All ranks do it."""
        with torch.inference_mode(False), torch.no_grad():
            row = self.open_row()
            collectives = self.members[0].groups.shard
            return _Refill(self, collectives.gather_rows(row, partial(buffers.take, like=row)), buffers)

    def renew(self) -> Pending:
        """Bring what others have updated of the rows that this rank keeps. All ranks do it."""
        return Pending() if self.rows.count == 1 else Renewal(self._row, self.rows, self.layout, self._across)

    def _unpack(self, rows: Rows) -> None:
        group, count = self.rows.group, self.rows.count
        if rows.flat is None:
            self._by_row = self._by_row or [_RowPlan(self.layout, self._full, r) for r in range(self.layout.world)]
            for rank in range(group):
                for plan, row in zip(self._by_row[rank::group], rows.row(rank).chunk(count), strict=True):
                    plan.read(row)
            return
        flat = rows.flat.view(group, count, -1)
        for slot, view in zip(self.layout.slots, self._views, strict=True):
            for index, values in enumerate(view.view(-1).split(group * slot.chunk)):
                read_rows(values, flat[:, index, slot.offset : slot.offset + slot.chunk])

    def release(self) -> None:
        for member in self.members:
            member.sync_master()
            member.unsharded = None
            if not member.unshard_count:
                member.hide()
        self._full.untyped_storage().resize_(0)
        if self.kept.tensor is None and self.device.type == "cpu":
            HEAP.freed(self._num_bytes)  # where memory is scarce, holes in the heap count too

    def allocate(self) -> None:
        """Make room for whole parameters now, with zeros between them: `digest` is then the same on all ranks."""
        self._full.untyped_storage().resize_(self._num_bytes)
        self._full.zero_()

    def digest(self) -> Tensor:
        """0-dim, of everything gathered."""
        return digest(self._full)

    def _as_gathered(self, slot: ShardSlot, row: int) -> Tensor:
        """A kept chunk of a member as a gather brings it."""
        with self._kept_row(row // self.rows.group).opened() as values:
            return rounded(values).narrow(0, slot.offset, slot.chunk)


class _Refill(Pending):
    """A part on its way to its new values."""

    def __init__(self, part: UnitPart, rows: Rows, buffers: GatherBuffers) -> None:
        self._part = part
        self._rows = rows
        self._buffers = buffers

    def wait(self) -> None:
        self._rows.wait()
        with torch.inference_mode(False), torch.no_grad():
            self._part.unpack(self._rows, self._buffers)


class _RowPlan:
    """Where the chunks of one rank's row go, as views that are made once: per gather that leaves one call."""

    def __init__(self, layout: RowLayout, full: Tensor, rank: int) -> None:
        self.places: list[Tensor] = []
        self._sizes: list[int] = []  # of a row's sections: chunk, what follows it, chunk, ...
        ends = [*(slot.offset for slot in layout.slots[1:]), layout.row_numel]
        for slot, end in zip(layout.slots, ends, strict=True):
            start = min(rank * slot.chunk, slot.numel)
            numel = min(slot.chunk, slot.numel - start)
            self.places.append(full.narrow(0, slot.full_offset + start, numel))
            self._sizes += [numel, end - slot.offset - numel]

    def read(self, row: Tensor) -> None:
        torch._foreach_copy_(self.places, row.split_with_sizes(self._sizes)[::2])


class UnitState(Enum):
    """Where the whole parameters of a unit are."""

    RELEASED = "nowhere: each rank has its row"
    IN_FLIGHT = "asked for, and neither finished nor discarded"
    GATHERED = "on this rank"


class Unit:
    """Parameters that are gathered, used and released together.

        RELEASED -- start --> IN_FLIGHT -- finish --> GATHERED -- release --> RELEASED
                                        -- discard -> RELEASED

    Attributes:
        index: place in the fixed order in which all ranks gather units.
        numel: elements that a gather makes live.
        is_persistent: stays gathered; it is gathered again only after its weights were updated.
        is_held: stays gathered for now: `release` does nothing.
        state: changed by the verbs alone.
    """

    def __init__(self, index: int, name: str, parts: Sequence[UnitPart], *, is_persistent: bool = False) -> None:
        self.index = index
        self.name = name
        self.parts = tuple(parts)
        self.numel = sum(slot.numel for part in parts for slot in part.layout.slots)
        self.is_persistent = is_persistent
        self.is_held = False
        self.state = UnitState.RELEASED
        self._gathering: Gathering | None = None

    @property
    def is_gathered(self) -> bool:
        return self.state is UnitState.GATHERED

    @property
    def members(self) -> tuple[ShardedParameter, ...]:
        return tuple(member for part in self.parts for member in part.members)

    def fetch(self) -> None:
        """Prepare to gather the unit soon."""
        if self.state is UnitState.RELEASED:
            for part in self.parts:
                part.fetch()

    def put_back(self) -> None:
        """Undo `fetch`."""
        if self.state is not UnitState.IN_FLIGHT:
            for part in self.parts:
                part.put_back()

    def open_rows(self) -> list[Tensor]:
        """This rank's rows, one per part, until `put_back`. Buffers outlive the mode they are made in, so inference
        mode is left for it."""
        with torch.inference_mode(False), torch.no_grad():
            return [part.open_row() for part in self.parts]

    def start(self, gathering: Gathering) -> None:
        """`gathering` brings all rows; `finish` or `discard` is called next."""
        self.state, self._gathering = UnitState.IN_FLIGHT, gathering

    def arrive(self) -> None:
        """Wait for the gather, whose rows stay where they are until `finish` or `discard`."""
        self._complete(is_used=False)
        for part in self.parts:
            part.put_back()

    def finish(self, buffers: GatherBuffers) -> None:
        """Wait for the gather; parameters have their values then."""
        rows = self._complete()
        with torch.inference_mode(False), torch.no_grad():
            for part, arrived in zip(self.parts, rows, strict=True):
                part.unpack(arrived, buffers)
        self.state, self._gathering = UnitState.GATHERED, None

    def discard(self, buffers: GatherBuffers) -> None:
        """Wait for a gather whose result is not wanted after all."""
        for arrived in self._complete(is_used=False):
            buffers.give(arrived)
        self.state, self._gathering = UnitState.RELEASED, None
        self.put_back()

    def addresses(self) -> set[int]:
        """Where the whole parameters are, while they are gathered."""
        return {part.address for part in self.parts if part.address}

    def leave_views(self) -> None:
        """What is released next stays as it is for those who have views of it."""
        if not (self.is_persistent or self.is_held):
            for part in self.parts:
                part.leave_views()

    def release(self) -> None:
        """Parameters go back to shards; those of a persistent unit stay, and those that are held."""
        if self.is_gathered and not (self.is_persistent or self.is_held):
            for part in self.parts:
                part.release()
            self.state = UnitState.RELEASED

    def settle_in(self, buffers: GatherBuffers) -> None:
        """Gather a persistent unit, which stays gathered. Collective."""
        for part in self.parts:
            part.allocate()
            part.refill(buffers).wait()
        self.state = UnitState.GATHERED
        for member in self.members:
            member.parameter.ds_persist = True  # type: ignore[attr-defined]

    def _complete(self, *, is_used: bool = True) -> Sequence[Rows]:
        assert self._gathering is not None, "asked for first"
        try:
            rows = self._gathering.wait(is_used=is_used)
        except RuntimeError as error:
            raise RuntimeError(f"gathering the parameters of {self.name!r} failed on this rank: {error}") from error
        return rows
