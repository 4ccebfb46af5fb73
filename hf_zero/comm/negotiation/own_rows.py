"""The rows that this rank sends in gathers of stage 3: for its own requests, and for those of other ranks.

    engine          registers its units              EngineRows, in the RowTable of the negotiation
    request         opens the unit's rows            number of the unit -> rows, read on the lane that gathers
    decision        opens the same rows              for another rank, which has requested them

So a rank can send every row that it has without asking the engine, at any time between two updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hf_zero.comm.negotiation.requests import Kind, Request
from hf_zero.comm.rows import GatherBuffers, OutsideAutograd, Rows
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE, Event

if TYPE_CHECKING:
    from hf_zero.comm.collectives import Collectives
    from hf_zero.comm.quantized import PlainRows


class StoredRow(Protocol):
    """A row in some storage. `hf_zero.offload.vector` says what these methods mean."""

    def fetch(self) -> None: ...

    def take(self) -> Tensor: ...

    def release(self, *, changed: bool) -> None: ...


class Place(Protocol):
    """Where a gather writes the rows of a part, piece by piece, so that nothing is unpacked.

    Attributes:
        sizes: elements of the pieces of a row; the same on all ranks.
    """

    sizes: tuple[int, ...]

    def open(self) -> Sequence[Tensor]:
        """Allocate the memory. Returns the whole that the pieces make, for each piece (1-D)."""


class OwnRow:
    """This rank's row of one part of a unit; with hpZ all rows that it keeps.

    Attributes:
        place: where gathers that this rank reads write; None: in a buffer.
        stays: whether the row is always on the device in the form in which it is sent, so that nothing is put back.
        update: called before the next read of the row, which it brings up to date; None: it is.
    """

    def __init__(
        self,
        stored: StoredRow,
        form: PlainRows,
        device: torch.device,
        num_kept: int = 1,
        place: Place | None = None,
        *,
        stays: bool = False,
    ) -> None:
        """
        Args:
            stored: the rows, in a storage that fetches them to `device`, which gathers.
            form: how they are sent.
        """
        self.place = place
        self.stays = stays
        self._stored = stored
        self._form = form
        self._device = device
        self._num_kept = num_kept
        self.update: Callable[[], None] | None = None
        self._is_fetched = False
        self._sent: Tensor | None = None  # as gathers send it, until `put_back`

    def fetch(self) -> None:
        """Start copying the row to the device that gathers, if it is up to date."""
        if not self._is_fetched and self.update is None:
            self._is_fetched = True
            self._stored.fetch()

    def open(self) -> Tensor:
        """The row as gathers send it (1-D), on the device that gathers, until `put_back`."""
        if self.update is not None:
            update, self.update = self.update, None
            update()
        self.fetch()
        if self._sent is None:
            self._sent = self._form.sent(self._stored.take().view(self._num_kept, -1)).view(-1)
        return self._sent

    def put_back(self) -> None:
        """Undo `fetch`, because the row is no longer needed. Called on the lane that gathers: a row may be read again
        for another rank after its own gather, which is all that compute has waited for."""
        if self._sent is not None and not self._form.is_exact:
            runtime = runtime_of(self._device)
            runtime.keep_until(runtime.record(), self._sent)  # a message, which gathers may still read
        self._sent = None
        if self._is_fetched:
            self._is_fetched = False
            self._stored.release(changed=False)


class UnitRows:
    """This rank's rows of one unit, one per part (the same sizes on all ranks).

    Attributes:
        name: the unit's name, for messages.
        is_awaited: whether a gather that this rank has requested still reads them.
        are_open: whether `put_back` has anything to undo.
        places: where gathers of each part write; None: in a buffer.
        sizes: of the pieces of each part's row that are gathered one by one, if any; the same on all ranks.
    """

    def __init__(self, name: str, parts: Sequence[OwnRow]) -> None:
        self.name = name
        self.is_awaited = False
        self.are_open = False
        self._stay = all(part.stays for part in parts)
        self._parts = tuple(parts)
        self.places = tuple(part.place for part in parts)
        self.sizes = tuple(() if place is None else place.sizes for place in self.places)

    def fetch(self) -> None:
        """Prepare to open them soon."""
        self.are_open = not self._stay
        for part in self._parts:
            part.fetch()

    def open(self) -> list[Tensor]:
        """The rows, until `put_back`. Runs outside of inference mode, because its buffers outlive that mode."""
        self.are_open = not self._stay
        with OutsideAutograd():
            return [part.open() for part in self._parts]

    def put_back(self) -> None:
        """Undo `fetch` and `open`, unless a gather still reads the rows. Called on the lane that gathers."""
        if not self.is_awaited:
            self.are_open = False
            for part in self._parts:
                part.put_back()


class EngineRows:
    """The rows of one engine's units, and what orders their use by gathers and by updates.

    Attributes:
        units: by their place in the engine.
        buffers: for rows that arrive.
    """

    def __init__(self, units: Sequence[UnitRows], group: Collectives, device: torch.device) -> None:
        """`group`: gathers the rows, on `device`."""
        self.units = tuple(units)
        self.buffers = GatherBuffers(device)
        self._group = group
        self._runtime = runtime_of(device)
        self._written: Event | None = None  # None: not yet recorded
        self._sent: Event = DONE  # when other ranks have this rank's rows; compute has not waited for it

    def lane(self) -> AbstractContextManager[None]:
        """Context for work of the gather lane that does not wait for compute."""
        return gather_lane(self._group, self._runtime.device, DONE)

    # For gathers

    def open(self, place: int) -> list[Tensor]:
        """The rows of a unit, until it is put back."""
        if self._written is None:
            self._written = self._runtime.record()
        with gather_lane(self._group, self._runtime.device, self._written):
            return self.units[place].open()

    def close(self, place: int) -> None:
        """Put back rows that were opened for another rank."""
        with self.lane():
            self.units[place].put_back()
            self.mark_sent()

    def take_unread(self, numel: int, row: Tensor) -> Tensor:
        """A buffer for rows that this rank does not read. On an accelerator it belongs to the gather lane, so that
        others do not wait for the compute of this rank."""
        return (self.buffers.take_unread if self._group.has_gather_lane else self.buffers.take)(numel, row)

    def give_unread(self, rows: Rows) -> None:
        """Return rows in such a buffer; on a CPU, wait for them first."""
        if not self._group.has_gather_lane:
            rows.wait()
            self.buffers.give(rows)

    # For the engine

    @contextmanager
    def writing_beside(self) -> Iterator[None]:
        """Context for changes of rows beside compute: on the lane that gathers, so that gathers read them without a
        wait. Compute calls `join` before it reads them."""
        with gather_lane(self._group, self._runtime.device):
            yield
            self.mark_sent()

    def join(self) -> None:
        """Make compute wait for what the gather lane has read and written so far."""
        self._runtime.wait(self._sent)

    def mark_sent(self) -> None:
        """Make the next change of rows wait for what the gather lane has sent so far. Called on that lane."""
        self._sent = self._runtime.record()

    def about_to_write(self) -> None:
        """Make compute wait until gathers for other ranks have read this rank's rows. The next gather waits for what is
        written then."""
        self.join()
        self._sent = DONE
        self._written = None

    def are_written(self) -> None:
        """Make gathers wait for everything queued on the compute stream so far, and for nothing later: others may need
        a row before they take part in a collective for which this rank's compute waits."""
        self._written = self._runtime.record()


def gather_lane(group: Collectives, device: torch.device, after: Event | None = None) -> AbstractContextManager[None]:
    """Context that prepares and gathers rows on `device`, on a separate lane if there is one.

    Args:
        group: the group of the gathers.
        after: see `Runtime.gather_lane`.
    """
    return runtime_of(device).gather_lane(after) if group.has_gather_lane else nullcontext()


class RowTable:
    """The rows of all engines' units. Units are numbered in order of registration."""

    def __init__(self) -> None:
        # The engine of each unit and its place there; weak references, so that dropped engines are freed.
        self._known: list[tuple[weakref.ref[EngineRows], int] | None] = []

    def register(self, engine: EngineRows) -> int:
        """Register an engine's units and return the number of the first. Ranks register the same units in the same
        order."""
        first = len(self._known)
        self._known.extend((weakref.ref(engine), place) for place in range(len(engine.units)))
        return first

    def forget(self, first: int, num_units: int) -> None:
        """Unregister the units of an engine."""
        self._known[first : first + num_units] = [None] * num_units

    def is_gone(self, unit: int) -> bool:
        known = self._known[unit]
        return known is None or known[0]() is None

    def find(self, unit: int) -> tuple[EngineRows, int]:
        """The rows of a unit's engine, and the unit's place there."""
        known = self._known[unit]
        engine = known[0]() if known is not None else None
        if known is None or engine is None:
            raise RuntimeError(
                "another rank gathers parameters of an engine that this rank has destroyed: keep an engine on all "
                "ranks as long as any rank uses it"
            )
        return engine, known[1]

    def describe(self, head: Request) -> str:
        """Describe a rank with this request, for messages."""
        state = f"after {head.version} updates and {head.launched} reductions"
        if head.kind is Kind.GATHER:
            return f"gathers {self._name(head.unit)!r} in {'backward' if head.in_backward else 'forward'} {state}"
        if head.kind is Kind.STEP:
            return f"is about to update the model of {self._name(head.unit)!r} {state}"
        return f"{'is at the end of a pass' if head.kind is Kind.END else 'waits for a message'} {state}"

    def contradiction(self, ranks: Sequence[int], heads: Sequence[Request]) -> str:
        asked = "; ".join(f"rank {rank} {self.describe(head)}" for rank, head in zip(ranks, heads, strict=True))
        return (
            f"ranks are in different calls: {asked}. Between two updates, every rank must run the same number of "
            "backward passes and the same calls that gather parameters (GatheredParameters, state dicts, saving)."
        )

    def _name(self, unit: int) -> str:
        engine, place = self.find(unit)
        return engine.units[place].name
