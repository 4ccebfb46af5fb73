"""What a released parameter holds: a NaN that says whose it is, known again in a loss that was made of it.

A NaN has bits to spare, and here they are a number. Copies and conversions to wider types keep them, and so does most
arithmetic of CPUs; that of GPUs, and conversions to narrower types, make plain NaNs of them (IEEE 754-2019, 6.2.3).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_zero.device.registry import HostCopy, host_runs_ahead
from hf_zero.log import logger

if TYPE_CHECKING:
    from hf_zero.params.sharded_parameter import ShardedParameter
    from hf_zero.params.store import ParameterStore

_MAX_NAMES = 4
_FIX = "read them on every rank inside `with deepspeed.zero.GatheredParameters([parameter]):`."
_FP64_FRACTION = 52  # bits of a float64
# Of each type: the integer of its size, and the bits of its fraction; the first of them says that a NaN is quiet.
_FORMATS = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}


def signed_nan(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN with `number` in it (0-dim), as far as that fits; a plain one where `dtype` has no room, and the bits of
    one for integers."""
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
    """What `signature_of` finds in `signed_nan(number, dtype)`; 0: nothing that could be known again."""
    if dtype not in _FORMATS:
        return 0
    _, fraction = _FORMATS[dtype]
    return _payload(number, dtype) << (_FP64_FRACTION - fraction)


def signature_of(value: float) -> int:
    """The bits to spare of a NaN; 0 for plain ones, and for numbers."""
    if value == value:
        return 0
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return int(bits) & ((1 << (_FP64_FRACTION - 1)) - 1)


def _quiet(dtype: torch.dtype) -> int:
    return 1 << (_FORMATS[dtype][1] - 1)


def _payload(number: int, dtype: torch.dtype) -> int:
    # Neither all zeros nor all ones: those are the NaNs that processors make themselves.
    return 1 + number % (_quiet(dtype) - 2)


class StandIns:
    """What is shown in place of all parameters of a store that have no values between their uses."""

    def __init__(self, handles: Sequence[ShardedParameter]) -> None:
        self.handles = tuple(handles)
        self._marked = [handle for handle in handles if handle.stand_in.is_floating_point()]

    def num_overwritten(self) -> Tensor | float:
        """How many were filled with a constant (0-dim, on the device). torch lets that pass, and the write is lost."""
        # A kernel or two per dtype, however many parameters there are. (One tensor for all stand-ins would be one
        # storage, by which others take parameters for tied.)
        marks: dict[torch.dtype, list[Tensor]] = {}
        for handle in self._marked:
            marks.setdefault(handle.stand_in.dtype, []).append(handle.mark)
        return sum(torch.stack(same).isnan().logical_not().sum() for same in marks.values())

    def refuse_overwritten(self) -> None:
        """Raise if there are any: there is no telling where that write should have gone."""
        found = [handle for handle in self._marked if not handle.mark.is_meta and not handle.mark.isnan()]
        names = [handle.name or f"of shape {tuple(handle.shape)}" for handle in found]
        if names:
            raise RuntimeError(
                f"{len(names)} parameters were overwritten while this rank held only a shard of them, which changes "
                f"nothing: {', '.join(names[:8])}. Write inside "
                "`with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, on every rank."
            )

    def sources_of(self, value: float) -> list[str]:
        """Names of the parameters from which `value`, a NaN, may come, by its bits."""
        return [repr(handle.name) for handle in self.handles if handle.is_source_of(value)]


class FirstNan:
    """Reports the first NaN among the losses of one engine, with the parameter that it comes from."""

    def __init__(self, store: ParameterStore | None, device: torch.device) -> None:
        self._stand_ins = store.stand_ins if store is not None and store.stand_ins.handles else None
        # A loss that the device has not computed yet is read two losses later, without a wait.
        self._delay = 2 if host_runs_ahead(device) else 0
        self._losses: deque[tuple[str, HostCopy]] = deque()

    def look(self, loss: Any, when: str) -> None:
        """`loss`: anything; what is not a 0-dim floating tensor with values is none."""
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
        self._stand_ins = None  # said once
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
