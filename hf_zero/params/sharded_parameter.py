"""One sharded parameter, of which every rank holds a chunk, and its stand-in while it is not gathered.

While released, `parameter.data` is a scalar NaN expanded to the logical shape (a NaN that identifies the parameter, see
`stand_ins.py`), and the parameter's class rejects reads and writes. It takes no memory, its shape, ndim and numel are
correct, and code that bypasses the class computes NaN.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hf_zero.comm import ParallelGroups, uncompiled
from hf_zero.device.host_memory import HostHeap
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Memory
from hf_zero.layout import chunk_interval, chunk_numel
from hf_zero.offload.vector import InMemoryVector, Vector, absent
from hf_zero.params.stand_ins import REPLACE_FIX, released_class, signed_nan
from hf_zero.params.store import HANDLE

if TYPE_CHECKING:
    from hf_zero.params.sharded import ShardedParameters

HEAP = HostHeap()
_numbers = itertools.count()


class ZeroParamStatus(Enum):
    """State of a sharded parameter's values; names and numbers are DeepSpeed's."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is treated by stage 3; names and numbers are DeepSpeed's."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ShardedParameter:
    """The handle of one parameter; `of(parameter)` finds it.

    Attributes:
        shard: 1-D, ceil(numel / world) elements in the parameter's dtype: this rank's chunk, zero-padded at the end;
            NaN without memory if the chunk is stored elsewhere, see `opened`.
        kept: the stored chunk, if it is not always in memory.
        beside: with hpZ, chunks of other ranks that this rank also keeps: (number of the shard, chunk).
        name: the parameter's name in its model, if known.
        unsharded: the gathered tensor inside a unit's storage, while its unit is gathered.
        unshard_count: number of GatheredParameters contexts that hold the parameter.
        left: whole values for a graph that has saved the parameter, which has them as its data while released.
        number: stored in the NaN that the released parameter holds.
        stand_in: that NaN in the parameter's shape, its data while it is released.
        mark: that NaN, 0-dim, unless the released parameter was filled with a constant, which torch allows.
        owner: the store whose unit the parameter belongs to; None before initialize().
        as_gathered: returns the kept chunk with this number as a gather delivers it, if gathers are not exact.
    """

    def __init__(self, parameter: nn.Parameter, shard: Tensor, shape: torch.Size, groups: ParallelGroups) -> None:
        self.parameter = parameter
        self._kind = type(parameter)
        self._released_kind = released_class(self._kind) or self._kind
        self.shard = shard
        self.kept: Vector | None = None
        self._memory: Memory | None = None  # the memory of `shard`; None: its device's
        self.beside: Sequence[tuple[int, Vector]] = ()
        self.shape = shape
        self.numel = shape.numel()
        self.groups = groups
        self.name = ""
        self.unsharded: Tensor | None = None
        self._version = 0  # of the parameter when it was shown
        self.unshard_count = 0
        self.left: Tensor | None = None
        self.owner: ShardedParameters | None = None
        self.as_gathered: Callable[[int], Tensor] | None = None
        self.number = next(_numbers)
        self._set_stand_in(shard.dtype, shard.device)
        self.hide()

    @property
    def is_available(self) -> bool:
        return self.unsharded is not None or self.unshard_count > 0

    def show(self, unsharded: Tensor) -> None:
        """Set the parameter's data to its whole values."""
        self.parameter.__class__ = self._kind
        self.parameter.data = unsharded
        self._version = self.parameter._version
        self.parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

    def hide(self) -> None:
        """Replace the parameter's data by its stand-in, or by the values that a graph needs."""
        self.parameter.__class__ = self._kind
        self.parameter.data = self.stand_in if self.left is None else self.left
        self.parameter.__class__ = self._released_kind
        self.parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]

    def release(self) -> None:
        """Stop using the gathered tensor, after a write into it has been copied."""
        whole = self.unsharded
        if whole is not None and not self.unshard_count:
            parameter = self.parameter
            if parameter._version != self._version or parameter.data_ptr() != whole.data_ptr():
                self.sync_master()
        self.unsharded = None
        if not self.unshard_count:
            self.hide()

    def show_between_uses(self) -> None:
        """Show the parameter's state between uses: the unit's tensor if that is gathered, else the stand-in."""
        if self.unsharded is not None:
            self.show(self.unsharded)
        else:
            self.hide()

    @property
    def is_in_graph(self) -> bool:
        """Whether autograd has saved the parameter for a backward. It saves the parameter itself, whose data may change
        until then, or a view, such as `parameter.t()`, which keeps its memory."""
        uses: int = self.parameter._use_count() - 1  # type: ignore[attr-defined]  # in C++, besides Python's object
        return uses > int(self.parameter.requires_grad)  # one is its AccumulateGrad, which every graph of it has

    def drop_left(self, *, is_outdated: bool) -> None:
        """Drop the values left to a graph. If they are outdated, its backward raises an error, as without sharding."""
        self.left = None
        if not self.is_available:
            self.hide()
        if is_outdated:
            outdate([self])

    def note_version(self) -> None:
        """Take the present version as that of the engine's values."""
        self._version = self.parameter._version

    def sync_master(self, *, is_certain: bool = False) -> bool:
        """Copy a write into the gathered tensor, if any, to chunk and master. Returns whether there was one.

        Args:
            is_certain: whether a write is known; otherwise the parameter's version decides.

        Raises:
            RuntimeError: if the parameter's data was replaced.
        """
        if self.unsharded is None or self.unshard_count:
            return False  # the GatheredParameters context handles edits
        if self.parameter.data_ptr() != self.unsharded.data_ptr():
            _refuse_replaced(self)
        if not is_certain and self.parameter._version == self._version:
            return False
        self._version = self.parameter._version
        self._take_over(self.unsharded, only_written=True)
        if self.owner is not None:
            self.owner.edits.note(self)
        return True

    def differs(self) -> bool:
        """Whether this rank's chunk of the gathered tensor differs bitwise from the stored chunk."""
        assert self.unsharded is not None, "not gathered"
        mine = self.local_chunk(self.unsharded)
        with self.opened() as own:
            return not torch.equal(mine.view(torch.uint8), own.view(torch.uint8))

    @property
    def device(self) -> torch.device:
        """The device where the parameter is used; its chunk may be elsewhere."""
        return self.stand_in.device

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """Context that provides this rank's chunk, to be read."""
        self._finish_update()
        if self.kept is None:
            yield self.shard
            return
        with self.kept.opened() as chunk:
            yield chunk

    def view(self) -> Tensor:
        """A read-only view of this rank's chunk, valid until it changes."""
        self._finish_update()
        return self.shard if self.kept is None else self.kept.view()

    def move(self, kept: Vector, device: torch.device) -> None:
        """Store the chunk in `kept`, which already holds its values; the parameter is used on `device`."""
        at_hand, before = kept.tensor, self.kept
        self.kept, self._memory = kept if at_hand is None else None, kept.memory
        if before is not None:
            before.free()
        self.shard = absent(kept.numel, kept.dtype) if at_hand is None else at_hand
        self.parameter.ds_tensor = described_shard(self)  # type: ignore[attr-defined]
        if self.stand_in.dtype != kept.dtype or self.stand_in.device != device:
            self._set_stand_in(kept.dtype, device)
            if not self.is_available:
                self.hide()

    def cast(self, dtype: torch.dtype) -> None:
        """Change the dtype of the chunk, which is in memory from then on."""
        with self.opened() as chunk:
            self.move(InMemoryVector(chunk.to(dtype)), self.device)

    def _set_stand_in(self, dtype: torch.dtype, device: torch.device) -> None:
        # A separate scalar for each parameter: other libraries recognise tied parameters by equal addresses.
        self.mark = signed_nan(self.number, dtype, device)
        self.stand_in = self.mark.expand(self.shape)

    def local_chunk(self, unsharded: Tensor) -> Tensor:
        """This rank's chunk of `unsharded` (logical shape, any dtype), zero-padded, as a new 1-D tensor."""
        return local_chunk(unsharded, self.groups.shard.rank, self.groups.shard.size)

    @torch.no_grad()
    def write(self, unsharded: Tensor) -> None:
        """Write new values, the same on every rank, to chunk, master and the unit's gathered tensor."""
        self._take_over(unsharded)
        if self.unsharded is not None and self.unsharded.data_ptr() != unsharded.data_ptr():
            self.unsharded.copy_(unsharded)
            if self.owner is not None:
                self.owner.edits.rewritten(self)

    def chunks(self) -> list[tuple[int, Vector]]:
        """All chunks that this rank keeps, with their numbers; its own comes first."""
        self._finish_update()
        own = self.kept if self.kept is not None else InMemoryVector(self.shard, self._memory)
        return [(self.groups.shard.rank, own), *self.beside]

    def _finish_update(self) -> None:
        """Finish the last update before a chunk is read or written outside of gathers."""
        if self.owner is not None:
            self.owner.deferred.finish()

    @torch.no_grad()
    def _take_over(self, unsharded: Tensor, *, only_written: bool = False) -> None:
        """Write to the stored chunks and the own chunk's master. With `only_written`, elements that equal a gather's
        result keep their exact stored values."""
        if self.owner is not None:
            self.owner.before_write(self)
        for number, chunk in self.chunks():
            if chunk.memory.is_host and self.device.type != "meta":
                runtime_of(self.device).synchronize()  # the device may still read it for a completed gather
            part = chunk_interval(self.numel, number, self.groups.shard.size)
            written = unsharded.detach().reshape(-1)[part.start : part.stop]
            if only_written and self.as_gathered is not None:
                before = self.as_gathered(number)[: part.numel]
                with chunk.opened() as exact:
                    written = written.to(exact.device)
                    written = torch.where(written == before, exact[: part.numel], written)
            with chunk.opened(changes=True) as place:
                place[: part.numel].copy_(written)
            if number == self.groups.shard.rank and self.owner is not None:
                self.owner.edits.write_master(self, written)


def outdate(handles: Sequence[ShardedParameter]) -> None:
    """Let autograd know of new values, so that graphs of earlier ones, and of views of them, raise an error."""
    for handle in handles:
        torch.autograd.graph.increment_version(handle.parameter)  # torch 2.6 takes no list
        if handle.unsharded is not None or handle.unshard_count:
            handle.note_version()


def local_chunk(unsharded: Tensor, rank: int, world: int) -> Tensor:
    """Return `rank`'s chunk, ceil(numel / world) elements, of a tensor; zero-padded, a new 1-D tensor."""
    own = chunk_interval(unsharded.numel(), rank, world)
    shard = torch.zeros(chunk_numel(unsharded.numel(), world), dtype=unsharded.dtype, device=unsharded.device)
    shard[: own.numel].copy_(unsharded.detach().reshape(-1)[own.start : own.stop])
    return shard


def described_shard(handle: ShardedParameter) -> Tensor:
    shard = handle.shard.detach()
    shard.ds_numel = shard.numel()  # type: ignore[attr-defined]
    shard.status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    return shard


def _refuse_replaced(handle: ShardedParameter) -> NoReturn:
    values = handle.parameter.data
    handle.show_between_uses()  # so that calls after the error, such as destroy(), still work
    raise RuntimeError(
        f"the data of parameter {handle.name or tuple(handle.shape)!r} was replaced (parameter.data = ..., .to(), "
        f".half()) by a tensor of shape {tuple(values.shape)} and {values.dtype}: ZeRO stage 3 keeps its shards "
        f"elsewhere, in {handle.shard.dtype}, and the engine's updates no longer reach it. {REPLACE_FIX}"
    )


# Hooks of modules.


HOOK: CodeType = uncompiled(lambda: None).__code__  # of what torch calls as a hook of ours


def _is_ours(hook: object) -> bool:
    return getattr(hook, "__code__", None) is HOOK


# Detects reads of a module's parameter that is not gathered.


class ReadHookedParameters(dict[str, Any]):
    """A module's `_parameters`. `module.weight` looks up a name here, which detects reads; a copy of the module gets a
    plain dict.

    Iteration (`parameters()`, `state_dict()`) does not count as a read, because it does not call `__getitem__`.
    """

    on_read: Callable[[ShardedParameter], None]
    hooks: tuple[dict[int, Any], ...]  # the module's, ours among them

    def __getitem__(self, name: str) -> Any:
        parameter = dict.__getitem__(self, name)
        if parameter is not None:
            handle = getattr(parameter, HANDLE, None)  # `of`, without a call
            if handle is not None and handle.unsharded is None and not handle.unshard_count:
                if handle.parameter is parameter:
                    self.on_read(handle)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """For a copy of the module, whose hooks come after its parameters: ours would gather what it is a copy of."""
        import copy

        ours = {number for hooks in self.hooks for number, hook in hooks.items() if _is_ours(hook)}
        for hooks in self.hooks:
            kept = [(number, copy.deepcopy(hook, memo)) for number, hook in hooks.items() if number not in ours]
            memo[id(hooks)] = OrderedDict(kept)
        return {name: copy.deepcopy(parameter, memo) for name, parameter in self.items()}

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "a model with ZeRO stage 3 cannot be pickled, nor saved by torch.save(model): pickle a copy of it, made on "
            "every rank by `with hf_zero.gathered(model): copied = copy.deepcopy(model)`, or take the weights alone "
            "from accelerator.get_state_dict(model) or trainer.save_model()"
        )


class ReadHooks:
    """Watches modules on behalf of one reader."""

    def __init__(self, on_read: Callable[[ShardedParameter], None]) -> None:
        self._on_read = on_read
        self._watched: list[weakref.ref[nn.Module]] = []

    def watch(self, module: nn.Module) -> None:
        """Report reads of `module`'s own parameters, replacing an earlier watcher."""
        read_hooked = ReadHookedParameters(module._parameters)
        read_hooked.on_read = self._on_read
        read_hooked.hooks = module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called
        module.__dict__["_parameters"] = read_hooked
        self._watched.append(weakref.ref(module))

    def unwatch(self) -> None:
        """Stop watching all modules."""
        for module in [reference() for reference in self._watched]:
            if module is not None and isinstance(module._parameters, ReadHookedParameters):
                module.__dict__["_parameters"] = dict(module._parameters)
        self._watched = []
