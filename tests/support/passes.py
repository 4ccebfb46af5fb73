"""Counts the bytes that PyTorch's operations read and write, without running on the intended device.

    with Passes() as passes:
        with passes.during("update"):
            optimizer.step()
    passes.bytes["update"]          # (read, written)

An operation reads every input tensor once, and writes every tensor that it creates or changes; one that only overwrites
(`copy_`, `zero_`, `out=`) does not read its target. Views cost nothing; an expanded element counts once. Reuse in a
cache between operations is not modelled, as on a GPU with vectors larger than its cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OVERWRITE = set("copy_ _foreach_copy_ fill_ zero_ _foreach_zero_ split_with_sizes_copy chunk_cat _chunk_cat".split())
# They only allocate, or are views although their schemas do not say so.
_NOTHING = set("empty empty_like new_empty empty_strided resize_ set_ detach _unsafe_view _reshape_alias".split())
_NOTHING |= set("record_stream is_pinned _local_scalar_dense lift_fresh".split())


class Passes(TorchDispatchMode):
    """Counts operations by the current phase; outside of all phases it is "".

    Attributes:
        bytes: (read, written) by phase.
        calls: [(operation, bytes read, bytes written)] by phase, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        self._phases = [""]

    @property
    def bytes(self) -> dict[str, tuple[int, int]]:
        return {
            phase: (sum(read for _, read, _ in calls), sum(written for *_, written in calls))
            for phase, calls in self.calls.items()
        }

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()

    def add(self, name: str, read: int, written: int) -> None:
        """Counts something that is not a PyTorch operation: a kernel of hf_zero, a collective."""
        self.calls[self._phases[-1]].append((name, read, written))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        if name in _NOTHING:
            return result
        read: dict[Any, int] = {}
        written: dict[Any, int] = {}
        given = list(zip(schema.arguments, args, strict=False))
        if name == "all_gather_copy_in":  # FSDP2's; its schema does not say that it writes what it returns first
            read = {_place(tensor): _bytes(tensor) for tensor in _tensors(args[0])}
            self.add(name, sum(read.values()), _bytes(result[0]))
            return result
        given += [(each, kwargs[each.name]) for each in schema.arguments if kwargs and each.name in kwargs]
        for argument, value in given:
            changes = argument.alias_info is not None and argument.alias_info.is_write
            # Fused optimizers change gradients only with a grad_scale.
            changes &= not (name.startswith("_fused_") and argument.name == "grads")
            for tensor in _tensors(value):
                if changes:
                    written[_place(tensor)] = _bytes(tensor)
                if not changes or (name not in _OVERWRITE and not argument.is_out):
                    read[_place(tensor)] = _bytes(tensor)
        for each, value in zip(schema.returns, _returned(result, len(schema.returns)), strict=True):
            if each.alias_info is None:
                written |= {_place(tensor): _bytes(tensor) for tensor in _tensors(value)}
        if written:  # otherwise it is a view
            self.add(name, sum(read.values()), sum(written.values()))
        return result


def _returned(result: Any, count: int) -> list[Any]:
    return list(result) if count > 1 else [result] * count


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield getattr(value, "_local_tensor", value)  # of a DTensor, the local part
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _bytes(tensor: Tensor) -> int:
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size() if tensor.numel() else 0


def adamw_traffic() -> dict[str, float]:
    """Bytes per parameter of PyTorch's AdamW with fp32 masters, bf16 gradients cast to fp32 and weights cast back."""
    numel = 1 << 12
    found = {}
    for name in ("fused", "foreach"):
        master = torch.nn.Parameter(torch.zeros(numel))
        gradient, weight = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
        master.grad = torch.zeros(numel)
        optimizer = torch.optim.AdamW([master], weight_decay=0.1, **{name: True})
        optimizer.step()
        with torch.no_grad(), Passes() as passes:
            master.grad.copy_(gradient)
            optimizer.step()
            weight.copy_(master)
        found[name] = round(sum(map(sum, passes.bytes.values())) / numel)
    return found
