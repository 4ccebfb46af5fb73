"""Memory over time and FLOPs of a forward and backward, traced on the meta device, which has shapes without values.

A *segment* begins with each event on which the engine's memory depends: a gathered module is entered in forward or
reached by backward, or a gradient is complete. Each segment has the peak memory of activations and temporary tensors,
without parameters, buffers and gradients. `hf_zero.planning.memory` adds the memory of stages and offload.

Attention is counted as in fused kernels, which keep their inputs, their output and one number per row; on CPUs with
dropout, where torch has no fused kernel, as it is. Experts are counted as one product of all rows with their experts.

A model that is cut for several ranks (`hf_zero.tensor`, experts over ranks) runs as the first of them: the others are
`AbsentRanks`, which record messages without sending any; tokens are routed evenly. With sequence parallelism the model
sees one rank's part of the sequence, and the messages around attention (`Ulysses`) are only counted; layers such as
linear attention run on whole sequences, as in training.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.comm import LoneCollectives, Pending
from hf_zero.comm.parts import held_part
from hf_zero.comm.rows import FlatRows, Rows, num_bytes
from hf_zero.features import text_config, unwrapped
from hf_zero.layout.traffic import Message
from hf_zero.planning.llama import SHAPES
from hf_zero.sequence.attention import has_scans_alone
from hf_zero.sequence.mixers import attach_mixers, find_mixers
from hf_zero.sequence.shared import Shared, copies_of_key_heads

_aten = torch.ops.aten

# Answers for models that read a value from a meta tensor. Models ask whether a mask masks nothing, which is true for
# text of one length.
_ANSWERS: dict[torch.dtype, bool | int | float] = {torch.bool: True, torch.int64: 1, torch.float32: 1.0}

UNSEEN_ATTENTION = (
    "the model does not call torch's fused attention: messages between ranks that share sequences are not counted, and "
    "attention is counted within each rank's part only"
)

Kind = Literal["begin", "forward", "backward", "gradient", "loss"]


@dataclass(frozen=True, slots=True)
class Segment:
    """The time between two events.

    Attributes:
        event: the event that begins it: a gathered module is entered in forward or reached by backward, the gradient of
            a parameter is complete, or the loss is known.
        name: name of the module or the parameter.
        peak: peak bytes, without parameters, buffers and complete gradients.
        flops: FLOPs of matrix products and attention.
        sent: (operation, bytes) of messages of tensor, sequence and expert parallelism.
        touched: bytes that all other operators read and write.
    """

    event: Kind
    name: str
    peak: int
    flops: float
    sent: tuple[tuple[str, int], ...] = ()
    touched: int = 0


class AbsentRanks(LoneCollectives):
    """A group of `size` ranks, where only the first one exists. Calls are not added to the traffic ledger, which counts
    what this process sends."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.ranks, self.num_beside = size, tuple(range(size)), size
        self.sent: Counter[str] = Counter()

    def all_reduce(self, flat: Tensor) -> Pending:
        self.sent["all_reduce"] += num_bytes(flat)
        return Pending()

    def all_gather(self, flat: Tensor) -> Pending:
        self.sent["all_gather"] += num_bytes(flat)
        return Pending()

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        self.sent["all_to_all"] += sum(map(num_bytes, sent))

    def exchange_rows(self, flat: Tensor, take: Callable[[int], Tensor]) -> Rows:
        self.sent["all_to_all"] += num_bytes(flat)
        return FlatRows(None, flat, self.size, Pending())


def messages_of(model: nn.Module) -> Counter[str]:
    groups = (part.group for parameter in model.parameters() if (part := held_part(parameter)) is not None)
    group = next(groups, None)
    return group.sent if isinstance(group, AbsentRanks) else Counter()


@dataclass(frozen=True, slots=True)
class Ulysses:
    """Sequence parallelism: in attention each rank has all tokens and a part of the heads.

    Attributes:
        size: number of ranks per sequence.
        key_heads: number of key heads of the model.
    """

    size: int = 1
    key_heads: int = 1

    @property
    def copied_heads(self) -> int:
        """Number of additional copies of key heads, if there are fewer of them than ranks."""
        return self.key_heads * (copies_of_key_heads(self.key_heads, self.size) - 1)

    def message_bytes(self, tokens: int, heads: int, extents: int, itemsize: int) -> int:
        """Return the bytes of queries, keys, values and output that this rank sends around attention, for `tokens`.

        Args:
            extents: sum of the sizes of a key and a value.
        """
        if self.size == 1:
            return 0
        return tokens * (heads + self.key_heads + self.copied_heads) * extents * itemsize


@dataclass(frozen=True)
class ModelTrace:
    """The trace of one micro-batch.

    Attributes:
        note: a note for the plan if this is not an exact trace of the model.
    """

    segments: tuple[Segment, ...]
    note: str = ""

    @property
    def peak(self) -> int:
        return max(segment.peak for segment in self.segments)

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward, including recomputation."""
        return sum(segment.flops for segment in self.segments)

    @property
    def forward_flops(self) -> float:
        return sum(segment.flops for segment in self.segments[: self._loss])

    @property
    def forward_touched(self) -> int:
        return sum(segment.touched for segment in self.segments[: self._loss])

    @cached_property
    def messages(self) -> list[Message]:
        """The messages of tensor, sequence and expert parallelism, added up by phase and operation."""
        sizes: Counter[tuple[str, str]] = Counter()
        for number, segment in enumerate(self.segments):
            phase = "forward" if number < self._loss else "backward"
            sizes.update({(phase, operation): size for operation, size in segment.sent})
        return [Message(phase, operation, size) for (phase, operation), size in sizes.items()]

    @property
    def saved(self) -> int:
        """Peak bytes during the computation of the loss."""
        return self.segments[self._loss - 1].peak

    @cached_property
    def _loss(self) -> int:
        return next((i for i, segment in enumerate(self.segments) if segment.event == "loss"), 0)


class _Fused(torch.autograd.Function):
    """The memory of fused attention, without values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, length, _ = query.shape  # with the layout of the projections, so that a reshape needs no copy
        result = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-2, -3)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Living(TorchDispatchMode):
    """Tracks the bytes of all storages that are created in this mode, until they are freed."""

    def __init__(self, known: Iterable[Tensor], inputs: Iterable[object], *, on_cpu: bool) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self.live = self.peak = 0
        self.flops = 0.0
        self.touched = 0
        self._refs: dict[int, Any] = {}
        for tensor in known:
            self._follow(tensor, counts=False)
        for given in inputs:
            if isinstance(given, Tensor):
                self._follow(given)

    def count(self, flops: float) -> None:
        self.flops += flops

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch would import its compiler just to exclude this mode from it. Nothing is compiled in here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return _ANSWERS.get(args[0].dtype, 1)
        rule = SHAPES.get(func)
        result = rule(*args, **kwargs) if rule is not None else None
        if result is None:
            result = func(*args, **kwargs)
        flops = flops_of(func, args, kwargs, result)
        self.count(flops)
        if not flops:
            self.touched += touched_by(func, args, result)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        if self._on_cpu:
            self.peak = max(self.peak, self.live + _workspace(func, args, result))
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


_FACTORS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Operator -> index of the first factor among its arguments."""


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the FLOPs of a call. torch's own formulas are only used where needed, because importing them imports
    triton if that is installed."""
    kind = func._overloadpacket
    first = _FACTORS.get(kind)
    if first is not None:
        return 2 * int(args[first].numel()) * int(args[first + 1].shape[-1])
    if func in SHAPES or kind is _aten.copy_ or sum(isinstance(each, Tensor) for each in args) < 2:
        return 0
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(kind)
    return 0 if count is None else float(count(*args, **kwargs, out_val=result))


_ALLOCATES = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_READS = dict.fromkeys((_aten.embedding, _aten.index_select, _aten.index, _aten.gather, _aten.nll_loss_forward), 1)
_READS |= dict.fromkeys((_aten.nll_loss_backward, _aten.embedding_dense_backward), 0)
"""Operators that read only a part of their inputs -> elements read per element written."""


def touched_by(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes that a call without FLOPs reads and writes: all inputs and outputs, once. A view counts as 0,
    and a lookup reads as much as it writes."""
    kind = func._overloadpacket
    if kind in _ALLOCATES:
        return 0
    given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    known = {each.untyped_storage()._cdata for each in given}
    if all(each.untyped_storage()._cdata in known for each in made) and not func._schema.is_mutable:
        return 0
    written, reads = sum(map(_held, made)), _READS.get(kind)
    return written + (sum(map(_held, given)) if reads is None else reads * written)


def _held(tensor: Tensor) -> int:
    """Return the bytes of its elements; elements of an expanded tensor count once."""
    return min(num_bytes(tensor), tensor.untyped_storage().nbytes())


def _workspace(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the temporary bytes of a convolution on CPUs: oneDNN copies inputs and outputs into its own layouts,
    outside torch's allocator."""
    if func is _aten.convolution.default:
        return num_bytes(args[0]) + num_bytes(result)
    if func is _aten.convolution_backward.default:
        gradient, given, weight = args[:3]
        return num_bytes(gradient) + num_bytes(given) * (2 if args[-1][0] else 1) + num_bytes(weight)
    return 0


class _FusedAttention:
    """Replaces scaled_dot_product_attention; uses as much memory as a fused kernel, and counts as many FLOPs."""

    def __init__(self, living: _Living, ulysses: Ulysses, sent: Counter[str], *, on_cpu: bool) -> None:
        self._living = living
        self._ulysses = ulysses
        self._sent = sent
        self._drops_unfused = on_cpu and ulysses.size == 1
        self._original = nn.functional.scaled_dot_product_attention
        self.calls = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **more: Any,
    ) -> Tensor:
        if dropout_p and self._drops_unfused:
            return self._original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **more)
        rows, extents = query.numel() // query.shape[-1], query.shape[-1] + value.shape[-1]
        # With sequence parallelism: as many rows (all tokens, a part of the heads), and the keys of all ranks.
        flops = 2.0 * rows * key.shape[-2] * self._ulysses.size * extents
        size = self._ulysses.message_bytes(rows // query.shape[1], query.shape[1], extents, query.element_size())
        self.calls += 1
        self._add(flops, size)
        result: Tensor = _Fused.apply(query, key, value)
        if result.requires_grad:
            result.register_hook(lambda _: self._add(2.5 * flops, size))  # scores are recomputed, and four products
        return result

    def _add(self, flops: float, size: int) -> None:
        self._living.count(flops)
        if size:
            self._sent["all_to_all"] += size


class _Chosen(torch.autograd.Function):
    """The memory of multiplying each row by the matrix chosen for it, without values."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, matrices)
        return rows.new_empty(len(rows), matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows = gradients[0].new_empty(len(gradients[0]), matrices.shape[1]) if ctx.needs_input_grad[0] else None
        return of_rows, None if rows is None else torch.empty_like(matrices)


class _GroupedProducts:
    """Replaces grouped_mm(rows [r, k], matrices [experts, k, n]), which on the meta device needs values, or bf16."""

    def __init__(self, living: _Living) -> None:
        self._living = living

    def __call__(self, rows: Tensor, matrices: Tensor, **_: object) -> Tensor:
        if rows.dim() != 2 or matrices.dim() != 3:
            raise NotImplementedError(f"grouped_mm of {rows.dim()} and {matrices.dim()} dimensions")
        flops = 2.0 * rows.numel() * matrices.shape[-1]
        self._living.count(flops)
        result: Tensor = _Chosen.apply(rows, matrices)
        if result.requires_grad:
            products = rows.requires_grad + matrices.requires_grad
            result.register_hook(lambda _: self._living.count(products * flops))
        return result


def _masked(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    """Dropout as on GPUs, which keeps a mask of one byte per value; elsewhere masks have the dtype of the values."""
    return torch.native_dropout(values, p, training)[0] if training and 0 < p < 1 else values


@contextmanager
def in_place_of(*functions: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace functions, each (holder, name, replacement); names that this version of torch lacks are skipped. (A mode
    for torch functions would be off during recomputation.)"""
    known = [each for each in functions if hasattr(*each[:2])]
    originals = [(holder, name, getattr(holder, name)) for holder, name, _ in known]
    for each in known:
        setattr(*each)
    try:
        yield
    finally:
        for each in originals:
            setattr(*each)


class _Recorder:
    def __init__(self, living: _Living, sent: Counter[str]) -> None:
        self.living = living
        self.sent = sent
        self.segments: list[Segment] = []
        self._begun: tuple[Kind, str] = ("begin", "")
        self._flops, self._touched = 0.0, 0

    def event(self, kind: Kind, name: str = "") -> None:
        """End the current segment, and begin the next one with this event."""
        living = self.living
        sent = tuple(sorted(self.sent.items()))
        flops, touched = living.flops - self._flops, living.touched - self._touched
        self.segments.append(Segment(*self._begun, living.peak, flops, sent, touched))
        self.sent.clear()
        self._begun = kind, name
        living.peak, self._flops, self._touched = living.live, living.flops, living.touched

    def complete(self, parameter: nn.Parameter, name: str) -> None:
        """A gradient is complete: from here on the engine's buffers count it."""
        self.event("gradient", name)
        parameter.grad = None
        self.living.peak = self.living.live

    def reach(self, output: object, name: str) -> None:
        """Record when backward reaches a module's output."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.event("backward", name))
                return


def trace_step(
    model: nn.Module,
    inputs: dict[str, Tensor],
    modules: Mapping[str, nn.Module],
    ulysses: Ulysses = Ulysses(),
    *,
    on_cpu: bool = False,
) -> ModelTrace:
    """Run forward and backward of `model` (on the meta device, in training mode) on `inputs`, which contain labels.

    Args:
        modules: the gathered modules, whose uses are recorded.
        ulysses: the ranks that share each sequence; `inputs` are one rank's part.
        on_cpu: attention with dropout is not fused there, and convolutions need temporary memory.

    Raises:
        Exception: anything that a model raises if its shapes depend on values.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    living = _Living([*model.parameters(), *model.buffers()], inputs.values(), on_cpu=on_cpu)
    sent = messages_of(model)
    sent.clear()
    recorder, attention = _Recorder(living, sent), _FusedAttention(living, ulysses, sent, on_cpu=on_cpu)
    grouped = _GroupedProducts(living)
    functions = (
        (nn.functional, "scaled_dot_product_attention", attention),
        (nn.functional, "grouped_mm", grouped),
        (torch, "_grouped_mm", grouped),
        *(() if on_cpu else ((nn.functional, "dropout", _masked),)),
    )
    others = AbsentRanks(ulysses.size)
    others.sent = sent
    with _watched(recorder, trained, modules), _whole_mixers(model, others), in_place_of(*functions), living:
        loss = model(**inputs).loss
        recorder.event("loss")
        loss.backward()
    recorder.event("begin")  # ends the last segment
    is_unseen = ulysses.size > 1 and not attention.calls and not has_scans_alone(unwrapped(model))
    return ModelTrace(tuple(recorder.segments), UNSEEN_ATTENTION if is_unseen else "")


@contextmanager
def _whole_mixers(model: nn.Module, group: AbsentRanks) -> Iterator[None]:
    """Ranks that share sequences run layers such as linear attention on whole ones."""
    base = unwrapped(model)
    config = text_config(getattr(base, "config", None))
    mixers = find_mixers(base, config) if group.size > 1 else []
    handles = attach_mixers(mixers, Shared(group, config, skips_evaluation=False))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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


# The trace of a model with many equal layers, from that of a model with a few.
#
#     4 layers     | before | 0 | 1 | 2 | 3 | loss | 3 | 2 | 1 | 0 | after |
#     80 layers    | before | 0 | 1 | 1 + d | 1 + 2d ... | 79 | loss | ...
#
# Every layer keeps the same number of bytes and has the same events, so the memory at layer i + 1 is that at layer i
# plus a constant. If that does not hold for the traced layers, NotAlike is raised.


FEW = 4  # the first and the last layer may differ from the two between them


class NotAlike(ValueError):
    """Layers differ from one another."""


def stretch(trace: ModelTrace, layers: int, prefix: str) -> ModelTrace:
    """Extend the trace of `FEW` layers to `layers` layers (at least as many).

    Args:
        prefix: prefix of the layer's number in names, such as `model.layers.`.

    Raises:
        NotAlike: the two layers in the middle differ by more than a constant.
    """
    loss = next(i for i, segment in enumerate(trace.segments) if segment.event == "loss")
    parts = (trace.segments[:loss], True), (trace.segments[loss:], False)
    stretched = [each for segments, rising in parts for each in _stretched(segments, layers, prefix, rising=rising)]
    return ModelTrace(tuple(stretched), trace.note)


def _stretched(segments: Sequence[Segment], layers: int, prefix: str, *, rising: bool) -> Iterator[Segment]:
    """Extend one pass, in which layers run in ascending (forward) or descending order."""
    groups = [(layer, list(group)) for layer, group in groupby(segments, lambda each: _layer_of(each.name, prefix))]
    order = [layer for layer, _ in groups if layer is not None]
    if order != sorted(range(FEW), reverse=not rising):
        raise NotAlike(f"layers are passed in the order {order}")
    by_layer = {layer: group for layer, group in groups if layer is not None}
    step, more = _difference(by_layer[1], by_layer[2]), layers - FEW
    passed = 0
    for layer, group in groups:
        if layer is not None:
            passed += 1
            for number in _stands_for(layer, layers, rising=rising):
                offset = (number - layer) * step
                yield from (_moved(each, offset, _renamed(each.name, prefix, number)) for each in group)
        elif passed in (0, FEW):
            all_live = rising == (passed == FEW)
            yield from (_moved(each, more * step if all_live else 0, each.name) for each in group)
        else:
            raise NotAlike("something else happens between layers")


def _stands_for(layer: int, layers: int, *, rising: bool) -> Sequence[int]:
    """Return the layers that a traced layer represents, in execution order."""
    more = layers - FEW
    if layer != 1:
        return (layer + more,) if layer else (0,)
    numbers = range(1, 2 + more)
    return numbers if rising else numbers[::-1]


def _layer_of(name: str, prefix: str) -> int | None:
    number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
    return int(number) if number.isdigit() else None


def _renamed(name: str, prefix: str, number: int) -> str:
    _, dot, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{number}{dot}{rest}"


def _difference(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """Return the bytes by which the second layer's memory is higher."""
    if [(each.event, each.flops, each.sent) for each in first] != [(e.event, e.flops, e.sent) for e in second]:
        raise NotAlike("layers do different things")
    differences = {b.peak - a.peak for a, b in zip(first, second)}
    if len(differences) != 1:
        raise NotAlike("layers keep different numbers of bytes")
    return differences.pop()


def _moved(segment: Segment, offset: int, name: str) -> Segment:
    return replace(segment, peak=segment.peak + offset, name=name)
