"""Compares the memory that an engine with offload needs with what is available, before allocation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm import Collectives
from hf_zero.config import ZeroPolicy
from hf_zero.device.host_memory import disk_available, host_available
from hf_zero.device.registry import runtime_of
from hf_zero.layout import ParameterSpec
from hf_zero.layout.sharding import Sharding
from hf_zero.log import log_dist
from hf_zero.precision import Precision

FP32_BYTES, LP_BYTES = 4, 2  # bytes of a master or of one optimizer state
GRADIENT_BUFFERS = 3  # bucket buffers with a drive: two being reduced, one being written
STREAMED_NUMEL = 1 << 23  # maximum sub-group under streaming, whose masters are joined for the update
AT_ONCE = 3  # minimum parameter shards in memory: one in use, one being fetched, one being written
_HINTS = {
    "host memory": "use more ranks, device nvme, a smaller sub_group_size, or a larger limit of memory",
    "device memory": "use more ranks, a ratio nearer to 1, or offload_param",
    "disk": "free some space, name another nvme_path, or use more ranks",
}


class DoesNotFit(RuntimeError):
    """Raised if the states do not fit in the memory that the config assigns to them."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that one rank needs in addition to the existing model."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes that determine the memory needs, besides the parameters.

    Attributes:
        num_states: state values of the optimizer per element.
        stored_bytes: bytes per element of states with their own storage format.
        longest: elements of the largest bucket that is reduced (and at stage 3 gathered) in one collective.
        keeps_gradients: whether all gradients are kept until the step; otherwise updates during backward free them.
    """

    num_states: int
    longest: int
    precision: Precision
    stored_bytes: float = 0.0
    keeps_gradients: bool = True


def estimate_memory(
    specs: Sequence[ParameterSpec], zero: ZeroPolicy, sharding: Sharding, device: torch.device, sizes: StateSizes
) -> MemoryEstimate:
    """Estimate masters, optimizer states, reduced gradients and buffers; at stage 3 also parameters on a drive, and
    second shards of trained parameters."""
    parts = sharding.world if sharding.shards_optimizer else 1
    numel, weights, fp32 = (
        sum(sum(map(of, together)) // (world if parts > 1 and world else parts) for world, together in _by_world(specs))
        for of in (
            lambda spec: spec.numel,
            lambda spec: spec.numel * _size(spec),
            lambda spec: spec.numel * (_size(spec) == FP32_BYTES),
        )
    )
    bucket = sizes.longest // parts * max((_size(spec) for spec in specs), default=0)
    place, rest = zero.offload_optimizer, zero.offload_param
    on_host = not runtime_of(device).has_own_memory
    master_bytes, state_bytes = FP32_BYTES, LP_BYTES if sizes.precision.low_precision_states else FP32_BYTES
    if sizes.precision.low_precision_masters:  # the weights themselves, unless these are needed on another device
        master_bytes = LP_BYTES if place is not None and not on_host else 0
    gradients, buffers, streaming = weights, 0, zero.streaming  # gradients are as large as weights
    if streaming is not None:
        master_bytes, state_bytes = streaming.master_bytes(LP_BYTES, master_bytes), streaming.state_bytes(state_bytes)
        buffers = AT_ONCE * FP32_BYTES * min(sizes.longest // parts, STREAMED_NUMEL)
        if not sizes.keeps_gradients:
            gradients = AT_ONCE * bucket
    states = state_bytes * sizes.num_states * numel + master_bytes * (numel - fp32) + round(sizes.stored_bytes * numel)
    kept = states + gradients + buffers
    far = 0 if place is None else round(kept * place.ratio)
    near, host, disk = kept - far, 0, 0
    rows = weights * sharding.kept_rows
    if rest is None or (on_host and rest.device == "cpu"):
        near += rows - weights
    if place is not None and place.device == "nvme":
        disk += far
        longest = sizes.longest // parts
        sub_group = FP32_BYTES * min(zero.sub_group_numel or longest, longest)
        host += sub_group * place.buffer_count * (1 + place.reads_ahead + place.writes_behind)
        host += GRADIENT_BUFFERS * bucket
    else:
        host += far
    if rest is not None and rest.device == "nvme":
        share = min(1.0, rest.max_in_cpu / max(1, numel * sharding.kept_rows))
        disk += round(rows * (1 - share))
        host += 0 if on_host else round(rows * share)
        if share < 1.0:
            row = bucket * sharding.kept_rows
            allowed = min(rest.buffer_numel * bucket // max(1, sizes.longest // parts), rest.buffer_count * row)
            host += max(allowed, AT_ONCE * row)
    elif rest is not None:
        host += 0 if on_host else rows
    return MemoryEstimate(device=0 if on_host else near, host=host + near if on_host else host, disk=disk)


def check_memory(estimate: MemoryEstimate, zero: ZeroPolicy, device: torch.device, collectives: Collectives) -> None:
    """Log what each rank needs, and raise on all ranks if some machine cannot provide it. Collective.

    Raises:
        DoesNotFit: with both numbers.
    """
    folders = [place.nvme_path for place in (zero.offload_optimizer, zero.offload_param) if place is not None]
    folder = next((name for name in folders if name is not None), None)
    available = MemoryEstimate(
        device=runtime_of(device).available() if estimate.device else 0,
        host=host_available(),
        disk=disk_available(folder) if folder is not None and estimate.disk else 0,
    )
    log_dist(f"offload: this rank needs {_sentence(estimate, available)}")
    everyone = collectives.gather_objects((os.uname().nodename, estimate, available))
    problems = list(_problems(everyone))  # type: ignore[arg-type]
    if problems:
        raise DoesNotFit("; ".join(problems))


def _problems(everyone: Sequence[tuple[str, MemoryEstimate, MemoryEstimate]]) -> Iterator[str]:
    for node in dict.fromkeys(name for name, _, _ in everyone):
        estimate = [needed for name, needed, _ in everyone if name == node]
        there = [available for name, _, available in everyone if name == node]
        host, disk = sum(one.host for one in estimate), sum(one.disk for one in estimate)
        have_host, have_disk = min(one.host for one in there), min(one.disk for one in there)
        for kind, needed, available, ranks in (
            ("host memory", host, have_host, len(estimate)),
            ("disk", disk, have_disk, len(estimate)),
            *(("device memory", one.device, has.device, 1) for one, has in zip(estimate, there, strict=True)),
        ):
            if needed > available:
                yield (
                    f"{node}: {ranks} rank(s) need {_amount(needed)} of {kind} for masters, optimizer states, "
                    f"gradients and buffers, and {_amount(available)} are available: {_HINTS[kind]}"
                )


def _sentence(estimate: MemoryEstimate, available: MemoryEstimate) -> str:
    parts = [
        f"{_amount(needed)} of {kind} ({_amount(there)} available)"
        for kind, needed, there in (
            ("device memory", estimate.device, available.device),
            ("host memory", estimate.host, available.host),
            ("disk", estimate.disk, available.disk),
        )
        if needed
    ]
    return (", ".join(parts) or "no memory") + "; activations and gathered parameters come on top"


def _amount(num_bytes: int) -> str:
    """Format bytes in the largest suitable unit, because small models are offloaded, too."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _by_world(specs: Sequence[ParameterSpec]) -> list[tuple[int, list[ParameterSpec]]]:
    """Group specs by the number of ranks that shard them; 0: the default number."""
    return [(world, [spec for spec in specs if spec.world == world]) for world in {spec.world for spec in specs}]


def _size(spec: ParameterSpec) -> int:
    return int(getattr(torch, spec.dtype).itemsize)
