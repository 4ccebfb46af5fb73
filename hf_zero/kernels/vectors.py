"""Inputs of all kernels: flat vectors of one length, processed in chunks with at least fp32 precision and rounded once.

Rounding to 16 bits is to nearest, or stochastic for training with bf16 weights only: values are rounded up with a
probability proportional to their distance from the lower neighbour, so that updates smaller than half a bf16 step are
preserved on average (Gupta et al. 2015, arXiv 1502.02551).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Barrier
from typing import Protocol, TypeVar

import torch
from torch import Tensor

CPU_CHUNK_NUMEL = 1 << 17  # per thread: 512 KiB of fp32 scratch stay in cache, with a call overhead below 1%
DEVICE_CHUNK_NUMEL = 1 << 26
_Part = TypeVar("_Part")
_DROPPED_BITS = 16  # bf16 keeps 7 of fp32's 23 mantissa bits


class Rest(Protocol):
    """The bits that bf16 weights lack of fp32 masters: `split` rounds and keeps these bits, `join` restores masters."""

    def part(self, start: int, length: int) -> Rest: ...
    def join(self, weights: Tensor, masters: Tensor) -> None: ...
    def split(self, masters: Tensor, weights: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Vectors:
    """1-D tensors of one length.

    Attributes:
        weight: updated in place. 16-bit weights are updated in fp32 and rounded once.
        gradient: read only, in any floating dtype.
        states: optimizer states, updated in place; empty for an optimizer without states.
        lp_param: receives the rounded weight; None if there is no separate low-precision weight.
        rest: the bits that a bf16 `weight` lacks of its fp32 master; None if `weight` is the master itself.
    """

    weight: Tensor
    gradient: Tensor
    states: tuple[Tensor, ...] = ()
    lp_param: Tensor | None = None
    rest: Rest | None = None

    def part(self, start: int, length: int) -> Vectors:
        """Views of the same interval of every vector."""
        return Vectors(
            weight=self.weight.narrow(0, start, length),
            gradient=self.gradient.narrow(0, start, length),
            states=tuple(state.narrow(0, start, length) for state in self.states),
            lp_param=None if self.lp_param is None else self.lp_param.narrow(0, start, length),
            rest=None if self.rest is None else self.rest.part(start, length),
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """How a gradient is applied.

    Attributes:
        scale: factor on the gradient.
        skip: one element on the device; if nonzero, nothing changes. None: no check.
        seed: seed for stochastic rounding of bf16 weights; None: round to nearest.
    """

    scale: Tensor | float = 1.0
    skip: Tensor | None = None
    seed: int | None = None


AS_IS = Applied()


# Chunks stay in cache on a CPU, and are long on an accelerator.


def chunk_numel(device: torch.device, times: int = 1) -> int:
    """Number of elements per chunk; multiplied by `times` on a CPU, for kernels with the overhead of many calls."""
    return CPU_CHUNK_NUMEL * times * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK_NUMEL


def chunks(numel: int, device: torch.device, times: int = 1) -> list[tuple[int, int]]:
    """(start, length) pairs that cover `numel` elements."""
    step = chunk_numel(device, times)
    return [(start, min(step, numel - start)) for start in range(0, numel, step)]


def on_threads(work: Callable[[_Part], object], parts: Sequence[_Part], device: torch.device) -> None:
    """Call `work` on each part. On a CPU as many threads as PyTorch has take the parts in turn, each running its
    operations alone.

    For kernels of many operations on data in cache, some of which PyTorch runs on one thread only. Where each operation
    is split among threads, those wait for one another, busily, after every one of them.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1 or len(parts) < 2:
        for part in parts:
            work(part)
        return

    def alone(part: _Part) -> None:
        with torch.no_grad():  # a setting of each thread
            work(part)

    for _ in _workers(threads).map(alone, parts):
        pass


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, "hf_zero_kernel", _run_operations_alone)
    begun = Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(begun.wait)
    begun.wait()
    torch.set_num_threads(threads)  # for threads that begin later; the workers and this thread keep their own number
    return pool


def _run_operations_alone() -> None:
    torch.get_num_threads()  # initializes this thread's; otherwise the first operation would, with everyone's
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not survive a fork


def scratch_like(device: torch.device, numel: int, times: int = 1) -> Tensor:
    """An uninitialised fp32 chunk for at most `numel` elements."""
    return torch.empty(min(chunk_numel(device, times), numel), dtype=torch.float32, device=device)


def fp32_chunks(
    vectors: Vectors,
    scale: Tensor | float = 1.0,
    skip: Tensor | None = None,
    seed: int | None = None,
    times: int = 1,
) -> Iterator[Vectors]:
    """Iterate over `vectors` in parts whose casts stay in cache, with one dtype, at least fp32, and scaled gradients.

    The caller updates weight and states of each part in place, but not the gradient. Before the next part, converted
    vectors are written back, and `lp_param` is written.

    Args:
        scale: factor on every gradient.
        skip: one element; if it is not zero, nothing changes. On a CPU no parts are yielded then; on a device, where
            reading it would synchronize, changes of parts are reverted.
        seed: seed for stochastic rounding to 16 bits; None: round to nearest.
        times: factor on the length of parts on a CPU.
    """
    if skip is not None and _is_at_hand(skip):
        if bool(skip):
            return
        skip = None
    weight = vectors.weight
    compute_dtype = torch.promote_types(weight.dtype, torch.float32)
    length = weight.numel()
    is_scaled = isinstance(scale, Tensor) or scale != 1.0
    gradient_scratch = _scratch(vectors.gradient, compute_dtype, length, times, always=is_scaled)
    scratches = [_scratch(vector, compute_dtype, length, times) for vector in (weight, *vectors.states)]
    generator = None if seed is None else generator_for(weight.device, seed)
    for start, count in chunks(length, weight.device, times):
        part = vectors.part(start, count)
        gradient = part.gradient
        if gradient_scratch is not None:
            gradient = gradient_scratch[:count].copy_(gradient)
            if is_scaled:
                gradient.mul_(scale)
        changing = (part.weight, *part.states)
        put_back = keep(skip, changing if part.lp_param is None else (*changing, part.lp_param))
        in_fp32 = [
            own if scratch is None else scratch[:count].copy_(own)
            for own, scratch in zip(changing, scratches, strict=True)
        ]
        if part.rest is not None:
            part.rest.join(part.weight, in_fp32[0])
        yield Vectors(weight=in_fp32[0], gradient=gradient, states=tuple(in_fp32[1:]))
        for own, updated in zip(changing, in_fp32, strict=True):
            if part.rest is not None and own is part.weight:
                part.rest.split(updated, own)
            elif own is not updated:
                store(own, updated, generator if own is part.weight else None)
        if part.lp_param is not None:
            store(part.lp_param, in_fp32[0], generator)
        put_back()


def _is_at_hand(flag: Tensor) -> bool:
    return flag.device.type == "cpu"


def keep(skip: Tensor | None, changing: Sequence[Tensor]) -> Callable[[], None]:
    """Copy tensors before an update. The result reverts them on the device if the flag is set, which the host cannot
    read."""
    if skip is None or _is_at_hand(skip):
        return lambda: None
    copies, undoes = [tensor.clone() for tensor in changing], skip.view(()) != 0

    def put_back() -> None:
        for tensor, before in zip(changing, copies, strict=True):
            torch.where(undoes, before, tensor, out=tensor)

    return put_back


def _scratch(
    vector: Tensor, compute_dtype: torch.dtype, numel: int, times: int, *, always: bool = False
) -> Tensor | None:
    if vector.dtype == compute_dtype and not always:
        return None
    return scratch_like(vector.device, numel, times).to(compute_dtype)


# Rounding


def stochastic_reference(value: Tensor, noise: Tensor) -> Tensor:
    """Round `value` (fp32) to bf16: truncate after adding `noise` (integers below 2 ** 16) to the dropped bits."""
    truncated = (value.view(torch.int32) + noise) >> _DROPPED_BITS << _DROPPED_BITS
    rounded = truncated.view(torch.float32).to(torch.bfloat16)
    return torch.where(torch.isfinite(value), rounded, value.to(torch.bfloat16))


def generator_for(device: torch.device, seed: int) -> torch.Generator:
    """A separate generator, so that rounding does not change the global random state."""
    return torch.Generator(device=device).manual_seed(seed)


def store(target: Tensor, value: Tensor, generator: torch.Generator | None = None) -> None:
    """target = value, rounded to nearest, or stochastically with a generator and a bf16 target."""
    if generator is None or target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    noise = torch.randint(
        0, 1 << _DROPPED_BITS, value.shape, generator=generator, dtype=torch.int32, device=value.device
    )
    target.copy_(stochastic_reference(value.float(), noise))
