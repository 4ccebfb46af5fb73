"""Runs a function over tokens tile by tile, and returns one gradient for each input after the last tile.

    forward     every tile without a graph; only the input is kept
    backward    every tile again, with its own graph; gradients of parameters are summed and returned together

    `eager`     forward also computes the gradients (outputs are summed, so that the output's gradient is one factor);
                backward multiplies them by that factor

Parameters are inputs of the autograd function, so that autograd accumulates each of their gradients once per backward,
and gradient hooks (of ZeRO or DistributedDataParallel) run once, regardless of the number of tiles. Other tensors that
the function reads are found in the graph of a tile, and get their gradients, too.

A separate operation keeps the input before the tiles run: within a non-reentrant checkpoint of
`torch.utils.checkpoint`, recomputation ends there and does not run the tiles a third time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

# The context of a forward, saved for its recomputation: autocast and random states.


_SHAPES = "meta"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Autocast and random states at the start of forward."""

    device_type: str
    autocasts: bool
    dtype: torch.dtype
    state: Tensor | None
    devices: Sequence[int] = ()
    device_states: Sequence[Tensor] = ()

    @classmethod
    def now(cls, tensors: Sequence[Tensor], *, draws: bool) -> Surroundings:
        """`draws`: whether the tiles run again and must draw the same random numbers (dropout)."""
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
        # Without the cache, which would reuse weights cast without a graph where a graph is needed.
        if self.device_type == _SHAPES:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.autocasts, cache_enabled=False)

    def no_autocast(self) -> Any:
        return torch.autocast(self.device_type, enabled=False) if self.autocasts else contextlib.nullcontext()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context that draws the same random numbers again, and restores the random states afterwards."""
        assert self.state is not None, "saved before"
        kind = self.device_type if self.devices else "cpu"
        more = {} if kind == "cpu" else {"device_type": kind}
        with torch.random.fork_rng(devices=self.devices, **more):
            torch.set_rng_state(self.state)
            if self.devices:
                set_device_states(list(self.devices), list(self.device_states), device_type=kind)
            yield


def autocasts(device_type: str) -> bool:
    """Whether autocast is enabled for a device type; torch does not support this query for the meta device."""
    return device_type != _SHAPES and torch.is_autocast_enabled(device_type)


def uncached(device_type: str) -> Any:
    if not autocasts(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)


Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(sliced inputs of one tile, inputs passed whole) -> output of the tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledFunction:
    """A function, and how its inputs are cut.

    Attributes:
        call: the function.
        dim: dimension along which sliced inputs are cut.
        rows: size of every tile along it, in order; their sum is the length of the inputs.
        join: dimension along which outputs are concatenated; None: they are summed.
        eager: whether forward computes the gradients; requires summed outputs.
    """

    call: Call
    dim: int
    rows: tuple[int, ...]
    join: int | None
    eager: bool = False


def chunk_rows(length: int, num_tiles: int) -> tuple[int, ...]:
    """Sizes of at most `num_tiles` tiles, as in `torch.chunk`; the last may be smaller. Never empty."""
    size = max(1, -(-length // max(1, num_tiles)))
    full, rest = divmod(length, size)
    return (size,) * full + ((rest,) if rest or not full else ())


def tiled(
    tiling: TiledFunction,
    sliced: Sequence[Tensor],
    passed: Sequence[Tensor] = (),
    parameters: Sequence[Tensor] = (),
    *,
    may_read_others: bool = False,
) -> Tensor:
    """The output of `tiling.call` over all tiles, differentiable in everything that requires a gradient.

    Args:
        sliced: inputs that are cut into tiles.
        passed: inputs that every tile gets whole; their gradients are sums over tiles.
        parameters: leaves that the function reads. Unlisted ones also get gradients, but possibly in a separate
            accumulation from other gradients of the same backward.
        may_read_others: whether it may read unlisted tensors that require gradients, even if no listed one does.
    """
    wanted = list({id(parameter): parameter for parameter in parameters if parameter.requires_grad}.values())
    has_work = may_read_others or wanted or any(tensor.requires_grad for tensor in (*sliced, *passed))
    if not (torch.is_grad_enabled() and has_work):
        return _run(tiling, sliced, passed)
    if any(parameter._backward_hooks for parameter in wanted):
        # Hooks that change these gradients (Tensor.register_hook) must only be applied to the sum.
        return _plain(tiling, sliced, passed)
    needs = tuple(tensor.requires_grad for tensor in (*sliced, *passed, *wanted))
    work = _Pass(tiling, needs, len(sliced), len(passed))
    anchor = torch.empty((), device=sliced[0].device, requires_grad=True)  # in case no listed input requires a gradient
    tensors = (*sliced, *passed)
    if not tiling.eager:
        tensors = _Keep.apply(work.kept, anchor, *tensors)
    output: Tensor = _Tiles.apply(work, anchor, *tensors, *wanted)
    return output


@dataclass(slots=True, eq=False)
class _Pass:
    """State that forward passes to backward."""

    tiling: TiledFunction
    needs: tuple[bool, ...]  # whether each of sliced, passed and parameters needs a gradient
    num_sliced: int
    num_passed: int
    kept: list[Any] = field(default_factory=list)
    parameters: Sequence[Tensor] = ()
    surroundings: Surroundings = field(init=False)
    gradients: Any = None


class _Keep(torch.autograd.Function):
    """Saves tensors for the tiles' backward, and returns them."""

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
    """Forward and backward of all tiles."""

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


# --- forward -----------------------------------------------------------------------------------------------------


def _run(tiling: TiledFunction, sliced: Sequence[Tensor], passed: Sequence[Tensor]) -> Tensor:
    """Run all tiles without a graph."""
    joined = _JoinedTiles(tiling)
    with torch.no_grad(), uncached(sliced[0].device.type):
        for place in _places(tiling):
            joined.add(tiling.call([_tile(tensor, tiling, place) for tensor in sliced], passed), place)
    return joined.output()


def _plain(tiling: TiledFunction, sliced: Sequence[Tensor], passed: Sequence[Tensor]) -> Tensor:
    """Run all tiles with autograd's graph, which keeps all activations."""
    outputs = [tiling.call([_tile(tensor, tiling, place) for tensor in sliced], passed) for place in _places(tiling)]
    if tiling.join is None:
        return torch.stack(outputs).sum(0)
    return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs, dim=tiling.join)


@dataclass(frozen=True, slots=True)
class _TilePlace:
    offset: int
    rows: int


def _places(tiling: TiledFunction) -> Iterator[_TilePlace]:
    offset = 0
    for rows in tiling.rows:
        yield _TilePlace(offset, rows)
        offset += rows


def _tile(tensor: Tensor, tiling: TiledFunction, place: _TilePlace) -> Tensor:
    """A tile of an input, contiguous if the input is, because functions may call `view`."""
    tile = tensor.narrow(tiling.dim, place.offset, place.rows)
    return tile.contiguous() if tensor.is_contiguous() else tile


class _JoinedTiles:
    """Collects outputs of tiles in one preallocated tensor, so that there is never a second copy."""

    def __init__(self, tiling: TiledFunction) -> None:
        self._tiling = tiling
        self._whole: Tensor | None = None
        self._apart: list[Tensor] = []

    def add(self, output: Tensor, place: _TilePlace) -> None:
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
            assert self._whole is None, "all outputs of a tiled function, or none, have the length of their tiles"
            dim = self._tiling.join
            scalars = self._apart[0].dim() == 0
            return torch.stack(self._apart) if scalars else torch.cat(self._apart, dim=dim or 0)
        assert self._whole is not None, "at least one tile"
        return self._whole


# --- backward ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Gradients:
    """Gradients of the listed inputs, in order, and of unlisted leaves in the graph of a tile."""

    listed: list[Tensor | None]
    dtypes: list[torch.dtype]
    unlisted: list[tuple[Tensor, Tensor]]

    def times(self, factor: Tensor | None) -> _Gradients:
        """The gradients times a scalar (None: unchanged), each in the dtype of its tensor."""
        listed = [
            None if gradient is None else _scaled(gradient, factor, dtype)
            for gradient, dtype in zip(self.listed, self.dtypes, strict=True)
        ]
        unlisted = [(leaf, _scaled(gradient, factor, leaf.dtype)) for leaf, gradient in self.unlisted]
        return _Gradients(listed, self.dtypes, unlisted)

    def deliver_unlisted(self) -> None:
        """Accumulate gradients of leaves that are not inputs of the autograd function."""
        if self.unlisted:
            leaves, gradients = zip(*self.unlisted, strict=True)
            torch.autograd.backward(leaves, gradients)


def _scaled(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    if factor is not None:
        gradient = gradient * factor.to(gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32)
    return gradient.to(dtype)


class _Sums:
    """Sums gradients of whole tensors over tiles in at least fp32, because 16-bit sums would lose precision."""

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
        else:  # the first gradient may share memory with others
            self._sums[key] = self._sums[key] + gradient
            self._own.add(key)

    def of(self, tensor: Tensor) -> Tensor | None:
        return self._sums.get(id(tensor))


def _differentiate(
    work: _Pass, sliced: Sequence[Tensor], passed: Sequence[Tensor], gradient: Tensor | None
) -> tuple[Tensor, _Gradients]:
    """Run forward and backward of every tile.

    Args:
        gradient: gradient of the output; None: 1, for summed outputs, whose sum is then returned.
    """
    tiling, needs, sums, unlisted, joined = work.tiling, work.needs, _Sums(), _Unlisted(), _JoinedTiles(work.tiling)
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


def _of_tile(gradient: Tensor | None, output: Tensor, tiling: TiledFunction, place: _TilePlace, number: int) -> Tensor:
    """A tile's part of the output's gradient."""
    if gradient is None:
        return torch.ones_like(output)
    if tiling.join is None:
        return gradient.to(output.dtype).expand_as(output)
    if output.dim() == 0:  # outputs were stacked
        return gradient[number]
    if output.shape[tiling.join] == place.rows and gradient.shape[tiling.join] == sum(tiling.rows):
        return gradient.narrow(tiling.join, place.offset, place.rows)
    size = output.shape[tiling.join]
    return gradient.narrow(tiling.join, number * size, size)


class _Unlisted:
    """Leaves that a tile reads but that were not listed, such as parameters in a closure."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []

    def look(self, output: Tensor, listed: Sequence[Tensor]) -> list[Tensor]:
        """Find leaves in the graph of `output`; they are kept in `leaves`, so that their ids stay unique."""
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
