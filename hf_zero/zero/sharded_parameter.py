"""One parameter of which every rank holds a chunk, and what stands in for it while it is not gathered.

Released means: `parameter.data` is a broadcast scalar NaN of the logical shape. It takes no memory, its shape, ndim and
numel are true, what is computed from it is unmistakable, and writing into it raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.kernels.rows import read_rows
from hf_zero.layout import chunk_numel
from hf_zero.memory.failures import meet
from hf_zero.memory.host_heap import HostHeap
from hf_zero.memory.vector import Vector, absent

TOGETHER_NUMEL = 1 << 20  # what travels as one
_HANDLE = "hf_zero_shard"
_CALLABLES = (
    "all_gather",
    "partition",
    "convert_to_zero_parameters",
    "partition_numel",
    "aligned_size",
    "padding_size",
    "__deepcopy__",
)
_ids = itertools.count()
HEAP = HostHeap()


class ZeroParamStatus(Enum):
    """Where a sharded parameter's values are; names and numbers are DeepSpeed's."""

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
            NaN without memory where the chunk is kept elsewhere, see `opened`.
        kept: the chunk, where it is not always at hand.
        name: the parameter's name in its model, as far as known.
        whole: the gathered tensor inside a unit's storage, while its unit is gathered.
        holds: how many GatheredParameters contexts hold the parameter.
        write_master: overwrites the beginning of this rank's chunk of the masters, where the parameter is trained.
        owner: the store whose unit the parameter belongs to; None before initialize().
    """

    def __init__(self, parameter: nn.Parameter, shard: Tensor, shape: torch.Size, collectives: Collectives) -> None:
        self.parameter = parameter
        self.shard = shard
        self.kept: Vector | None = None
        self.shape = shape
        self.numel = shape.numel()
        self.collectives = collectives
        self.name = ""
        self.whole: Tensor | None = None
        self.holds = 0
        self.write_master: Callable[[Tensor], None] | None = None
        self.owner: Any = None
        self.stand_in = _stand_in(shape, shard.dtype, shard.device)
        _describe(self)
        self.hide()

    @property
    def is_available(self) -> bool:
        return self.whole is not None or self.holds > 0

    def show(self, whole: Tensor) -> None:
        """Let the parameter have its values."""
        self.parameter.data = whole
        self.parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

    def hide(self) -> None:
        self.parameter.data = self.stand_in
        self.parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]

    def rest(self) -> None:
        """Show what nobody holds as it is between uses: the unit's tensor if that is gathered, else the stand-in."""
        if self.whole is not None:
            self.show(self.whole)
        else:
            self.hide()

    @property
    def device(self) -> torch.device:
        """Where the parameter is used; its chunk may be elsewhere."""
        return self.stand_in.device

    @contextmanager
    def opened(self, *, changes: bool = False) -> Iterator[Tensor]:
        """This rank's chunk with its values."""
        if self.kept is None:
            yield self.shard
            return
        with self.kept.opened(changes=changes) as chunk:
            yield chunk

    def view(self) -> Tensor:
        """This rank's chunk, only to be read, and only until it changes."""
        return self.shard if self.kept is None else self.kept.view()

    def move(self, kept: Vector, device: torch.device) -> None:
        """Keep the chunk in `kept`, which holds the right values; the parameter is used on `device`."""
        resident, before = kept.resident, self.kept
        self.kept = kept if resident is None else None
        if before is not None:
            before.free()
        self.shard = absent(kept.numel, kept.dtype) if resident is None else resident
        self.parameter.ds_tensor = _described_shard(self)  # type: ignore[attr-defined]
        if self.stand_in.dtype != kept.dtype or self.stand_in.device != device:
            self.stand_in = _stand_in(self.shape, kept.dtype, device)
            if not self.is_available:
                self.hide()

    @property
    def mark(self) -> Tensor:
        """0-dim: NaN, unless somebody has filled the released parameter with a constant (torch lets that pass)."""
        return self.stand_in.as_strided((), ())

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's chunk of `whole` (logical shape, any dtype), zero-padded, as a new 1-D tensor."""
        return cut_chunk(whole, self.collectives.rank, self.collectives.world)

    @torch.no_grad()
    def write(self, whole: Tensor) -> None:
        """Take over new values (the same on every rank): chunk, master and the unit's gathered tensor."""
        chunk = self.shard.numel()
        mine = whole.detach().reshape(-1)[min(self.collectives.rank * chunk, self.numel) :][:chunk]
        with self.opened(changes=True) as own:
            own[: mine.numel()].copy_(mine)
        if self.write_master is not None:
            self.write_master(mine)
        if self.whole is not None and self.whole.data_ptr() != whole.data_ptr():
            self.whole.copy_(whole)


def _stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A scalar of its own for each: equal addresses are how others recognise tied parameters.
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def of(parameter: Tensor) -> ShardedParameter | None:
    """The handle of `parameter`; None when it is not sharded."""
    handle = getattr(parameter, _HANDLE, None)
    return handle if handle is not None and handle.parameter is parameter else None


@torch.no_grad()
def shard_parameter(
    parameter: nn.Parameter, collectives: Collectives, *, dtype: torch.dtype | None = None, broadcast: bool = True
) -> ShardedParameter:
    """Keep this rank's chunk of `parameter` and release the rest. Collective when `broadcast`: rank 0's values win.

    Args:
        dtype: of the chunk; default the parameter's own.
    """
    values, shape = parameter.detach(), parameter.shape
    if broadcast and collectives.world > 1:
        shard = _chunk_of_rank_0(values, collectives)
    else:
        shard = cut_chunk(values, collectives.rank, collectives.world)
    return ShardedParameter(parameter, shard.to(dtype or parameter.dtype), shape, collectives)


def _chunk_of_rank_0(values: Tensor, collectives: Collectives) -> Tensor:
    """This rank's chunk of what rank 0 has. It travels in pieces: a second copy of `values` may be one too many."""
    flat, chunk = values.reshape(-1), chunk_numel(values.numel(), collectives.world)
    begin = collectives.rank * chunk
    shard = torch.zeros(chunk, dtype=values.dtype, device=values.device)
    for start in range(0, flat.numel(), TOGETHER_NUMEL):
        piece = flat[start : start + TOGETHER_NUMEL].clone()
        collectives.broadcast([piece])
        first, last = max(start, begin), min(start + piece.numel(), begin + chunk)
        if first < last:
            shard[first - begin : last - begin].copy_(piece[first - start : last - start])
    return shard


def cut_chunk(whole: Tensor, rank: int, world: int) -> Tensor:
    """`rank`'s chunk of a tensor that is cut into ceil(numel / world) elements each; zero-padded, a new 1-D tensor."""
    chunk = chunk_numel(whole.numel(), world)
    flat = whole.detach().reshape(-1)
    mine = flat[min(rank * chunk, flat.numel()) : (rank + 1) * chunk]
    shard = torch.zeros(chunk, dtype=whole.dtype, device=whole.device)
    shard[: mine.numel()].copy_(mine)
    return shard


@torch.no_grad()
def gather_whole(handles: Sequence[ShardedParameter]) -> list[Tensor]:
    """The full values of `handles`, each a tensor of its own. Collective: all-gathers per dtype, in list order.

    Raises:
        StorageError: on all ranks, when one could not read its chunks from a drive.
    """
    found: dict[int, Tensor] = {}
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, handle in enumerate(handles):
        by_kind.setdefault((handle.shard.dtype, handle.device), []).append(index)
    for indices in by_kind.values():
        for batch in _batches(indices, handles):
            members = [handles[index] for index in batch]
            found.update(zip(batch, _gather_together(members), strict=True))
    kept = [handle.kept for handle in handles if handle.kept is not None]
    if kept:
        failures = (vector.failure for vector in kept)
        meet(next((failure for failure in failures if failure), None), handles[0].collectives, handles[0].device)
    return [found[index] for index in range(len(handles))]


def _batches(indices: Sequence[int], handles: Sequence[ShardedParameter]) -> Iterator[list[int]]:
    """What is gathered as one: large parameters alone, for theirs needs no second copy; small ones together."""
    batch: list[int] = []
    numel = 0
    for index in indices:
        if batch and numel + handles[index].numel > TOGETHER_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(index)
        numel += handles[index].numel
    if batch:
        yield batch


def _gather_together(members: Sequence[ShardedParameter]) -> list[Tensor]:
    collectives, dtype, device = members[0].collectives, members[0].shard.dtype, members[0].device
    chunks = [member.shard.numel() for member in members]
    flat = torch.empty(collectives.world * sum(chunks), dtype=dtype, device=device)
    rows = flat.view(collectives.world, sum(chunks))
    for member, place in zip(members, rows[collectives.rank].split(chunks), strict=True):
        with member.opened() as own:
            place.copy_(own)
    collectives.all_gather(flat).wait()
    if len(members) == 1:  # its chunks lie one after the other already
        return [flat[: members[0].numel].view(members[0].shape)]
    gathered, offset = [], 0
    for member in members:
        whole = torch.empty(member.shape, dtype=dtype, device=device)
        read_rows(whole.view(-1), rows[:, offset : offset + member.shard.numel()])
        gathered.append(whole)
        offset += member.shard.numel()
    return gathered


def hold(handles: Sequence[ShardedParameter]) -> None:
    """Let `handles` show their values in tensors of their own until `let_go`; nests. Collective."""
    fresh = [handle for handle in handles if not handle.holds]
    with torch.inference_mode(False), torch.no_grad():
        missing = [handle for handle in fresh if handle.whole is None]
        for handle, whole in zip(missing, gather_whole(missing), strict=True):
            handle.show(whole)
        for handle in fresh:
            if handle.whole is not None:
                handle.show(handle.whole.clone())  # edits must be able to be dropped
    for handle in handles:
        handle.holds += 1


def let_go(handles: Sequence[ShardedParameter], modifier_rank: int | None = None) -> None:
    """Undo one `hold`. With `modifier_rank`, that rank's values are kept, by all ranks. Collective then.

    Raises:
        RuntimeError: when a parameter that is to be kept has another shape or dtype now.
    """
    if modifier_rank is not None and handles:
        _keep_edits(handles, modifier_rank)
    for handle in handles:
        handle.holds -= 1
        assert handle.holds >= 0, "let_go without hold"
        if not handle.holds:
            handle.rest()
            if handle.device.type == "cpu":
                HEAP.freed(handle.numel * handle.shard.element_size())


@torch.no_grad()
def _keep_edits(handles: Sequence[ShardedParameter], modifier_rank: int) -> None:
    collectives = handles[0].collectives
    for handle in handles:
        values = handle.parameter.data
        if values.shape != handle.shape or values.dtype != handle.shard.dtype:
            raise RuntimeError(
                f"parameter {handle.name or handle.parameter.ds_id!r} was given a tensor of shape "  # type: ignore[attr-defined]
                f"{tuple(values.shape)} and {values.dtype} inside GatheredParameters; it has {tuple(handle.shape)} and "
                f"{handle.shard.dtype}. Write in place (parameter.data.copy_(...)); for another shape assign a new "
                "nn.Parameter to its module and call initialize() after that."
            )
        if not values.is_contiguous():
            handle.show(values.contiguous())
    if collectives.world > 1:
        collectives.broadcast([handle.parameter.data for handle in handles], source=modifier_rank)
    for handle in handles:
        handle.write(handle.parameter.data)


def make_whole(module: nn.Module) -> None:
    """Turn the sharded parameters of `module` into plain ones again. Collective."""
    for parameter in module.parameters():
        handle = of(parameter)
        if handle is not None:
            if handle.owner is not None:
                handle.owner.release()
            parameter.data = parameter.data.clone() if handle.is_available else gather_whole([handle])[0]
            _forget(parameter)


def describe_whole(module: nn.Module) -> None:
    """Give parameters that stage 3 leaves whole (a world of one; integers) the attributes that callers expect."""
    for parameter in module.parameters():
        if of(parameter) is None:
            described: Any = parameter
            described.ds_id = getattr(parameter, "ds_id", next(_ids))
            described.ds_shape, described.ds_numel = parameter.shape, parameter.numel()
            described.ds_status = ZeroParamStatus.AVAILABLE
            described.ds_persist, described.ds_param_type = True, ZeroParamType.PARTITIONED
            described.ds_active_sub_modules = set()
            described.ds_tensor = parameter.detach().view(-1) if parameter.is_contiguous() else None


def _forget(parameter: nn.Parameter) -> None:
    for name in [name for name in vars(parameter) if name.startswith("ds_")] + [*_CALLABLES, _HANDLE]:
        vars(parameter).pop(name, None)


def _described_shard(handle: ShardedParameter) -> Tensor:
    shard = handle.shard.detach()
    shard.ds_numel = shard.numel()  # type: ignore[attr-defined]
    shard.status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    return shard


def _describe(handle: ShardedParameter) -> None:
    """Put the names on the parameter that the ecosystem reads (spec: parameter attributes of ZeRO-3)."""
    parameter: Any = handle.parameter
    setattr(parameter, _HANDLE, handle)
    known = getattr(parameter, "ds_id", None)
    parameter.ds_id = next(_ids) if known is None else known
    parameter.ds_shape = handle.shape
    parameter.ds_numel = handle.numel
    parameter.ds_tensor = _described_shard(handle)
    parameter.ds_persist = False
    parameter.ds_process_group = None
    parameter.ds_param_type = ZeroParamType.PARTITIONED
    parameter.ds_active_sub_modules = set()
    parameter.all_gather = lambda param_list=None, **_options: hold(_handles(param_list or [parameter]))
    parameter.partition = lambda param_list=None, **_options: let_go(_held(param_list or [parameter]))
    parameter.convert_to_zero_parameters = lambda param_list: [
        shard_parameter(other, handle.collectives) for other in param_list if of(other) is None
    ]
    parameter.ds_summary = lambda: _summary(handle)
    parameter.partition_numel = lambda: handle.shard.numel()
    parameter.aligned_size = lambda: handle.shard.numel() * handle.collectives.world
    parameter.padding_size = lambda: handle.shard.numel() * handle.collectives.world - handle.numel
    parameter.__deepcopy__ = lambda memo: _deepcopy(handle, memo)


def _handles(parameters: Sequence[nn.Parameter]) -> list[ShardedParameter]:
    return [handle for handle in map(of, parameters) if handle is not None]


def _held(parameters: Sequence[nn.Parameter]) -> list[ShardedParameter]:
    return [handle for handle in _handles(parameters) if handle.holds]


def _summary(handle: ShardedParameter) -> dict[str, Any]:
    parameter: Any = handle.parameter
    return {
        "id": parameter.ds_id,
        "status": parameter.ds_status.name,
        "numel": handle.numel,
        "ds_numel": handle.numel,
        "shape": tuple(handle.shape),
        "ds_shape": tuple(handle.shape),
        "requires_grad": parameter.requires_grad,
        "persist": parameter.ds_persist,
        "ds_tensor.shape": tuple(handle.shard.shape),
    }


def _deepcopy(handle: ShardedParameter, memo: dict[int, Any]) -> nn.Parameter:
    """A plain parameter with the same values; raises while there are none to copy."""
    if not handle.is_available:
        refuse_read(handle, "copied")
    copied = nn.Parameter(handle.parameter.detach().clone(), handle.parameter.requires_grad)
    memo[id(handle.parameter)] = copied
    return copied


def refuse_overwritten(handles: Sequence[ShardedParameter]) -> None:
    """Raise for released parameters that were filled with a constant: nobody can say where that should have gone."""
    valued = [handle for handle in handles if not handle.mark.is_meta]
    names = [handle.name or f"of shape {tuple(handle.shape)}" for handle in valued if not handle.mark.isnan()]
    if names:
        raise RuntimeError(
            f"{len(names)} parameters were overwritten while this rank held only a shard of them, which changes "
            f"nothing: {', '.join(names[:8])}. Write inside "
            "`with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, on every rank."
        )


def refuse_read(handle: ShardedParameter, verb: str) -> NoReturn:
    label = repr(handle.name) if handle.name else f"of shape {tuple(handle.shape)}"
    raise RuntimeError(
        f"parameter {label} cannot be {verb} here: ZeRO stage 3 holds it in shards, and this rank has only its own. "
        "Do it on every rank inside `with deepspeed.zero.GatheredParameters([parameter]):`, or take whole weights from "
        "accelerator.get_state_dict(model) or trainer.save_model()."
    )
