"""The collectives that the engine needs: a small base class, with one file per implementation."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from hf_zero.comm.ledger import Call, ledger
from hf_zero.comm.negotiation.gathering import AlikeNegotiation, Negotiation
from hf_zero.comm.rows import DirectRows, FlatRows, Pending, Rows, Together, num_bytes, own_shard

MAX_SEND_BUFFERS = 2  # one being reduced, one being filled
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Exclude a communicating function from compiled code, like `torch.compiler.disable`, but without importing the
    compiler, which takes seconds; before it is imported nothing could compile the function, nor while no compiled code
    is running."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _callback_of_compiler() is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # tracing stops before `run`, not inside
    _never_compile(run.__code__)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _callback_of_dynamo() -> object:
    return sys.modules.get("torch._dynamo")


# What the compiler calls for each new frame of Python; None while it is not active. (torch 2.6 does not tell.)
_callback_of_compiler: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", _callback_of_dynamo)


def outside_transforms(function: F) -> F:
    """Run a communicating function, which a hook may call inside of torch.func's transforms (grad, vmap), outside of
    them: its tensors are not part of what is transformed, and outlive it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # torch.func has loaded it

        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _never_compile(code: CodeType) -> None:
    """Exclude a function that is called between compiled parts, such as a hook of a compiled module. Uses a part of the
    compiler that is always loaded."""
    if hasattr(eval_frame, "set_code_exec_strategy"):
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    elif hasattr(eval_frame, "skip_code"):  # torch 2.6
        eval_frame.skip_code(code)


class Channel(IntEnum):
    """Streams of collectives that may interleave differently on different ranks; each has the same order everywhere."""

    REDUCE = 0  # gradients, the step, setup
    GATHER = 1  # parameters of stage 3, gathered around their use
    ACCESS = 2  # parameters that the user gathers
    LAYERS = 3  # exchanges of layers in forward and backward


class ControlMessages(ABC):
    """Small control messages of one group of ranks, counted separately from payload traffic.

    Attributes:
        rank: this rank's number in the group.
        size: number of ranks.
        ranks: global ranks, in the order of the group.
        num_beside: number of ranks on this rank's host, including itself.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: default: the first `size` ranks."""
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self.num_beside = size

    def sum_small(self, values: Tensor) -> None:
        """Sum a small vector over all ranks in place, and wait for it."""
        with self._booked(num_bytes(values)):
            self._sum_small(values)

    def sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        """Sum `values` (1-D, fp64, in place) and `facts`, which hosts know, over all ranks. Returns the summed facts.

        If `values` are on an accelerator, their sum may still be in flight on return: hosts exchange `facts` separately
        and do not wait for the device.
        """
        size = num_bytes(values) + len(facts) * values.element_size()
        with self._booked(size):
            return self._sum_with_facts(values, facts)

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        """Send everything in one message, because all of it is in host memory."""
        message = torch.cat([values, torch.tensor(facts, dtype=values.dtype, device="cpu")])
        self._sum_small(message)
        values.copy_(message[: values.numel()])
        return message[values.numel() :].tolist()

    @abstractmethod
    def gather_objects(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order (small Python objects, only for setup)."""

    @abstractmethod
    def _sum_small(self, values: Tensor) -> None: ...

    @contextmanager
    def _booked(self, size: int) -> Iterator[None]:
        with ledger.phase("control"), ledger.call("all_reduce", size, num_ranks=self.size, num_beside=self.num_beside):
            yield


class Collectives(ControlMessages):
    """Sums and gathers of tensors over one group of ranks, and their control messages.

    Reductions always SUM; callers that need a mean divide, because gloo does not average reliably. Flat buffers have a
    multiple of `size` elements; rank r owns the r-th of `size` equal shards.

    Attributes:
        negotiation: how ranks agree on the gathers of stage 3.
        has_gather_lane: whether gathers of rows run on the device's gather lane.
        starts_at_once: whether a reduction starts without waiting for other ranks, and ends without this rank.
        gathers_at_once: the same for a gather of weights.
        moves_pieces: whether several tensors in one group of collectives are as fast as one tensor.
    """

    has_gather_lane = False
    starts_at_once = False
    gathers_at_once = False
    moves_pieces = False

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: default: the first `size` ranks."""
        super().__init__(rank, size, ranks)
        self.negotiation: Negotiation = AlikeNegotiation(self)
        self._send_buffers: list[Tensor] = []

    def take_send_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer (1-D) to fill and reduce from, which saves a copy with shared memory.

        There are at most MAX_SEND_BUFFERS; if necessary this waits for one.

        Args:
            numel: the same for all buffers of a dtype, so that they can be reused.
        """
        for index, candidate in enumerate(self._send_buffers):
            if candidate.dtype == dtype and candidate.numel() >= numel:
                return self._send_buffers.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def give_send_buffer(self, buffer: Tensor) -> None:
        """Return `buffer`, whose reduction has arrived and been read."""
        if len(self._send_buffers) < MAX_SEND_BUFFERS:
            self._send_buffers.append(buffer)

    def all_reduce(self, flat: Tensor) -> Pending:
        """Sum `flat` over all ranks, in place."""
        with _counted(self, "all_reduce", num_bytes(flat)) as call:
            return call.follow(self._all_reduce(flat), flat)

    def new_subject(self) -> int:
        """A number for a new caller; the same on all ranks if all create the same callers."""
        return 0

    def about(self, subject: int, backward: int, bucket: int) -> None:
        """Describe the next call, which ranks compare if messages have room for it."""
        return None

    def reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        """Sum `flat` over all ranks and write this rank's shard of the sum to `shard`. `flat` becomes undefined."""
        with _counted(self, "reduce_scatter", num_bytes(flat)) as call:
            return call.follow(self._reduce_scatter(shard, flat), flat)

    def reduce_scatter_pieces(self, shard: Tensor, sizes: Sequence[int], wholes: Sequence[Tensor]) -> Pending:
        """Like `reduce_scatter` for each of `wholes` (1-D) and its piece of `shard`, as one group of collectives.

        Args:
            sizes: elements of the pieces.
            wholes: must not change until the group has ended.
        """
        with _counted(self, "reduce_scatter", num_bytes(shard) * self.size) as call:
            return call.follow(self._reduce_scatter_pieces(shard.split_with_sizes(sizes), wholes), shard)

    def _reduce_scatter_pieces(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending:
        return Together([self._reduce_scatter(shard, whole) for shard, whole in zip(shards, wholes, strict=True)])

    def all_gather(self, flat: Tensor) -> Pending:
        """Fill every other rank's shard of `flat` from its owner, in place; the own shard is already filled."""
        with _counted(self, "all_gather", num_bytes(flat)) as call:
            return call.follow(self._all_gather(flat), flat)

    def gather_rows(self, row: Tensor, take: Callable[[int], Tensor]) -> Rows:
        """Start gathering every rank's `row` (1-D, the same length everywhere) into a buffer.

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

    def _gather_pieces(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor], buffer: Tensor | None = None) -> Rows:
        """Start gathering each of every rank's `pieces` (1-D) into one of `wholes`, in rank order.

        Args:
            buffer: holds `wholes` if nobody uses them.
        """
        for piece, whole in zip(pieces, wholes, strict=True):
            own_shard(whole, self.rank, self.size).copy_(piece)
        return DirectRows(buffer, Together([self._all_gather(whole) for whole in wholes]))

    def exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        """Start sending the r-th of `world` equal shards of `flat` (1-D) to rank r.

        Args:
            flat: must not change until the rows have arrived.
            take: gives a buffer of at least so many elements; not asked where none is needed.

        Returns:
            The rows that all ranks have sent to this rank.
        """
        with _counted(self, "all_to_all", num_bytes(flat)) as call:
            return call.follow_rows(self._exchange_rows(flat, take), flat)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Send `sent[r]` to rank r, fill `received[r]` from it, and wait. 1-D, any sizes, one dtype.

        Sizes must agree between sender and receiver; empty tensors are not sent. The own part is copied.
        """
        with _counted(self, "all_to_all", sum(num_bytes(tensor) for tensor in sent)):
            received[self.rank].copy_(sent[self.rank])
            self._all_to_all(received, sent)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with the values of rank `source`, and wait."""
        for tensor in tensors:
            with _counted(self, "broadcast", num_bytes(tensor)):
                self._broadcast(tensor, source)

    def buffers(self) -> list[Tensor]:
        """Memory of this rank that is kept between calls."""
        return self._send_buffers

    @abstractmethod
    def _all_reduce(self, flat: Tensor) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending: ...

    @abstractmethod
    def _all_gather(self, flat: Tensor) -> Pending: ...

    @abstractmethod
    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Exchange all parts except the own one."""

    @abstractmethod
    def _exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> None: ...


def _counted(group: Collectives, operation: str, *sizes: int) -> Call:
    return ledger.call(operation, *sizes, num_ranks=group.size, num_beside=group.num_beside)


class LoneCollectives(Collectives):
    """A group of one rank: sums and gathers are no-ops."""

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
