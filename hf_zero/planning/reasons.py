"""Why a plan takes what it takes; and when nothing fits, what would make it fit, by the same sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_zero.planning.candidates import ds_config, resolved
from hf_zero.planning.choose import Estimate, Plan, gigabytes, optimizer_size, shard_ranks
from hf_zero.planning.memory import ACTIVATIONS, Setting, rank_memory
from hf_zero.planning.model import Tiling, trace

KEPT_ON_DEVICE = 2  # inputs of layers, with cpu_checkpointing: of the one at work, and of the next on its way back


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something that no candidate does, with all that came before it.

    Attributes:
        device: bytes of a device that are needed then.
    """

    what: str
    device: int


def reasoning(found: Plan) -> list[str]:
    """Why it is this one, step by step, in the order of preference."""
    lines = []
    for each in found.estimates:
        if each is found.chosen:
            lines.append(f"{each.candidate.name}: fits, {_speed(each, found)}; taken")
        elif each.fits:
            lines.append(f"{each.candidate.name}: fits, {_speed(each, found)}")
        else:
            lines.append(f"{each.candidate.name}: does not fit: {'; '.join(each.lacks)}")
    if found.chosen is None:
        lines.append(what_else(found))
    return [*lines, *found.refused]


def _speed(each: Estimate, found: Plan) -> str:
    rate = each.tokens_per_s(found.training, found.hardware.ranks)
    return f"{gigabytes(each.memory.device_total)} per device, about {rate:,.0f} tokens/s, bound by {each.bound}"


def what_else(found: Plan) -> str:
    """What would make something fit: the remedies up to the first that is enough, the cheapest first."""
    least = min(found.estimates, key=lambda each: each.memory.device_total)
    words, limit = [f"nothing fits ({least.candidate.name} needs least of a device)"], found.hardware.limit
    if least.memory.device_total > limit:
        for remedy in remedies(found, least):
            words.append(f"{remedy.what}: {gigabytes(remedy.device)} then")
            if remedy.device <= limit:
                words.append("which fits a device")
                break
        else:
            words.append(f"more devices: {gigabytes(limit)} of each can be used")
    elif found.training.nvme_path is None:
        words.append("name a drive with --nvme-path, or take more hosts: a host's memory is full")
    else:
        words.append("take more hosts: a host's memory or its drive is full")
    return "; ".join(words)


def remedies(found: Plan, least: Estimate) -> Iterator[Remedy]:
    """One on top of the other, by what they cost: nothing, a forward again, small kernels, PCIe, other ranks."""
    training, hardware, candidate = found.training, found.hardware, least.candidate
    tiling = kept_tiling = Tiling()
    on_host, ranks = False, 1

    def then(what: str) -> Remedy:
        return Remedy(what, _device_bytes(found, replace(least, candidate=candidate), tiling, on_host, ranks))

    if training.micro_batch > 1:
        accumulation = training.accumulation * training.micro_batch
        training = replace(training, micro_batch=1, accumulation=accumulation)
        found = replace(found, training=training)
        yield then(f"a micro-batch of 1, accumulated {accumulation} times")
    if not candidate.checkpointing:
        candidate = replace(candidate, checkpointing=True)
        yield then("gradient checkpointing")
    whole, fits = then(""), Tiling.that_fits(found.model.module)
    for tiling, key in ((Tiling(loss=fits.loss), "tiled_loss"), (fits, "tiled_mlp")):
        tiled = then(f"hf_zero.{key}")
        if tiled.device < whole.device:  # what a tile needs besides may be more than it saves
            whole, kept_tiling = tiled, tiling
            yield tiled
        tiling = kept_tiling
    if hardware.separate:
        on_host = True
        yield then("activation_checkpointing.cpu_checkpointing")
    heads = found.model.heads[0]
    ranks = max(n for n in range(1, hardware.per_host + 1) if hardware.per_host % n == 0 and heads % n == 0)
    if ranks > 1:
        yield then(f"sequence_parallel_size {ranks}")


def _device_bytes(found: Plan, least: Estimate, tiling: Tiling, on_host: bool, ranks: int) -> int:
    """Of a rank, by the layout and a trace, as those of candidates."""
    model, training, hardware, candidate = found.model, found.training, found.hardware, least.candidate
    answers = resolved(ds_config(candidate, training), training, model, hardware.ranks)
    setting = Setting(answers, optimizer_size(training), shard_ranks(answers, hardware), hardware.separate)
    length = -(-training.length // ranks)
    traced = trace(
        model,
        micro_batch=training.micro_batch,
        length=length,
        checkpointing=candidate.checkpointing,
        tiling=tiling,
    )
    memory = rank_memory(model, setting, traced)
    kept = training.micro_batch * length * model.hidden * model.dtype.itemsize * max(0, model.layers - KEPT_ON_DEVICE)
    return memory.device_total - (min(kept, memory.device.get(ACTIVATIONS, 0)) if on_host else 0)
