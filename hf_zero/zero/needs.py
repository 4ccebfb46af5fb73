"""What an engine with offload is about to take, against what there is: said before it is taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm import Collectives
from hf_zero.config import ZeroPolicy
from hf_zero.layout import ParameterSpec
from hf_zero.log import logger
from hf_zero.memory.limits import device_available, disk_available, host_available
from hf_zero.precision import Precision
from hf_zero.zero.sharding import Sharding

WIDE, NARROW = 4, 2  # bytes of a master or of one optimizer state
_GB = 1e9
_HINTS = {
    "host memory": "use more ranks, device nvme, a smaller sub_group_size, or a larger limit of memory",
    "device memory": "use more ranks, a ratio nearer to 1, or offload_param",
    "disk": "free some space, name another nvme_path, or use more ranks",
}


class DoesNotFit(RuntimeError):
    """The states of this training have no room where the config puts them."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one rank takes on top of the model as it is."""

    device: int = 0
    host: int = 0
    disk: int = 0


def needs_of(
    specs: Sequence[ParameterSpec],
    zero: ZeroPolicy,
    sharding: Sharding,
    device: torch.device,
    num_states: int,
    precision: Precision,
) -> Needs:
    """Masters, optimizer states, reduced gradients, buffers; and of stage 3's parameters what goes to a drive.

    Args:
        num_states: optimizer states per element.
    """
    parts = sharding.world if sharding.shards_optimizer else 1
    wide = sum(spec.numel for spec in specs if _size(spec) == WIDE)
    narrow = sum(spec.numel for spec in specs) - wide
    gradients = sum(spec.numel * _size(spec) for spec in specs) // parts
    place = zero.offload_optimizer
    master_bytes, state_bytes = WIDE, NARROW if precision.narrow_states else WIDE
    if precision.narrow_masters:  # the weights themselves, unless those are wanted on another device
        master_bytes = NARROW if place is not None and device.type != "cpu" else 0
    states = (state_bytes * num_states * (wide + narrow) + master_bytes * narrow) // parts
    kept = states + gradients
    far = 0 if place is None else round(kept * place.ratio)
    needs = {"device": kept - far, "host": 0, "disk": 0}
    if place is not None and place.device == "nvme":
        needs["disk"] += far
        longest = min(zero.sub_group_numel, (wide + narrow) // parts)
        needs["host"] += WIDE * longest * place.buffer_count * (1 + place.reads_ahead + place.writes_behind)
    else:
        needs["host"] += far
    rest = zero.offload_param
    if rest is not None:
        weights = sum(spec.numel * _size(spec) for spec in specs) // parts
        on_disk = weights if rest.device == "nvme" and rest.host_numel < (wide + narrow) // parts else 0
        needs["disk"] += on_disk
        needs["host"] += 0 if on_disk or device.type == "cpu" else weights
    if device.type == "cpu":
        needs = {"device": 0, "host": needs["host"] + needs["device"], "disk": needs["disk"]}
    return Needs(**needs)


def check_needs(needs: Needs, zero: ZeroPolicy, device: torch.device, collectives: Collectives) -> None:
    """Say what every rank needs, and refuse on all of them if it cannot fit on any machine. Collective.

    Raises:
        DoesNotFit: with both numbers.
    """
    folders = [place.folder for place in (zero.offload_optimizer, zero.offload_param) if place is not None]
    folder = next((name for name in folders if name is not None), None)
    available = Needs(
        device=device_available(device) if needs.device else 0,
        host=host_available(),
        disk=disk_available(folder) if folder is not None and needs.disk else 0,
    )
    logger.info("offload: this rank needs %s", _sentence(needs, available))
    everyone = collectives.gather_objects((os.uname().nodename, needs, available))
    problems = list(_problems(everyone))  # type: ignore[arg-type]
    if problems:
        raise DoesNotFit("; ".join(problems))


def _problems(everyone: Sequence[tuple[str, Needs, Needs]]) -> list[str]:
    found = []
    for node in dict.fromkeys(name for name, _, _ in everyone):
        needs = [needed for name, needed, _ in everyone if name == node]
        there = [available for name, _, available in everyone if name == node]
        host, disk = sum(one.host for one in needs), sum(one.disk for one in needs)
        have_host, have_disk = min(one.host for one in there), min(one.disk for one in there)
        found += _problem(node, "host memory", host, have_host, len(needs))
        found += _problem(node, "disk", disk, have_disk, len(needs))
        for needed, available in zip(needs, there, strict=True):
            found += _problem(node, "device memory", needed.device, available.device, 1)
    return found


def _problem(node: str, kind: str, needed: int, available: int, ranks: int) -> list[str]:
    if needed <= available:
        return []
    return [
        f"{node}: {ranks} rank(s) need {needed / _GB:.2f} GB of {kind} for masters, optimizer states, gradients and "
        f"buffers, and {available / _GB:.2f} GB are available: {_HINTS[kind]}"
    ]


def _sentence(needs: Needs, available: Needs) -> str:
    parts = [
        f"{needed / _GB:.2f} GB of {kind} ({there / _GB:.2f} GB available)"
        for kind, needed, there in (
            ("device memory", needs.device, available.device),
            ("host memory", needs.host, available.host),
            ("disk", needs.disk, available.disk),
        )
        if needed
    ]
    return (", ".join(parts) or "no memory") + "; activations and gathered parameters come on top"


def _size(spec: ParameterSpec) -> int:
    return int(getattr(torch, spec.dtype).itemsize)
