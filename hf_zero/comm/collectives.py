"""The few collectives the engine needs, as one small base class with one file per way of doing them."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from hf_zero.comm.ledger import Call, ledger
from hf_zero.comm.negotiation import Decision, Gathering, Kind, Negotiation, Source
from hf_zero.comm.rows import FlatRows, Pending, Rows, num_bytes, own_shard
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE, Event

MAX_SEND_BUFFERS = 2  # one whose reduction is under way, one that is being filled
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Keep a function that communicates out of compiled code: `torch.compiler.disable`, once something has loaded the
    compiler, which takes seconds. Until then there is nothing that could compile it."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # tracing stops before `run`, not inside
    _never_compile(run.__code__)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _never_compile(code: CodeType) -> None:
    """Keep the compiler from a function that is called between compiled parts: a hook of a compiled module. Asked of
    the part of it that is always there, so that it need not be loaded."""
    if hasattr(eval_frame, "set_code_exec_strategy"):
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    elif hasattr(eval_frame, "skip_code"):  # torch 2.6
        eval_frame.skip_code(code)


class Channel(IntEnum):
    """Streams of collectives that may interleave differently on different ranks; within one the order is the same."""

    REDUCE = 0  # gradients, the step, set-up
    GATHER = 1  # parameters of stage 3, gathered around their use
    ACCESS = 2  # parameters that the user gathers
    LAYERS = 3  # what layers exchange in forward and backward


class ControlMessages(ABC):
    """One group of ranks as far as it decides together. Booked apart from the payload traffic.

    Attributes:
        rank: this one's place in the group.
        size: number of ranks.
        ranks: of the world, in the order of the group.
        num_beside: how many of them are on this rank's host, itself among them.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: default the first `size` ones."""
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self.num_beside = size

    def sum_small(self, values: Tensor) -> None:
        """Sum a small vector over all ranks, in place; returns when done."""
        with self._booked(num_bytes(values)):
            self._sum_small(values)

    def sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        """Sum `values` (1-D, fp64, in place) and `facts`, which the hosts know, over all ranks; returns the latter.

        Where `values` lie on an accelerator they are only on their way when this returns: hosts exchange `facts` by
        themselves, and wait for no device.
        """
        size = num_bytes(values) + len(facts) * values.element_size()
        with self._booked(size):
            return self._sum_with_facts(values, facts)

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        """All in one message, because all of it is in host memory."""
        message = torch.cat([values, torch.tensor(facts, dtype=values.dtype, device="cpu")])
        self._sum_small(message)
        values.copy_(message[: values.numel()])
        return message[values.numel() :].tolist()

    @abstractmethod
    def gather_objects(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order (small Python objects, set-up only)."""

    @abstractmethod
    def _sum_small(self, values: Tensor) -> None: ...

    @contextmanager
    def _booked(self, size: int) -> Iterator[None]:
        with ledger.phase("control"), ledger.call("all_reduce", size, num_ranks=self.size, num_beside=self.num_beside):
            yield


class Collectives(ControlMessages):
    """Sums and gathers of tensors over one group of ranks, and what else they tell each other.

    Reductions always SUM; callers that want a mean divide, because averaging inside a backend is not reliable on
    gloo. Flat buffers have a multiple of `size` elements; rank r owns the r-th of `size` equal shards.

    Attributes:
        negotiation: how ranks agree on the gathers of stage 3.
        has_gather_lane: gathers of rows are asked of the device's lane for them.
    """

    has_gather_lane = False

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: default the first `size` ones."""
        super().__init__(rank, size, ranks)
        self.negotiation: Negotiation = AlikeNegotiation(self)
        self._send_buffers: list[Tensor] = []

    def take_send_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer (1-D) to fill and reduce from, which saves a copy where data change hands in shared memory.

        There are at most MAX_SEND_BUFFERS of those; one is waited for if need be.

        Args:
            numel: the same for all buffers of a dtype, so that few of them rotate.
        """
        for index, candidate in enumerate(self._send_buffers):
            if candidate.dtype == dtype and candidate.numel() >= numel:
                return self._send_buffers.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def give_send_buffer(self, buffer: Tensor) -> None:
        """Return `buffer`: its reduction has arrived and has been read."""
        if len(self._send_buffers) < MAX_SEND_BUFFERS:
            self._send_buffers.append(buffer)

    def all_reduce(self, flat: Tensor) -> Pending:
        """Sum `flat` over all ranks, in place."""
        with _counted(self, "all_reduce", num_bytes(flat)) as call:
            return call.follow(self._all_reduce(flat), flat)

    def new_subject(self) -> int:
        """A number for something that makes calls; the same on all ranks, if all make the same things."""
        return 0

    def about(self, subject: int, backward: int, bucket: int) -> None:
        """Say what the next call is about; ranks compare it where messages have room for it."""
        return None

    def reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        """Sum `flat` over all ranks and leave this rank's shard of the result in `shard`. `flat` is left undefined."""
        with _counted(self, "reduce_scatter", num_bytes(flat)) as call:
            return call.follow(self._reduce_scatter(shard, flat), flat)

    def all_gather(self, flat: Tensor) -> Pending:
        """Fill every other rank's shard of `flat` from its owner, in place; the own shard is already right."""
        with _counted(self, "all_gather", num_bytes(flat)) as call:
            return call.follow(self._all_gather(flat), flat)

    def gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        """Start to gather every rank's `row` (1-D, the same length everywhere) into a buffer.

        Args:
            take: gives a buffer of at least so many elements; not asked where none is needed.
        """
        with _counted(self, "all_gather", num_bytes(row) * self.size) as call:
            return call.follow_rows(self._gather_rows(row, take), row)

    def _gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        buffer = take(row.numel() * self.size)
        flat = buffer.narrow(0, 0, row.numel() * self.size)
        own_shard(flat, self.rank, self.size).copy_(row)
        return FlatRows(buffer, flat, self.size, self._all_gather(flat))

    def exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        """Start to send the r-th of `world` equal shards of `flat` (1-D) to rank r.

        Args:
            flat: stays as it is until the rows have arrived.
            take: gives a buffer of at least so many elements; not asked where none is needed.

        Returns:
            What every rank has sent to this one.
        """
        with _counted(self, "all_to_all", num_bytes(flat)) as call:
            return call.follow_rows(self._exchange_rows(flat, take), flat)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Send `sent[r]` to rank r and fill `received[r]` from it; returns when done. 1-D, any sizes, one dtype.

        Sizes must agree between sender and receiver; empty tensors travel nowhere. The own part is copied.
        """
        with _counted(self, "all_to_all", sum(num_bytes(tensor) for tensor in sent)):
            received[self.rank].copy_(sent[self.rank])
            self._all_to_all(received, sent)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with the values of rank `source`; returns when done."""
        for tensor in tensors:
            with _counted(self, "broadcast", num_bytes(tensor)):
                self._broadcast(tensor, source)

    def buffers(self) -> list[Tensor]:
        """Memory of this rank's that is kept from call to call."""
        return self._send_buffers

    @abstractmethod
    def _all_reduce(self, flat: Tensor) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending: ...

    @abstractmethod
    def _all_gather(self, flat: Tensor) -> Pending: ...

    @abstractmethod
    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Everything but the own part."""

    @abstractmethod
    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> None: ...


def _counted(group: Collectives, operation: str, *sizes: int) -> Call:
    return ledger.call(operation, *sizes, num_ranks=group.size, num_beside=group.num_beside)


class LoneCollectives(Collectives):
    """A group of one: every sum is what it was, every gather is complete."""

    def __init__(self, rank_in_world: int = 0) -> None:
        super().__init__(rank=0, size=1, ranks=(rank_in_world,))

    def gather_objects(self, value: object) -> list[object]:
        return [value]

    def _all_reduce(self, flat: Tensor) -> Pending:
        return Pending()

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        if shard.data_ptr() != flat.data_ptr():
            shard.copy_(flat)
        return Pending()

    def _all_gather(self, flat: Tensor) -> Pending:
        return Pending()

    def _gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        return FlatRows(None, row, 1, Pending())

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        return None

    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        return FlatRows(None, flat, 1, Pending())

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        return None

    def _sum_small(self, values: Tensor) -> None:
        return None

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        return list(facts)


def gather_lane(group: Collectives, device: torch.device, after: Event | None = None) -> AbstractContextManager[None]:
    """Inside, rows on `device` are prepared for a gather, and gathered: on a lane of their own where there is one.

    Args:
        group: whose gathers they are.
        after: see `Runtime.gather_lane`.
    """
    return runtime_of(device).gather_lane(after) if group.has_gather_lane else nullcontext()


def start_gather(collectives: Collectives, source: Source, rows: Sequence[Tensor]) -> list[Rows]:
    """Gather the rows that `source` has opened, beside what is computed."""

    def take(row: Tensor, numel: int) -> Tensor:
        return source.take_buffer(numel, row)

    with gather_lane(collectives, rows[0].device, DONE):
        return [collectives._gather_rows(row, partial(take, row)) for row in rows]


class AlikeNegotiation(Negotiation):
    """For a world of one, and where all ranks are known to do the same: nothing to agree on."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives.rank, collectives.ranks)
        self._collectives = collectives

    def _ask(self, gathering: Gathering, rows: Sequence[Tensor]) -> None:
        gathering.decision = self._agreed([gathering.request] * self.size)
        if gathering.request.kind is Kind.GATHER:
            source, _ = self.sources.find(gathering.request.unit)
            gathering.rows = start_gather(self._collectives, source, rows)
            gathering.call.started(gathering.rows, rows)

    def settle(self, gathering: Gathering) -> Decision:
        assert gathering.decision is not None, "everything is decided at once"
        return gathering.decision
