"""A forward and a backward on the meta device, which has shapes and no values: what lives in memory when, and FLOPs.

A *segment* begins whenever something happens that what an engine keeps in memory depends on: a gathered module is
entered or reached by backward, a gradient is complete. Of every segment we know the most bytes that lived in it beside
parameters, buffers and gradients: activations, and what operators make on their way. `hf_zero.planning.memory` adds
what stages and offload keep at the same time.

Attention is counted as fused kernels have it, which keep their inputs, their output and one number per row.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# What a number is that a model wants to read and that is not there. Models ask whether a mask masks nothing: say yes,
# as it is for text of one length.
_ANSWERS: dict[torch.dtype, bool | int | float] = {torch.bool: True, torch.int64: 1, torch.float32: 1.0}

Kind = Literal["begin", "forward", "backward", "gradient", "loss"]


@dataclass(frozen=True, slots=True)
class Segment:
    """What happened between two events.

    Attributes:
        event: what begins it: a gathered module is entered in forward, or reached by backward; the gradient of a
            parameter is complete; the loss is known.
        name: of the module or the parameter.
        peak: bytes that lived at most, parameters, buffers and complete gradients left out.
        flops: of matrix products and attention.
    """

    event: Kind
    name: str
    peak: int
    flops: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Of one micro-batch.

    Attributes:
        note: how it was found, where that is no trace of this very model.
    """

    segments: tuple[Segment, ...]
    note: str = ""

    @property
    def peak(self) -> int:
        return max(segment.peak for segment in self.segments)

    @property
    def flops(self) -> float:
        """Of forward and backward, with what is computed again."""
        return sum(segment.flops for segment in self.segments)

    @property
    def forward_flops(self) -> float:
        return sum(segment.flops for segment in self.segments[: self._loss])

    @property
    def saved(self) -> int:
        """Bytes that lived at most while the loss was found."""
        return self.segments[self._loss - 1].peak

    @property
    def _loss(self) -> int:
        return next((i for i, segment in enumerate(self.segments) if segment.event == "loss"), 0)


class _Fused(torch.autograd.Function):
    """The memory of a fused attention, without its values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, length, _ = query.shape  # laid out as its projections are, so that a reshape needs no copy
        result = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-2, -3)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Living(TorchDispatchMode):
    """Counts the bytes of all storages that are made while it is on, until nothing holds them any more."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flops = 0.0
        self._refs: dict[int, Any] = {}
        for tensor in known:
            self._follow(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return _ANSWERS.get(args[0].dtype, 1)
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return result

    def _follow(self, tensor: Tensor, *, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._refs:
            return
        size = storage.nbytes() if counts else 0
        self._refs[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        del self._refs[key]
        self.live -= size


class _FusedAttention:
    """Calls of scaled_dot_product_attention take as much memory as a fused kernel would, and count as many FLOPs."""

    def __init__(self, living: _Living) -> None:
        self._living = living

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        rows = query.numel() // query.shape[-1]
        flops = 2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        self._living.flops += flops
        result: Tensor = _Fused.apply(query, key, value)
        if result.requires_grad:
            result.register_hook(lambda _: self._add(2.5 * flops))  # scores again, and four products
        return result

    def _add(self, flops: float) -> None:
        self._living.flops += flops

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Of torch's own function. (A mode for torch functions is off where checkpoints are computed again.)"""
        functional, name = nn.functional, "scaled_dot_product_attention"
        original = getattr(functional, name)
        setattr(functional, name, self)
        try:
            yield
        finally:
            setattr(functional, name, original)


class _Recorder:
    """Turns events into segments."""

    def __init__(self, living: _Living) -> None:
        self.living = living
        self.segments: list[Segment] = []
        self._begun: tuple[Kind, str] = ("begin", "")
        self._flops = 0.0

    def event(self, kind: Kind, name: str = "") -> None:
        """The segment so far is over, and the next one begins with this."""
        living = self.living
        self.segments.append(Segment(*self._begun, living.peak, living.flops - self._flops))
        self._begun = kind, name
        living.peak, self._flops = living.live, living.flops

    def complete(self, parameter: nn.Parameter, name: str) -> None:
        """A gradient: from here on it is the engine's."""
        self.event("gradient", name)
        parameter.grad = None
        self.living.peak = self.living.live

    def reach(self, output: object, name: str) -> None:
        """Watch for backward coming to what a module has computed."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.event("backward", name))
                return


def trace_step(model: nn.Module, inputs: dict[str, Tensor], modules: Mapping[str, nn.Module]) -> Trace:
    """Run `model` (on the meta device, training) on `inputs`, which contain labels, forward and backward.

    Args:
        modules: the gathered modules, whose uses are noted.

    Raises:
        Exception: whatever a model raises that needs values to know shapes.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    living = _Living([*model.parameters(), *model.buffers()])
    recorder = _Recorder(living)
    with _watched(recorder, trained, modules), _FusedAttention(living).in_place(), living:
        loss = model(**inputs).loss
        recorder.event("loss")
        loss.backward()
    recorder.event("begin")  # of whatever comes next
    return Trace(tuple(recorder.segments))


@contextmanager
def _watched(
    recorder: _Recorder, trained: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
) -> Iterator[None]:
    handles = []
    for name, parameter in trained.items():
        handles.append(parameter.register_post_accumulate_grad_hook(lambda p, n=name: recorder.complete(p, n)))
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(lambda *_, n=name: recorder.event("forward", n)))
        handles.append(module.register_forward_hook(lambda _m, _a, out, n=name: recorder.reach(out, n)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
