"""Why a plan takes what it takes; and when nothing fits, what would make it fit, by the same sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hf_zero.config import ConfigError
from hf_zero.planning.candidates import Candidate, ds_config, resolved
from hf_zero.planning.choose import Estimate, Plan, gigabytes, kept_by_layers, optimizer_size, setting_of, traced
from hf_zero.planning.event_model import LANES
from hf_zero.planning.machine import Hardware
from hf_zero.planning.memory import rank_memory
from hf_zero.planning.model import PlannedModel, Tiling


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
    for each in found.rows:
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
    return f"{gigabytes(each.memory.device_total)} per device, about {rate:,.0f} tokens/s, bound by {LANES[each.bound]}"


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
    on_host = False

    def then(what: str) -> Remedy:
        return Remedy(what, _device_bytes(found, candidate, tiling, on_host))

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
    if candidate.copy_per_host or candidate.second_shard > 1:
        candidate = replace(candidate, copy_per_host=False, second_shard=1)  # groups that tensor parallelism refuses
    yield from _other_ranks(found, candidate, tiling, on_host)


def _other_ranks(found: Plan, candidate: Candidate, tiling: Tiling, on_host: bool) -> Iterator[Remedy]:
    """Several ranks per sequence, as few as are enough; if none are, or nothing helps, parts of matrices instead."""
    training, hardware, best = found.training, found.hardware, None
    if training.tensor_parallel == 1:
        for size in sequence_sizes(found.model, hardware):
            if size > training.sequence_parallel and (best is None or best.device > hardware.limit):
                shared = replace(found, training=replace(training, sequence_parallel=size))
                best = Remedy(f"sequence_parallel_size {size}", _device_bytes(shared, candidate, tiling, on_host))
    if best is not None:
        yield best
    if training.sequence_parallel > 1 or training.expert_parallel > 1:
        return
    for size in range(training.tensor_parallel + 1, hardware.per_host + 1):
        if hardware.per_host % size:
            continue
        try:
            model = _cut(found.model, size)
        except ConfigError:
            return  # a model without a plan
        cut = replace(found, model=model, training=replace(training, tensor_parallel=size))
        device = _device_bytes(cut, candidate, tiling, on_host)
        if device <= hardware.limit:
            instead = f", instead of {best.what}" if best is not None else ""
            yield Remedy(f"tensor_parallel.autotp_size {size}{instead}", device)
            return


@lru_cache(maxsize=4)
def _cut(model: PlannedModel, size: int) -> PlannedModel:
    return model.cut(size)


def sequence_sizes(model: PlannedModel, hardware: Hardware) -> list[int]:
    """Numbers of ranks of one host that may share the model's sequences, rising from 1."""
    found = [1]
    for size in range(2, hardware.per_host + 1):
        try:
            model.check_shares(size)
        except ConfigError:
            continue
        found += [size] if hardware.per_host % size == 0 else []
    return found


def _device_bytes(found: Plan, candidate: Candidate, tiling: Tiling, on_host: bool) -> int:
    """Of a rank, by the layout and a trace, as those of candidates."""
    model, training, hardware = found.model, found.training, found.hardware
    answers = resolved(ds_config(candidate, training), training, model, hardware.ranks)
    setting = setting_of(answers, optimizer_size(training), hardware)
    seen = traced(model, training, checkpointing=candidate.checkpointing, tiling=tiling, on_cpu=not hardware.separate)
    memory = rank_memory(model, setting, seen)
    return (memory.with_activations_on_host(kept_by_layers(model, training)) if on_host else memory).device_total
