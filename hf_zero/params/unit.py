"""A unit of stage 3: parameters that are gathered and released together, with one collective per dtype.

    between uses    shard            one row per rank; this rank has its own (with hpZ also some rows of other ranks)
    gathering       W rows           in one buffer from a pool, or each row in its rank's shared memory
                 or directly         every chunk where it is used, in `full`
    in use          full             every parameter whole and aligned; `parameter.data` is a view of it

`full` is one storage object, emptied and refilled: views that autograd saved (`weight.t()`) are valid again once the
unit is gathered for backward, and released memory is really free. (For views held by users, see `leave_views`.)

On accelerators units are gathered directly if their chunks are contiguous pieces of the parameters and large enough
(`direct_chunks`), unless rows are quantized or a rank keeps several. The memory of `full` is then allocated when the
gather starts, on the compute stream as always, so that the allocator can give it to activations between uses. What used
it before may still be queued there, so the gather starts after that. Before the memory is freed, compute has waited for
the gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from hf_zero.comm import Collectives, GatherBuffers, Gathering, OutsideAutograd, OwnRow, Pending, Rows, UnitRows
from hf_zero.comm.quantized import PlainRows, RoundedRows, StoredMessages, rounded
from hf_zero.comm.rows import own_shard
from hf_zero.kernels.accumulate import read_rows
from hf_zero.layout import RowLayout
from hf_zero.layout.buckets import KeptRows, ShardSlot, direct_chunks
from hf_zero.offload.quantized import QuantizedVector
from hf_zero.offload.vector import Store, Vector, part_of
from hf_zero.params.sharded_parameter import HEAP, ShardedParameter


def digest(values: Tensor) -> Tensor:
    """A 0-dim int64 digest of the bits. Rows and columns are weighted by their index, so the order matters, too."""
    parts = values.detach().reshape(-1).view(torch.uint8)
    words = parts[: parts.numel() // 8 * 8].view(torch.int64)  # sums of other integer types are much slower
    width = max(1, math.isqrt(words.numel()))
    table = words[: words.numel() // width * width].view(-1, width)
    sums = torch.cat([table.sum(1), table.sum(0), words[table.numel() :], parts[words.numel() * 8 :].long()])
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


# With hpZ a rank also keeps rows of other ranks: which ones, and how it gets their updates.
#
#     four ranks, two groups      rank 0   1   2   3
#         its own row                  0   1   2   3
#         kept                        0 2 1 3 0 2 1 3
#         gathered                    among ranks 0 and 1, and among 2 and 3
#         after an update             row 0 goes from rank 0 to rank 2, row 2 the other way; and 1 and 3 alike


def kept_rows(world: int, rank: int, across: Collectives) -> KeptRows:
    """The rows kept with shard number `rank` of `world`, if the ranks of `across` keep the same rows."""
    group = world // across.size
    return KeptRows(group=group, place=rank % group, own=across.rank, count=across.size)


class Renewal(Pending):
    """Updated parts of rows in flight to all ranks that keep these rows."""

    def __init__(self, stored: Vector, rows: KeptRows, layout: RowLayout, across: Collectives) -> None:
        self._stored = stored
        with OutsideAutograd():
            stored.fetch()
            self._place = stored.take().view(rows.count, -1)[:, : layout.trained_numel]
            self._rows = self._place.contiguous()  # the same tensor if everything is trained
            self._pending = across.all_gather(self._rows.view(-1))

    def wait(self) -> None:
        self._pending.wait()
        with OutsideAutograd():
            if self._rows.data_ptr() != self._place.data_ptr():
                self._place.copy_(self._rows)
            self._stored.release(changed=True)
            self._stored.join()
            if self._stored.leaves_late:
                self._stored.flush()


class Refill(Pending):
    """Updated weights of a persistent part in flight."""

    def __init__(self, part: UnitPart, buffers: GatherBuffers) -> None:
        self._part = part
        self._buffers = buffers
        with OutsideAutograd():
            row = part.own.open()
            self._rows = part.members[0].groups.shard.gather_rows(row, partial(buffers.take, like=row))

    def is_ready(self) -> bool:
        return self._rows.is_ready()

    def wait(self) -> None:
        self._rows.wait()
        with OutsideAutograd():
            self._part.unpack(self._rows, self._buffers)
            self._part.own.put_back()


class WholeParameters:
    """Memory of a part's whole parameters: one storage object, allocated and freed again and again.

    Attributes:
        full: all parameters, 1-D.
        views: each parameter, in its shape.
        sizes: elements of each chunk of a row, if gathers write chunks directly (a `Place`); else empty.
    """

    def __init__(self, layout: RowLayout, shapes: Sequence[torch.Size], like: Tensor, sizes: tuple[int, ...]) -> None:
        """`like`: a tensor of the part's dtype on the device that gathers."""
        self.sizes = sizes
        self._layout = layout
        self._shapes = tuple(shapes)
        self._like = like
        self.renew()

    def renew(self) -> None:
        """Use a new storage object, which is empty."""
        self.full = self._like.new_empty(self._layout.full_numel)
        places = [self.full.narrow(0, slot.full_offset, slot.numel) for slot in self._layout.slots]
        self.views = tuple(place.view(shape) for place, shape in zip(places, self._shapes, strict=True))
        self._pieces = tuple(place for place in places if place.numel()) if self.sizes else ()
        del places  # not counted as uses
        self._storage = self.full.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self._storage.resize_(0)
        self._num_own_uses = self._num_uses()

    @property
    def address(self) -> int:
        """Address of the memory; 0 if there is none."""
        return self._storage.data_ptr()

    @property
    def num_other_uses(self) -> int:
        """Number of tensors that use the storage, besides those created here."""
        return self._num_uses() - self._num_own_uses

    def _num_uses(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    def allocate(self) -> None:
        if not self._storage.nbytes():
            self._storage.resize_(self.num_bytes)

    def open(self) -> Sequence[Tensor]:
        """Allocate the memory for a gather that writes chunks directly. Returns each parameter, 1-D."""
        self.allocate()
        return self._pieces

    def free(self) -> None:
        self._storage.resize_(0)


class UnitPart:
    """The parameters of one dtype in a unit.

    Attributes:
        own: this rank's row, which gathers send.
        whole: memory of the whole parameters.
    """

    def __init__(
        self,
        layout: RowLayout,
        members: Sequence[ShardedParameter],
        store: Store,
        device: torch.device,
        on_device: Callable[[Vector], Vector],
        form: PlainRows,
        across: Collectives,
        *,
        may_be_direct: bool = False,
    ) -> None:
        """Create the part. Collective if several ranks keep the same rows.

        Args:
            members: in the order of `layout.slots`. Their chunks move into one vector of `store`, with those of other
                ranks that this rank keeps.
            on_device: fetches the vector to the device that gathers.
            form: how rows are sent.
            across: ranks that keep the same rows, their own and each other's.
            may_be_direct: whether gathers may write chunks directly, if rows allow it.
        """
        self.layout = layout
        self.members = tuple(members)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.device = device
        self.form = form
        self._across = across
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
        is_direct = may_be_direct and type(form) is PlainRows and self.rows.count == 1
        sizes = direct_chunks([slot.numel for slot in layout.slots], layout.world, self.dtype.itemsize)
        like = torch.empty(0, dtype=self.dtype, device=device)
        self.whole = WholeParameters(layout, [member.shape for member in members], like, sizes if is_direct else ())
        self._by_row: list[_RowPlan] = []  # created at the first gather whose rows are not in one buffer
        self._by_run: list[_RunPlan | _SlotPlan] = []  # created at the first gather into one buffer
        self._row = on_device(self.stored)
        place = self.whole if self.is_direct else None
        self.own = OwnRow(
            self._row, form, device, self.rows.count, place, stays=self.is_at_hand and type(form) is PlainRows
        )

    @property
    def is_direct(self) -> bool:
        """Whether gathers write chunks directly."""
        return bool(self.whole.sizes)

    def leave_views(self) -> None:
        """Leave the storage to the user's views of it (`detach()`, a state dict) before a unit that inference kept is
        released, because these views would otherwise read freed memory."""
        in_plans = sum(len(plan.places) for plan in (*self._by_row, *self._by_run))
        shown = sum(not member.unshard_count for member in self.members)
        if self.whole.num_other_uses > in_plans + shown:
            self.whole.renew()
            self._by_row, self._by_run = [], []

    def _joined(self) -> Tensor:
        """Join the members' chunks into one new tensor, with zeros between them."""
        row = torch.zeros(self.layout.row_numel, dtype=self.dtype, device=self.members[0].shard.device)
        for slot, member in zip(self.layout.slots, self.members, strict=True):
            with member.opened() as chunk:
                row.narrow(0, slot.offset, slot.chunk).copy_(chunk)
        return row

    def _rows_to_keep(self, row: Tensor) -> Tensor:
        """This rank's row and the rows of others that it keeps, in their stored form."""
        own = RoundedRows().sent(row) if type(self.form) is StoredMessages else row
        if self.rows.count == 1:
            return own
        rows = torch.empty(self.rows.count * own.numel(), dtype=own.dtype, device=self.device)
        own_shard(rows, self.rows.own, self.rows.count).copy_(own)
        self._across.all_gather(rows).wait()
        return rows

    def _kept_row(self, index: int) -> Vector:
        numel = self.stored.numel // self.rows.count
        row = self.stored if self.rows.count == 1 else part_of(self.stored, index * numel, numel)
        if type(self.form) is StoredMessages:
            return QuantizedVector(row, self.layout.row_numel, self.dtype)
        return row

    @property
    def is_at_hand(self) -> bool:
        """Whether this rank's row is always on the device that gathers."""
        return self._row.tensor is not None

    def unpack(self, rows: Rows, buffers: GatherBuffers) -> None:
        """Unpack the result of a gather; parameters in use keep their data."""
        if not rows.is_direct:
            self.whole.allocate()
            opened = self.form.opened(rows, self.layout, self.whole.full, buffers.take, self.rows.count)
            self._unpack(opened)
            buffers.give(rows)
            if opened is not rows:
                buffers.give(opened)
        for member, view in zip(self.members, self.whole.views, strict=True):
            member.unsharded = view
            if not member.unshard_count:
                member.show(view)

    def refill(self, buffers: GatherBuffers) -> Pending:
        """Gather updated weights into a persistent part. Collective."""
        return Refill(self, buffers)

    def renew(self) -> Pending:
        """Receive other ranks' updates of the rows that this rank keeps. Collective."""
        return Pending() if self.rows.count == 1 else Renewal(self._row, self.rows, self.layout, self._across)

    def _unpack(self, rows: Rows) -> None:
        group, count = self.rows.group, self.rows.count
        if rows.flat is None:
            ranks = range(self.layout.world)
            self._by_row = self._by_row or [_RowPlan(self.layout, self.whole.full, rank) for rank in ranks]
            for rank in range(group):
                for plan, row in zip(self._by_row[rank::group], rows.row(rank).chunk(count), strict=True):
                    plan.read(row)
            return
        self._by_run = self._by_run or plans_to_unpack(self.layout, self.whole.views, self.rows)
        flat = rows.flat.view(group, count, -1)
        for run in self._by_run:
            run.read(flat)

    def release(self) -> None:
        for member in self.members:
            member.release()
        self.whole.free()
        if self.kept.tensor is None and self.device.type == "cpu":
            HEAP.freed(self.whole.num_bytes)  # holes in the heap matter if memory is scarce

    def allocate(self) -> None:
        """Allocate storage for whole parameters, with zeros between them, so that `digest` is equal on all ranks."""
        self.whole.allocate()
        self.whole.full.zero_()

    def digest(self) -> Tensor:
        """Digest of everything gathered: 0-dim."""
        return digest(self.whole.full)

    def _as_gathered(self, slot: ShardSlot, row: int) -> Tensor:
        """A kept chunk of a member as a gather delivers it."""
        with self._kept_row(row // self.rows.group).opened() as values:
            return rounded(values).narrow(0, slot.offset, slot.chunk)


class _RowPlan:
    """Target views of the chunks in one rank's row, created once, so that each gather needs a single call."""

    def __init__(self, layout: RowLayout, full: Tensor, rank: int) -> None:
        self.places: list[Tensor] = []
        self._sizes: list[int] = []  # sizes of a row's sections: chunk, gap, chunk, ...
        ends = [*(slot.offset for slot in layout.slots[1:]), layout.row_numel]
        for slot, end in zip(layout.slots, ends, strict=True):
            start = min(rank * slot.chunk, slot.numel)
            numel = min(slot.chunk, slot.numel - start)
            self.places.append(full.narrow(0, slot.full_offset + start, numel))
            self._sizes += [numel, end - slot.offset - numel]

    def read(self, row: Tensor) -> None:
        torch._foreach_copy_(self.places, row.split_with_sizes(self._sizes)[::2])


class _SlotPlan:
    """Target views of one parameter in gathered rows."""

    def __init__(self, slot: ShardSlot, view: Tensor, kept: KeptRows) -> None:
        self.places = view.view(-1).split(kept.group * slot.chunk)
        self._columns = slice(slot.offset, slot.offset + slot.chunk)

    def read(self, flat: Tensor) -> None:
        """`flat`: rows of shape (ranks of a group, rows that each keeps, elements of a row)."""
        for index, values in enumerate(self.places):
            read_rows(values, flat[:, index, self._columns])


class _RunPlan:
    """Target views of adjacent parameters that fill their chunks on all ranks, so that one call copies all of them for
    each of the rows that a rank keeps."""

    def __init__(self, slots: Sequence[ShardSlot], views: Sequence[Tensor], kept: KeptRows) -> None:
        self._start = slots[0].offset
        self._sizes = [slot.chunk for slot in slots]
        self._count = kept.count
        self.places = [part for view in views for part in view.view(kept.count, kept.group, -1).unbind()]

    def read(self, flat: Tensor) -> None:
        """`flat`: as in `_SlotPlan.read`."""
        for index in range(self._count):
            # Never a transposed tensor: on CUDA this call takes any dense one for contiguous.
            run = flat[:, index].narrow(1, self._start, sum(self._sizes))
            torch.split_with_sizes_copy(run, self._sizes, dim=1, out=self.places[index :: self._count])


def plans_to_unpack(layout: RowLayout, views: Sequence[Tensor], kept: KeptRows) -> list[_RunPlan | _SlotPlan]:
    """How to copy gathered rows into the whole parameters `views`, in as few calls as possible."""
    plans: list[_RunPlan | _SlotPlan] = []
    run: list[tuple[ShardSlot, Tensor]] = []
    for slot, view, following in zip(layout.slots, views, [*layout.slots[1:], None], strict=True):
        if slot.numel != slot.chunk * layout.world:
            plans.append(_SlotPlan(slot, view, kept))
            continue
        run.append((slot, view))
        is_followed = following is not None and following.numel == following.chunk * layout.world
        if following is None or not is_followed or slot.offset + slot.chunk != following.offset:
            plans.append(_RunPlan([one for one, _ in run], [whole for _, whole in run], kept))
            run = []
    return plans


@dataclass(slots=True)
class LiveElements:
    """Number of elements of the units that share this counter and are gathered."""

    numel: int = 0


class UnitState(Enum):
    """State of a unit's whole parameters."""

    RELEASED = "not gathered: each rank has its row"
    IN_FLIGHT = "requested, and neither finished nor discarded"
    GATHERED = "on this rank"


class Unit:
    """Parameters that are gathered, used and released together.

        RELEASED -- start --> IN_FLIGHT -- finish --> GATHERED -- release --> RELEASED
                                        -- discard -> RELEASED

    Attributes:
        index: index in the fixed order in which all ranks gather units.
        numel: number of elements that a gather makes live.
        is_persistent: whether it stays gathered; it is only gathered again after an update.
        is_held: whether it stays gathered for now, so that `release` does nothing.
        rows: this rank's rows, which gathers send.
        state: only changed by the methods named above.
        live: counts the unit while it is gathered; the units of an engine share one counter.
    """

    def __init__(self, index: int, name: str, parts: Sequence[UnitPart], *, is_persistent: bool = False) -> None:
        self.index = index
        self.name = name
        self.parts = tuple(parts)
        self.rows = UnitRows(name, [part.own for part in parts])
        self.numel = sum(slot.numel for part in parts for slot in part.layout.slots)
        self.is_persistent = is_persistent
        self.is_held = False
        self.state = UnitState.RELEASED
        self.live = LiveElements()
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
            self.rows.fetch()

    def start(self, gathering: Gathering) -> None:
        """Start `gathering`, which delivers all rows; `finish` or `discard` must follow."""
        self.state, self._gathering = UnitState.IN_FLIGHT, gathering

    def agree(self) -> None:
        """Return when all ranks take part in the gather; `discard` must follow."""
        assert self._gathering is not None, "asked for first"
        self._gathering.agree()

    def arrive(self) -> None:
        """Wait for the gather, without unpacking its rows; `finish` or `discard` must follow."""
        self._complete(is_used=False)

    def finish(self) -> None:
        """Wait for the gather and give parameters their values."""
        rows, buffers = self._complete()
        with OutsideAutograd():
            for part, arrived in zip(self.parts, rows, strict=True):
                part.unpack(arrived, buffers)
        self._gathering = None
        self._is_now_gathered()

    @property
    def is_direct(self) -> bool:
        """Whether gathers write to memory of the compute stream, so that this must wait before it is freed."""
        return any(part.is_direct for part in self.parts)

    def discard(self) -> None:
        """Wait for a gather and drop its result. Called on the lane that gathers, after `arrive` if `is_direct`, and
        after `agree` otherwise."""
        rows, buffers = self._complete(is_used=False)
        for part, arrived in zip(self.parts, rows, strict=True):
            if arrived.is_direct:
                part.whole.free()
            else:
                buffers.give(arrived)
        self.state, self._gathering = UnitState.RELEASED, None

    def addresses(self) -> set[int]:
        """Addresses of the whole parameters while they are gathered."""
        return {part.whole.address for part in self.parts if part.whole.address}

    def leave_views(self) -> None:
        """Keep the present storages for the user's views of them, before a release."""
        if not (self.is_persistent or self.is_held):
            for part in self.parts:
                part.leave_views()

    def release(self) -> None:
        """Release the whole parameters, unless the unit is persistent or held."""
        if self.state is UnitState.GATHERED and not (self.is_persistent or self.is_held):
            for part in self.parts:
                part.release()
            self.state = UnitState.RELEASED
            self.live.numel -= self.numel

    def gather_persistent(self, buffers: GatherBuffers) -> None:
        """Gather a persistent unit for good. Collective."""
        for part in self.parts:
            part.allocate()
            part.refill(buffers).wait()
        self._is_now_gathered()
        for member in self.members:
            member.parameter.ds_persist = True  # type: ignore[attr-defined]

    def _is_now_gathered(self) -> None:
        self.state = UnitState.GATHERED
        self.live.numel += self.numel

    def _complete(self, *, is_used: bool = True) -> tuple[Sequence[Rows], GatherBuffers]:
        """Wait for all ranks' rows. Returns also the pool that takes them back."""
        assert self._gathering is not None, "asked for first"
        try:
            return self._gathering.wait(is_used=is_used), self._gathering.buffers
        except RuntimeError as error:
            raise RuntimeError(f"gathering the parameters of {self.name!r} failed on this rank: {error}") from error
