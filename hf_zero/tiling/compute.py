"""A function over tokens, run tile by tile, with one gradient for each of its inputs when the last tile is done.

    forward     every tile without a graph; what is kept is the input alone
    backward    every tile again, with its own graph; gradients of parameters are added up and returned together

    `eager`     forward makes the gradients as well (the outputs are added up, so one factor is all that comes later);
                backward multiplies them by that factor

Parameters are inputs of the autograd function. So autograd accumulates into each of them once per backward, and hooks
that wait for a gradient (of ZeRO, of DistributedDataParallel) fire once, however many tiles there are. What the
function reads besides is found in the graph of a tile, and gets its gradient, too.

The input is kept by an operation of its own, ahead of the tiles: where a checkpoint is around (that of
`torch.utils.checkpoint`, not reentrant), its recomputation ends there and does not run the tiles a third time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

# What is around a forward, kept for when it runs again: autocast and random numbers.


_SHAPES = "meta"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Autocast and random numbers as they were when forward began."""

    device_type: str
    autocasts: bool
    dtype: torch.dtype
    state: Tensor | None
    devices: Sequence[int] = ()
    device_states: Sequence[Tensor] = ()

    @classmethod
    def now(cls, tensors: Sequence[Tensor], *, draws: bool) -> Surroundings:
        """`draws`: the tiles will be run again and must draw the same (dropout)."""
        kind = tensors[0].device.type
        devices, states = get_device_states(*tensors) if draws else ([], [])
        return cls(
            device_type=kind,
            autocasts=autocasts(kind),
            dtype=torch.get_autocast_dtype("cpu" if kind == _SHAPES else kind),
            state=torch.get_rng_state() if draws else None,
            devices=devices,
            device_states=states,
        )

    def autocast(self) -> Any:
        # Without its cache: a weight that is cast without a graph would be used again where a graph is needed.
        if self.device_type == _SHAPES:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.autocasts, cache_enabled=False)

    def no_autocast(self) -> Any:
        return torch.autocast(self.device_type, enabled=False) if self.autocasts else contextlib.nullcontext()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers once more; afterwards go on as if nothing had been drawn."""
        assert self.state is not None, "was kept"
        kind = self.device_type if self.devices else "cpu"
        more = {} if kind == "cpu" else {"device_type": kind}
        with torch.random.fork_rng(devices=self.devices, **more):
            torch.set_rng_state(self.state)
            if self.devices:
                set_device_states(list(self.devices), list(self.device_states), device_type=kind)
            yield


def autocasts(device_type: str) -> bool:
    """Whether matrix products are cast on such a device; torch has no answer for tensors of shapes alone."""
    return device_type != _SHAPES and torch.is_autocast_enabled(device_type)


def uncached(device_type: str) -> Any:
    if not autocasts(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)


Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(what is sliced, of one tile; what is passed whole) -> the output of the tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One function and how its inputs are cut.

    Attributes:
        call: the function.
        dim: of the sliced inputs, along which they are cut.
        rows: of every tile along it, in order; their sum is the length of the inputs.
        join: dimension along which outputs are put together; None: they are added up.
        eager: gradients are made in forward; only where outputs are added up.
    """

    call: Call
    dim: int
    rows: tuple[int, ...]
    join: int | None
    eager: bool = False


def chunk_rows(length: int, num_tiles: int) -> tuple[int, ...]:
    """Sizes of at most `num_tiles` tiles, as `torch.chunk` has them; the last may be shorter. Never empty."""
    size = max(1, -(-length // max(1, num_tiles)))
    full, rest = divmod(length, size)
    return (size,) * full + ((rest,) if rest or not full else ())


def tiled(
    tiling: Tiling,
    sliced: Sequence[Tensor],
    passed: Sequence[Tensor] = (),
    parameters: Sequence[Tensor] = (),
    *,
    may_read_others: bool = False,
) -> Tensor:
    """The output of `tiling.call` over all tiles, differentiable in everything that requires a gradient.

    Args:
        sliced: inputs that are cut into tiles.
        passed: inputs that every tile gets whole; a gradient for them is the sum over tiles.
        parameters: leaves that the function reads. Those not listed get their gradients all the same, but maybe apart
            from what they get elsewhere in the same backward.
        may_read_others: it may read others that require a gradient even where nothing that is listed does.
    """
    wanted = list({id(parameter): parameter for parameter in parameters if parameter.requires_grad}.values())
    has_work = may_read_others or wanted or any(tensor.requires_grad for tensor in (*sliced, *passed))
    if not (torch.is_grad_enabled() and has_work):
        return _run(tiling, sliced, passed)
    if any(parameter._backward_hooks for parameter in wanted):
        # Somebody changes these gradients on their way (Tensor.register_hook), which must happen to the sum alone.
        return _plain(tiling, sliced, passed)
    needs = tuple(tensor.requires_grad for tensor in (*sliced, *passed, *wanted))
    work = _Pass(tiling, needs, len(sliced), len(passed))
    anchor = torch.empty((), device=sliced[0].device, requires_grad=True)  # also where nothing listed requires one
    tensors = (*sliced, *passed)
    if not tiling.eager:
        tensors = _Keep.apply(work.kept, anchor, *tensors)
    output: Tensor = _Tiles.apply(work, anchor, *tensors, *wanted)
    return output


@dataclass(slots=True, eq=False)
class _Pass:
    """State that forward leaves to backward."""

    tiling: Tiling
    needs: tuple[bool, ...]  # of sliced, passed and parameters: whether a gradient is wanted
    num_sliced: int
    num_passed: int
    kept: list[Any] = field(default_factory=list)
    parameters: Sequence[Tensor] = ()
    surroundings: Surroundings = field(init=False)
    gradients: Any = None


class _Keep(torch.autograd.Function):
    """Keeps tensors for the tiles' backward, and passes them on."""

    @staticmethod
    def forward(ctx: Any, kept: list[Any], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        kept.append(ctx)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *gradients


class _Tiles(torch.autograd.Function):
    """The tiles, both ways."""

    @staticmethod
    def forward(ctx: Any, work: _Pass, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.work = work
        ctx.set_materialize_grads(False)
        cut = work.num_sliced + work.num_passed
        sliced, passed, work.parameters = tensors[: work.num_sliced], tensors[work.num_sliced : cut], tensors[cut:]
        work.surroundings = Surroundings.now(tensors[:cut], draws=not work.tiling.eager)
        if not work.tiling.eager:
            return _run(work.tiling, sliced, passed)
        output, work.gradients = _differentiate(work, sliced, passed, None)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        work: _Pass = ctx.work
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        if work.tiling.eager:
            gradients = work.gradients.times(gradient)
        else:
            tensors = work.kept[0].saved_tensors
            sliced, passed = tensors[: work.num_sliced], tensors[work.num_sliced :]
            with work.surroundings.again():
                _, tile_gradients = _differentiate(work, sliced, passed, gradient)
            gradients = tile_gradients.times(None)
        gradients.deliver_unlisted()
        return None, None, *gradients.listed


# --- one way -----------------------------------------------------------------------------------------------------


def _run(tiling: Tiling, sliced: Sequence[Tensor], passed: Sequence[Tensor]) -> Tensor:
    """Every tile, without a graph."""
    joined = _Joined(tiling)
    with torch.no_grad(), uncached(sliced[0].device.type):
        for place in _places(tiling):
            joined.add(tiling.call([_tile(tensor, tiling, place) for tensor in sliced], passed), place)
    return joined.output()


def _plain(tiling: Tiling, sliced: Sequence[Tensor], passed: Sequence[Tensor]) -> Tensor:
    """Every tile with autograd's own graph, which keeps all there is to keep."""
    outputs = [tiling.call([_tile(tensor, tiling, place) for tensor in sliced], passed) for place in _places(tiling)]
    if tiling.join is None:
        return torch.stack(outputs).sum(0)
    return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs, dim=tiling.join)


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    rows: int


def _places(tiling: Tiling) -> Iterator[_Place]:
    offset = 0
    for rows in tiling.rows:
        yield _Place(offset, rows)
        offset += rows


def _tile(tensor: Tensor, tiling: Tiling, place: _Place) -> Tensor:
    """A contiguous tile of a contiguous input: functions reshape their inputs by `view`."""
    tile = tensor.narrow(tiling.dim, place.offset, place.rows)
    return tile.contiguous() if tensor.is_contiguous() else tile


class _Joined:
    """Outputs of tiles, put together as they come: one tensor is filled, so that there are never two of them."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling = tiling
        self._whole: Tensor | None = None
        self._apart: list[Tensor] = []

    def add(self, output: Tensor, place: _Place) -> None:
        dim = self._tiling.join
        if not isinstance(output, Tensor):
            raise TypeError(f"a tiled function must return one tensor, not {type(output).__name__}")
        if dim is None:
            self._whole = output.detach() if self._whole is None else self._whole + output.detach()
        elif dim >= output.dim() or output.dim() + dim < 0 or output.shape[dim] != place.rows:
            self._apart.append(output)
        else:
            if self._whole is None:
                shape = list(output.shape)
                shape[dim] = sum(self._tiling.rows)
                self._whole = output.new_empty(shape)
            self._whole.narrow(dim, place.offset, place.rows).copy_(output)

    def output(self) -> Tensor:
        if self._apart:
            assert self._whole is None, "outputs of a tiled function are all as long as their tiles, or none is"
            dim = self._tiling.join
            scalars = self._apart[0].dim() == 0
            return torch.stack(self._apart) if scalars else torch.cat(self._apart, dim=dim or 0)
        assert self._whole is not None, "there is a tile"
        return self._whole


# --- the other way -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Gradients:
    """Gradients of the listed inputs, in order, and of leaves found in the graph of a tile."""

    listed: list[Tensor | None]
    dtypes: list[torch.dtype]
    unlisted: list[tuple[Tensor, Tensor]]

    def times(self, factor: Tensor | None) -> _Gradients:
        """Multiplied by a scalar (None: as they are), each in the dtype of what it belongs to."""
        listed = [
            None if gradient is None else _scaled(gradient, factor, dtype)
            for gradient, dtype in zip(self.listed, self.dtypes, strict=True)
        ]
        unlisted = [(leaf, _scaled(gradient, factor, leaf.dtype)) for leaf, gradient in self.unlisted]
        return _Gradients(listed, self.dtypes, unlisted)

    def deliver_unlisted(self) -> None:
        """Accumulate into leaves that are no inputs of the function."""
        if self.unlisted:
            leaves, gradients = zip(*self.unlisted, strict=True)
            torch.autograd.backward(leaves, gradients)


def _scaled(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if factor is not None:
        gradient = gradient * factor.to(gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32)
    return gradient.to(dtype)


class _Sums:
    """Gradients of whole tensors, added up over tiles, at least in fp32: a 16-bit sum would lose a bit per doubling."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._own: set[int] = set()

    def add(self, tensor: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        key, wide = id(tensor), gradient.dtype.itemsize >= 4
        if key not in self._sums:
            self._sums[key] = gradient if wide else gradient.float()
        elif key in self._own:
            self._sums[key].add_(gradient)
        else:  # what autograd returned first may be shared
            self._sums[key] = self._sums[key] + gradient
            self._own.add(key)

    def of(self, tensor: Tensor) -> Tensor | None:
        return self._sums.get(id(tensor))


def _differentiate(
    work: _Pass, sliced: Sequence[Tensor], passed: Sequence[Tensor], gradient: Tensor | None
) -> tuple[Tensor, _Gradients]:
    """Run every tile with a graph and walk back through it.

    Args:
        gradient: of the output; None: 1 for outputs that are added up, which are returned then.
    """
    tiling, needs, sums, unlisted, joined = work.tiling, work.needs, _Sums(), _Unlisted(), _Joined(work.tiling)
    buffers = [torch.zeros_like(t) if need else None for t, need in zip(sliced, needs, strict=False)]
    whole = [_leaf(t, need) for t, need in zip(passed, needs[len(sliced) :], strict=False)]
    listed = [t for t in (*whole, *work.parameters) if t.requires_grad]
    for number, place in enumerate(_places(tiling)):
        tiles = [_leaf(_tile(t, tiling, place), need) for t, need in zip(sliced, needs, strict=False)]
        with torch.enable_grad(), work.surroundings.autocast():
            output = tiling.call(tiles, whole)
        if gradient is None:
            joined.add(output, place)
        if not output.requires_grad:
            continue
        tracked = [t for t in tiles if t.requires_grad]
        inputs = [*tracked, *listed]
        inputs += unlisted.look(output, inputs)
        with work.surroundings.no_autocast():
            grads = torch.autograd.grad(
                output, inputs, _of_tile(gradient, output, tiling, place, number), allow_unused=True
            )
        own = iter(grads)
        for buffer in buffers:
            part = None if buffer is None else next(own)
            if buffer is not None and part is not None:
                buffer.narrow(tiling.dim, place.offset, place.rows).copy_(part)
        for tensor, part in zip(inputs[len(tracked) :], own, strict=True):
            sums.add(tensor, part)
    gradients = [*buffers, *(sums.of(t) for t in (*whole, *work.parameters))]
    dtypes = [t.dtype for t in (*sliced, *whole, *work.parameters)]
    rest = [(leaf, total) for leaf in unlisted.leaves if (total := sums.of(leaf)) is not None]
    return joined.output() if gradient is None else gradient, _Gradients(gradients, dtypes, rest)


def _leaf(tensor: Tensor, needs_gradient: bool) -> Tensor:
    return tensor.detach().requires_grad_(needs_gradient)


def _of_tile(gradient: Tensor | None, output: Tensor, tiling: Tiling, place: _Place, number: int) -> Tensor:
    """The part of the output's gradient that belongs to a tile."""
    if gradient is None:
        return torch.ones_like(output)
    if tiling.join is None:
        return gradient.to(output.dtype).expand_as(output)
    if output.dim() == 0:  # they were stacked
        return gradient[number]
    if output.shape[tiling.join] == place.rows and gradient.shape[tiling.join] == sum(tiling.rows):
        return gradient.narrow(tiling.join, place.offset, place.rows)
    size = output.shape[tiling.join]
    return gradient.narrow(tiling.join, number * size, size)


class _Unlisted:
    """Leaves that a tile reads and that were not listed: parameters in a closure."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []

    def look(self, output: Tensor, listed: Sequence[Tensor]) -> list[Tensor]:
        """Those in the graph of `output`; an object stays in `leaves`, so that its id is its own."""
        known = {id(tensor) for tensor in listed}
        reached: list[Tensor] = []
        seen, todo = set(), [output.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                known.add(id(leaf))
                reached.append(leaf)
            todo.extend(following for following, _ in node.next_functions)
        self.leaves += [leaf for leaf in reached if all(leaf is not other for other in self.leaves)]
        return reached
