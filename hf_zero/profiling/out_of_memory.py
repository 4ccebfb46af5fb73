"""An out-of-memory error of forward, backward or step ends with what held the memory, and the change that would have
made it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.profiling.memory_by_kind import (
    GATHERED,
    GRADIENTS,
    MASTERS,
    REST,
    SHARDS,
    STATES,
    Kinds,
    cached_bytes,
    free_bytes,
    memory_by_kind,
)
from hf_zero.profiling.numbers import amount

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ON_CPU = ("can't allocate memory", "not enough memory")
# A recomputed block keeps its input; what one block computes is there while it is recomputed.
_BLOCKS_WITHOUT_A_NUMBER = 8


@dataclass(frozen=True, slots=True)
class Change:
    """Something to change in ds.json or in the arguments, and the bytes it would free on the device."""

    what: str
    frees: int


class OutOfMemoryHelp:
    """An onlooker of the engine's phases; does nothing until one fails for want of memory."""

    def __init__(self, engine: Any) -> None:
        """`engine`: a weak proxy."""
        self._engine = engine

    def phase_begins(self, name: str) -> None:
        return None

    def phase_ends(self, name: str) -> None:
        return None

    def phase_fails(self, name: str, error: Exception) -> None:
        if not is_out_of_memory(error) or getattr(error, "is_explained", False):
            return
        kinds, engine = memory_by_kind(self._engine), self._engine
        lacks = requested_bytes(str(error)) - free_bytes(engine.device)
        text = explanation(name, kinds, lacks, list(changes(engine, kinds)), cached_bytes(engine.device))
        error.args = (f"{error}\n\n{text}",)
        error.is_explained = True  # type: ignore[attr-defined]


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ON_CPU)


def requested_bytes(message: str) -> int:
    """What could not be had; 0 where the message does not say."""
    found = _ASKED.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def explanation(phase: str, kinds: Kinds, lacks: int, changes: list[Change], cached: int = 0) -> str:
    """What held the memory, and the change.

    Args:
        lacks: bytes more than there were; not positive: memory was there, in pieces.
        changes: in the order in which they are to be preferred.
        cached: bytes that PyTorch keeps and no tensor uses.
    """
    total = sum(kinds.values()) or 1
    lines = [f"hf_zero: in {phase}, this rank's memory on the device was taken by"]
    for kind, num_bytes in sorted(kinds.items(), key=lambda entry: -entry[1]):
        lines.append(f"  {kind:<26}{amount(num_bytes):>12}{num_bytes / total:>8.1%}")
    if lacks <= 0 and cached:
        fix = "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
        lines.append(f"{amount(cached)} were free, in pieces that are too small: {fix}")
        return "\n".join(lines)
    lines.append(_advice(max(1, lacks), changes))
    return "\n".join(lines)


def _advice(lacks: int, changes: list[Change]) -> str:
    """The first change that is enough, or the fewest that are enough together."""
    short = f"{amount(lacks)} more were needed"
    enough = next((change for change in changes if change.frees >= lacks), None)
    if enough is not None:
        return f"{short}. One change would have made it fit: {enough.what} (frees about {amount(enough.frees)})"
    taken: list[Change] = []
    for change in changes:
        taken.append(change)
        if sum(each.frees for each in taken) >= lacks:
            listed = "; ".join(f"{each.what} (about {amount(each.frees)})" for each in taken)
            return f"{short}. No single change is enough; these together are: {listed}"
    listed = "".join(f"\n  {each.what}: about {amount(each.frees)}" for each in taken)
    there_are = f". What there is to switch on:{listed}" if listed else ""
    return f"{short}, and no change of the config frees as much: use more ranks, or a smaller model{there_are}"


def changes(engine: Any, kinds: Kinds) -> Iterator[Change]:
    """What this engine could still change, the cheapest first, as one would try them by hand."""
    zero, world = engine.settings.resolved.zero, engine.groups.shard.size
    _, micro_batch, steps = engine.get_batch_info()
    left = 1 - 1 / world
    if micro_batch > 1:
        what = (
            f"train_micro_batch_size_per_gpu (per_device_train_batch_size) {micro_batch // 2 or 1} and "
            f"gradient_accumulation_steps {steps * 2}, which computes the same"
        )
        yield Change(what, kinds.get(REST, 0) // 2)
    if _can_checkpoint(engine.module):
        blocks = getattr(getattr(engine.module, "config", None), "num_hidden_layers", None) or _BLOCKS_WITHOUT_A_NUMBER
        frees = int(kinds.get(REST, 0) * (1 - 2 / (blocks + 1)))
        yield Change("gradient checkpointing (--gradient_checkpointing)", frees)
    states = kinds.get(MASTERS, 0) + kinds.get(STATES, 0)
    # What every rank still has whole.
    whole = (states if zero.stage == 0 else 0) + (kinds.get(GRADIENTS, 0) if zero.stage < 2 else 0)
    if zero.stage < 2 and world > 1:
        yield Change("zero_optimization.stage 2", int(whole * left))
    if zero.offload_optimizer is None and runtime_is_separate(engine):
        yield Change('zero_optimization.offload_optimizer {"device": "cpu"}', states + kinds.get(GRADIENTS, 0))
    if zero.stage < 3 and world > 1:
        yield Change("zero_optimization.stage 3", int((whole + kinds.get(GATHERED, 0)) * left))
    if zero.stage == 3 and zero.offload_param is None and runtime_is_separate(engine):
        yield Change('zero_optimization.offload_param {"device": "cpu"}', kinds.get(SHARDS, 0))


def runtime_is_separate(engine: Any) -> bool:
    """Whether host memory is another place than the device's."""
    return bool(engine.device.type != "cpu")


def _can_checkpoint(module: Any) -> bool:
    if not getattr(module, "supports_gradient_checkpointing", False):
        return False
    # transformers 5 has another name for it, and warns of the older one.
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return not next((getattr(module, name) for name in names if hasattr(type(module), name)), True)
