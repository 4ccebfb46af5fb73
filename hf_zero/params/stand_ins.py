"""Stand-ins of released parameters: a NaN that identifies its parameter, even in a loss computed from it.

The payload bits of the NaN store the parameter's number. Copies, conversions to wider types and most CPU arithmetic
preserve them; GPU arithmetic and conversions to narrower types produce plain NaNs (IEEE 754-2019, 6.2.3).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hf_zero.device.registry import HostCopy, host_runs_ahead
from hf_zero.log import logger
from hf_zero.params.store import opened_for_build

if TYPE_CHECKING:
    from hf_zero.params.sharded_parameter import ShardedParameter


# The class of a parameter and its views while this rank only holds a shard: it provides metadata and rejects reads.
#
# A parameter has class `ReleasedParameter` between its uses and its own class while it has values; it stays the same
# object. torch calls the class before it runs a function from Python (`__torch_function__`):
#
#     shape, device, grad, hooks, data_ptr, empty_like, ...    allowed: no values are needed
#     data, detach(), view(), slices, ...                      a view of the stand-in that behaves the same
#     to(), float(), ... that change nothing                   the tensor itself
#     everything else                                          RuntimeError with the parameter, the call and the fix
#
# So `state_dict()` returns stand-ins, which only have names and shapes: PEFT only reads names, and ranks that write
# nothing create a state dict when `save_pretrained(state_dict=None)` is called.
#
# C++ code, and Python code that takes an address or a storage, bypasses the class and reads NaN.


_Arguments = Sequence[Any]
_Options = Mapping[str, Any]


class _Released:
    """Intercepts torch functions on the tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


class ReleasedParameter(_Released, nn.Parameter):
    """A released parameter whose own class is nn.Parameter."""


class ReleasedView(_Released, Tensor):
    """The class of a released parameter's views and `data`. `is_whole`: whether it is all of it, in its own shape."""

    released_from: ShardedParameter
    is_whole = False


@cache
def released_class(kind: type) -> type | None:
    """The class of a released parameter of class `kind`; None if `kind` wraps other tensors."""
    if kind is nn.Parameter:
        return ReleasedParameter
    if getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl:
        return None
    # Other libraries recognise a parameter class, such as Params4bit, by its name.
    return type(kind.__name__, (_Released, kind), {"__slots__": ()} if "__slots__" in vars(kind) else {})


def refusal(name: str, shape: torch.Size, verb: str, call: str, fix: str) -> str:
    """The error message for a use of a released parameter; `call` may be empty."""
    label = repr(name) if name else f"of shape {tuple(shape)}"
    return (
        f"parameter {label} cannot be {verb} here{f' ({call})' if call else ''}: between its uses ZeRO stage 3 holds "
        f"it in shards, and this rank has only its own. {fix}"
    )


READ_FIX = (
    "Do it on every rank inside `with deepspeed.zero.GatheredParameters([parameter]):` (hf_zero.gathered(model) for "
    "all of a model), or take the fp32 values of one from deepspeed.utils.safe_get_full_fp32_param(parameter), and "
    "whole weights from accelerator.get_state_dict(model) or trainer.save_model()."
)
_NO_ENGINE = (
    "No engine has this model, which was made or loaded while a config at stage 3 was active. For forward passes, as "
    "of a teacher or reference model, give it one: model = accelerator.prepare(model), or "
    "hf_zero.initialize(model=model, config=...)[0]. To read a value:"
)
WRITE_FIX = (
    "Write on every rank inside `with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, which keeps "
    "what rank 0 has written."
)
REPLACE_FIX = (
    "Choose dtype and device in the config, before training; new values go in place inside "
    "`with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, on every rank."
)

# --- operations that need no values -----------------------------------------------------------------------------------

_VIEW_ATTRIBUTES = ("data", "T", "H", "mT", "mH", "real")
_VIEW_METHODS = """
    __getitem__ alias as_strided chunk detach diagonal expand expand_as flatten hsplit movedim moveaxis narrow permute
    ravel reshape reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind
    unflatten unfold unsqueeze view view_as vsplit
""".split()
_FACT_METHODS = """
    __len__ __dir__ const_data_ptr data_ptr dim dim_order element_size get_device is_coalesced is_complex
    is_conj is_contiguous is_distributed is_floating_point is_inference is_neg is_pinned is_same_size is_set_to
    is_shared is_signed has_names ndimension nelement new_empty new_empty_strided new_full new_ones new_tensor
    new_zeros numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage
    storage_offset storage_type stride untyped_storage _is_view _is_zerotensor _typed_storage _use_count
""".split()
_FACT_FUNCTIONS = """
    empty_like full_like ones_like rand_like randint_like randn_like zeros_like can_cast is_complex is_conj
    is_distributed is_floating_point is_inference is_neg is_same_size is_signed is_tensor numel result_type
    _has_compatible_shallow_copy_type
""".split()
_CONVERSIONS = "to float half bfloat16 double cpu cuda xpu type type_as contiguous".split()


def _methods(names: Iterable[str]) -> Iterator[Any]:
    return (getattr(Tensor, name) for name in names if hasattr(Tensor, name))


def _accessors(excluded: Sequence[str]) -> Iterator[Any]:
    """Yield the accessors of attributes stored in C++: shape, device, grad, requires_grad, ..."""
    for name in dir(Tensor):
        attribute = getattr(Tensor, name, None)
        if isinstance(attribute, GetSetDescriptorType) and name not in (*excluded, "imag"):
            yield from (attribute.__get__, attribute.__set__)


METADATA: frozenset[Any] = frozenset(
    [
        *_accessors(_VIEW_ATTRIBUTES),
        *_methods(_FACT_METHODS),
        *(getattr(torch, name) for name in _FACT_FUNCTIONS),
        torch.autograd.grad,  # with respect to it: uses in the graph have had the values
    ]
)
_VIEWS: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _VIEW_ATTRIBUTES),
        *_methods(_VIEW_METHODS),
        *(getattr(torch, name) for name in _VIEW_METHODS if hasattr(torch, name)),
    ]
)
_WHOLE_VIEWS = frozenset(each for each in _VIEWS if each in (Tensor.data.__get__, Tensor.detach, torch.detach))  # type: ignore[attr-defined]
_CONVERTS = frozenset(_methods(_CONVERSIONS))
_DESCRIBES = frozenset((Tensor.__repr__, Tensor.__format__))
_TAKES_SHAPE = frozenset((Tensor.view_as, Tensor.reshape_as, Tensor.expand_as, Tensor.type_as))
_COMPARES = frozenset((Tensor.__eq__, Tensor.__ne__))
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _answer(func: Any, args: _Arguments, kwargs: _Options) -> Any:
    if func in METADATA or func in _TAKES_SHAPE and not isinstance(args[0], _Released):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _DESCRIBES:
        return _description(args[0])
    released = list(_released_in([*args, *kwargs.values()]))
    handle = _handle_of(released[0])
    if func in _WHOLE_VIEWS:
        return _views(func, args, kwargs, released[0])
    if func not in _CONVERTS and all(opened_for_build(_handle_of(tensor)) for tensor in released):
        args, kwargs = _with_values(args), {name: _with_values(value) for name, value in kwargs.items()}
        if not any(True for _ in _released_in([*args, *kwargs.values()])):
            return func(*args, **kwargs)
    if func in _VIEWS:
        return _views(func, args, kwargs, released[0])
    if func != _SET_DATA and not _writes(func, args, kwargs) and _are_left_to_backward(released):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _CONVERTS and isinstance(args[0], _Released):
        return _converted(func, args, kwargs, handle)
    if func is torch.nn.functional.pad and not any(args[1]):
        return args[0]  # transformers pads the bias of every tied head to its present length
    if func == _SET_DATA:
        return _set_data(args, handle)
    if func in _COMPARES and any(value is None for value in args):
        return NotImplemented
    if _writes(func, args, kwargs):
        _refuse(handle, "written to", func, WRITE_FIX)
    if _are_gathered_for_backward(released):
        return func(*args, **kwargs)
    _refuse(handle, "read", func, READ_FIX)


def _handle_of(tensor: Any) -> ShardedParameter:
    handle: ShardedParameter = tensor.released_from if isinstance(tensor, ReleasedView) else tensor.hf_zero_shard
    return handle


def _released_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the released tensors in `values`, and in lists in it."""
    for value in values:
        if isinstance(value, _Released):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _released_in(value)


def _with_values(value: Any) -> Any:
    """`value` with the data of opened parameters instead of views that are all of these."""
    if isinstance(value, ReleasedView) and value.is_whole and value.released_from.is_available:
        return value.released_from.parameter.data
    if type(value) in (list, tuple):
        return type(value)(map(_with_values, value))
    return value


def _are_left_to_backward(released: Iterable[Any]) -> bool:
    """Whether this is the backward of an autograd.Function that has saved these, so that they have values."""
    return _in_autograd() and all(_handle_of(tensor).left is not None for tensor in released)


def _are_gathered_for_backward(released: Iterable[Any]) -> bool:
    """Gather parameters that a recomputed function reads, or the backward of an autograd.Function that has kept them by
    itself. Returns whether these are gathered now; views are not."""
    handles = [_handle_of(tensor) for tensor in released if isinstance(tensor, nn.Parameter)] if _in_autograd() else []
    for handle in handles:
        if handle.owner is not None:
            handle.owner.gather_read(handle)
    return not any(isinstance(tensor, _Released) for tensor in released)


def _in_autograd() -> bool:
    return torch._C._current_graph_task_id() != -1


def _views(func: Any, args: _Arguments, kwargs: _Options, released: Any) -> Any:
    """The views that `func` returns; a result that needs a copy would be a read."""
    handle = _handle_of(released)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        address = released.untyped_storage().data_ptr()
        several = isinstance(result, (list, tuple))
        tensors = list(result) if several else [result]
        if any(tensor.untyped_storage().data_ptr() != address for tensor in tensors):
            _refuse(handle, "read", func, READ_FIX)
        views = [tensor.as_subclass(ReleasedView) for tensor in tensors]
    for view in views:
        view.released_from = handle
        view.is_whole = func in _WHOLE_VIEWS and getattr(released, "is_whole", True)
    return type(result)(views) if several else views[0]


def _converted(func: Any, args: _Arguments, kwargs: _Options, handle: Any) -> Any:
    """The tensor itself, if the conversion changes nothing."""
    tensor = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        # The same call on an empty tensor shows what the result would be.
        probe = tensor.detach().as_strided((0,), (1,))
        result = func(
            probe, *map(_without_number, args[1:]), **{key: _without_number(value) for key, value in kwargs.items()}
        )
    if result is probe and func is not Tensor.contiguous:
        return tensor
    if isinstance(result, str):
        return result  # type() without arguments
    if opened_for_build(handle):
        return func(_with_values(tensor), *args[1:], **kwargs)
    read = func is Tensor.contiguous or result.dtype == tensor.dtype and result.device == tensor.device
    _refuse(handle, "read" if read else "converted", func, READ_FIX if read else REPLACE_FIX)


def _without_number(value: Any) -> Any:
    """Drop the index of a CPU device, because `Tensor.to("cpu:0")` copies tensors that are already there."""
    if isinstance(value, torch.device) and value.type == "cpu" or value == "cpu:0":
        return torch.device("cpu")
    return value


def _set_data(args: _Arguments, handle: Any) -> None:
    target, values = args
    if isinstance(values, _Released) and _handle_of(values) is _handle_of(target):
        return  # Module.to() with the present device
    _refuse(handle, "given other data", _SET_DATA, REPLACE_FIX)


def _writes(func: Any, args: _Arguments, kwargs: _Options) -> bool:
    name: str = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__"))
    target = next(iter([*args, *kwargs.values()])) if in_place else kwargs.get("out")
    return any(True for _ in _released_in([target]))


def _description(tensor: Any) -> str:
    handle = _handle_of(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
    name = f"{handle.name}: " if handle.name else ""
    return f"<{name}released, in shards; shape={shape}, dtype={dtype}, device={device}>"


def _refuse(handle: Any, verb: str, func: Callable[..., Any], fix: str) -> NoReturn:
    call = torch.overrides.resolve_name(func) or getattr(func, "__name__", repr(func))
    if handle.owner is None and fix is READ_FIX:
        fix = f"{_NO_ENGINE} {fix}"
    raise RuntimeError(refusal(handle.name, handle.shape, verb, call, fix))


_MAX_NAMES = 4
_FIX = "read them on every rank inside `with deepspeed.zero.GatheredParameters([parameter]):`."
_FP64_FRACTION = 52  # bits of a float64
# For each type: the integer of its size, and its fraction bits; the first of these marks a quiet NaN.
_FORMATS = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}


def signed_nan(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN with the payload `number` (0-dim), as far as it fits; a plain NaN if `dtype` has no payload bits, and the
    bits of a NaN for integers."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    fill = torch.iinfo(dtype).max if is_integer else float("nan")
    plain = torch.full((), fill, dtype=dtype, device=device)
    if dtype not in _FORMATS:
        return plain
    integer, fraction = _FORMATS[dtype]
    infinity = ((1 << (8 * dtype.itemsize - 1 - fraction)) - 1) << fraction
    plain.view(integer).fill_(infinity | _quiet(dtype) | _payload(number, dtype))
    return plain


def signature(number: int, dtype: torch.dtype) -> int:
    """The result of `signature_of` for `signed_nan(number, dtype)`; 0 if it cannot be recognised."""
    if dtype not in _FORMATS:
        return 0
    _, fraction = _FORMATS[dtype]
    return _payload(number, dtype) << (_FP64_FRACTION - fraction)


def signature_of(value: float) -> int:
    """The payload bits of a NaN; 0 for plain NaNs and for numbers."""
    if value == value:
        return 0
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return int(bits) & ((1 << (_FP64_FRACTION - 1)) - 1)


def _quiet(dtype: torch.dtype) -> int:
    return 1 << (_FORMATS[dtype][1] - 1)


def _payload(number: int, dtype: torch.dtype) -> int:
    # Neither all zeros nor all ones, which are the NaNs that processors produce.
    return 1 + number % (_quiet(dtype) - 2)


class StandIns:
    """The stand-ins of a store's parameters between their uses."""

    def __init__(self, handles: Sequence[ShardedParameter]) -> None:
        self.handles = tuple(handles)
        self._marked = [handle for handle in handles if handle.stand_in.is_floating_point()]

    def num_overwritten(self) -> Tensor | float:
        """Number of stand-ins filled with a constant (0-dim, on the device), which torch allows and which is lost."""
        # One or two kernels per dtype, for any number of parameters. (One tensor for all stand-ins would be one
        # storage, by which other libraries would treat the parameters as tied.)
        marks: dict[torch.dtype, list[Tensor]] = {}
        for handle in self._marked:
            marks.setdefault(handle.stand_in.dtype, []).append(handle.mark)
        return sum(torch.stack(same).isnan().logical_not().sum() for same in marks.values())

    def refuse_overwritten(self) -> None:
        """Raise an error if there are any, because the intended write is unknown."""
        overwritten = [handle for handle in self._marked if not handle.mark.is_meta and not handle.mark.isnan()]
        names = [handle.name or f"of shape {tuple(handle.shape)}" for handle in overwritten]
        if names:
            raise RuntimeError(
                f"{len(names)} parameters were overwritten while this rank held only a shard of them, which changes "
                f"nothing: {', '.join(names[:8])}. Write inside "
                "`with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, on every rank."
            )

    def sources_of(self, value: float) -> list[str]:
        """Names of the parameters that the NaN `value` may come from, by its bits."""
        bits = signature_of(value)
        sources = [each for each in self.handles if bits and bits == signature(each.number, each.stand_in.dtype)]
        return [repr(handle.name) for handle in sources]


class FirstNan:
    """Reports the first NaN loss of one engine, with the parameter that it comes from."""

    def __init__(self, stand_ins: StandIns, device: torch.device) -> None:
        self._stand_ins: StandIns | None = stand_ins  # until one is reported
        # A loss that the device has not computed yet is read two losses later, without waiting.
        self._delay = 2 if host_runs_ahead(device) else 0
        self._losses: deque[tuple[str, HostCopy]] = deque()

    def look(self, loss: Any, when: str) -> None:
        """Check `loss`, which may be anything; only 0-dim floating-point tensors count."""
        if self._stand_ins is None or not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            return
        if loss.is_meta or torch.compiler.is_compiling():
            return
        self._losses.append((when, HostCopy(loss.detach())))
        while len(self._losses) > self._delay:
            then, copy = self._losses.popleft()
            value: float = copy.read()  # type: ignore[assignment]  # of a 0-dim tensor it is one number
            if value != value:
                self._report(value, then, self._stand_ins)
                return

    def _report(self, value: float, when: str, stand_ins: StandIns) -> None:
        self._stand_ins = None  # report once
        self._losses.clear()
        names = stand_ins.sources_of(value)
        if not names:
            logger.warning(
                "the loss is NaN (%s; said once). If it, or what the model was given, was computed from parameters "
                "outside of forward in a way that Python does not see (a C++ extension, a kernel that takes an "
                "address, torch.tensor(parameter)): those are NaN while they are in shards, %s",
                when,
                _FIX,
            )
            return
        logger.warning(
            "the loss is NaN (%s; said once), and by its bits the NaN comes from %s%s: something has read the "
            "parameter while it was in shards, in a way that Python does not see (a C++ extension, a kernel that takes "
            "an address, torch.tensor(parameter)). Instead %s",
            when,
            " or ".join(names[:_MAX_NAMES]),
            " or others" if len(names) > _MAX_NAMES else "",
            _FIX,
        )
