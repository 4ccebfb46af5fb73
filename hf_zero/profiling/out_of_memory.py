"""Extends an out-of-memory error of forward, backward or step by what held the memory, and by the config change that
would have made it fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from hf_zero.config.schema.long_sequences import LOSS_BYTES, ActivationCheckpointing, Tiling, on_host
from hf_zero.device.host_memory import host_available
from hf_zero.device.registry import reserved, runtime_of
from hf_zero.features import text_config
from hf_zero.precision import with_scales
from hf_zero.profiling.flops import amount

SHARDS, GATHERED, MASTERS, STATES = "parameter shards", "parameters", "master weights", "optimizer states"
GRADIENTS, BUFFERS, REST = "gradients", "communication buffers", "activations and the rest"
Kinds = dict[str, int]  # bytes
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ON_CPU = ("can't allocate memory", "not enough memory")
# A checkpointed block keeps its input; the activations of one block exist while it is recomputed.
_BLOCKS_WITHOUT_A_NUMBER = 8
_TILE_TOKENS = 1024  # minimum number of tokens per tile of tiled MLPs and losses
_MLP_TENSORS = 4  # tensors of the intermediate size, in the model's dtype: gate, up, activation, product


def memory_by_kind(engine: Any) -> Kinds:
    """Bytes in use on the engine's device by kind, with each storage counted once. `REST` is what remains.

    On a CPU the rest also includes the interpreter, libraries and data of the process.
    """
    device, seen = engine.device, set[int]()
    sizes = {kind: _size(tensors, device, seen) for kind, tensors in _kinds(engine)}
    sizes[REST] = max(0, _in_use(device) - sum(sizes.values()))
    return {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes}


def free_bytes(device: torch.device) -> int:
    """Bytes still available, including PyTorch's cache."""
    return runtime_of(device).available() if runtime_of(device).has_own_memory else host_available()


def cached_bytes(device: torch.device) -> int:
    """Bytes that PyTorch has reserved but no tensor uses."""
    return max(0, reserved(device)[0] - runtime_of(device).allocated()[0])


def _kinds(engine: Any) -> Iterator[tuple[str, Iterable[Tensor]]]:
    assembly = engine.gradients.assembly
    sub_groups = assembly.optimizer.sub_groups if assembly is not None else ()
    buckets = assembly.reducer.buckets if assembly is not None else ()

    def shards() -> Iterator[Tensor]:
        # The weights that the update writes, if they are separate from the masters; else the masters are the shards.
        sharded = assembly is not None and assembly.optimizer.sharding.shards_parameters
        for sub_group in sub_groups if sharded else ():
            yield sub_group.master if sub_group.lp_param is None else sub_group.lp_param

    def states() -> Iterator[Tensor]:
        for state in assembly.optimizer.state.values() if assembly is not None else ():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def gradients() -> Iterator[Tensor]:
        for bucket in buckets:
            yield from (tensor for tensor in (bucket.local, bucket.reduced.at_hand) if tensor is not None)
        yield from (p.grad for p in engine.module.parameters() if p.grad is not None)

    yield SHARDS, shards()
    yield GATHERED, (p.data for p in with_scales(engine.module.parameters()))
    yield MASTERS, (sub_group.master for sub_group in sub_groups)
    yield STATES, states()
    yield GRADIENTS, gradients()
    yield "buffers of the model", engine.module.buffers()
    yield BUFFERS, engine.groups.shard.buffers()


def _size(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _in_use(device: torch.device) -> int:
    if runtime_of(device).has_own_memory:
        return runtime_of(device).allocated()[0]
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A change of ds.json or of the arguments, and the bytes that it would free on the device."""

    what: str
    frees: int


def explain(engine: Any, phase: str, error: Exception) -> None:
    """Add the explanation to an error of `phase`, if it is an out-of-memory error."""
    if not is_out_of_memory(error) or getattr(error, "is_explained", False):
        return
    kinds = memory_by_kind(engine)
    lacks = requested_bytes(str(error)) - free_bytes(engine.device)
    text = explanation(phase, kinds, lacks, list(changes(engine, kinds)), cached_bytes(engine.device))
    text += "".join(f"\n{line}" for line in _chosen_ratio(engine))
    error.args = (f"{error}\n\n{text}",)
    error.is_explained = True  # type: ignore[attr-defined]


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ON_CPU)


def requested_bytes(message: str) -> int:
    """Bytes that could not be allocated; 0 if the message does not contain them."""
    match = _ASKED.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0


def explanation(phase: str, kinds: Kinds, lacks: int, changes: list[ConfigChange], cached: int = 0) -> str:
    """Format the message: what held the memory, and which change would help.

    Args:
        lacks: missing bytes; if not positive, enough memory was free, but fragmented.
        changes: in order of preference.
        cached: bytes that PyTorch has reserved but no tensor uses.
    """
    total = sum(kinds.values()) or 1
    lines = [f"hf_zero: in {phase}, this rank's memory on the device was used by"]
    for kind, num_bytes in sorted(kinds.items(), key=lambda entry: -entry[1]):
        lines.append(f"  {kind:<26}{amount(num_bytes):>12}{num_bytes / total:>8.1%}")
    if lacks <= 0 and cached:
        fix = "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
        lines.append(f"{amount(cached)} were free, but fragmented: {fix}")
        return "\n".join(lines)
    lines.append(_advice(max(1, lacks), changes))
    return "\n".join(lines)


def _advice(lacks: int, changes: list[ConfigChange]) -> str:
    """The first change that is enough, or else the shortest list of changes that are enough together."""
    short = f"{amount(lacks)} more were needed"
    enough = next((change for change in changes if change.frees >= lacks), None)
    if enough is not None:
        return f"{short}. One change would have made it fit: {enough.what} (frees about {amount(enough.frees)})"
    taken: list[ConfigChange] = []
    for change in changes:
        taken.append(change)
        if sum(each.frees for each in taken) >= lacks:
            listed = "; ".join(f"{each.what} (about {amount(each.frees)})" for each in taken)
            return f"{short}. No single change is enough; these together are: {listed}"
    listed = "".join(f"\n  {each.what}: about {amount(each.frees)}" for each in taken)
    available = f". Available changes:{listed}" if listed else ""
    return f"{short}, and no change of the config frees as much: use more ranks, or a smaller model{available}"


def _chosen_ratio(engine: Any) -> Iterator[str]:
    """What "auto" has put on the device by the first update, which may have needed less than this one."""
    assembly = engine.gradients.assembly
    auto = None if assembly is None else assembly.step.auto_ratio
    if auto is not None and auto.chosen is not None:
        yield f"{auto.chosen}. Set a number above {auto.chosen.ratio:.3f} instead; 1.0 offloads everything"


def changes(engine: Any, kinds: Kinds) -> Iterator[ConfigChange]:
    """Changes that are still possible for this engine, cheapest first."""
    zero, world = engine.settings.resolved.zero, engine.groups.shard.size
    _, micro_batch, steps = engine.settings.get_batch_info()
    left = 1 - 1 / world
    if micro_batch > 1:
        what = (
            f"train_micro_batch_size_per_gpu (per_device_train_batch_size) {micro_batch // 2 or 1} and "
            f"gradient_accumulation_steps {steps * 2}, which computes the same update"
        )
        yield ConfigChange(what, kinds.get(REST, 0) // 2)
    yield from _activation_changes(engine, kinds.get(REST, 0))
    states = kinds.get(MASTERS, 0) + kinds.get(STATES, 0)
    # The states and gradients that every rank still has in full.
    whole = (states if zero.stage == 0 else 0) + (kinds.get(GRADIENTS, 0) if zero.stage < 2 else 0)
    if zero.stage < 2 and world > 1:
        yield ConfigChange("zero_optimization.stage 2", int(whole * left))
    if zero.offload_optimizer is not None and runtime_is_separate(engine) and states:
        yield ConfigChange("zero_optimization.offload_optimizer.ratio 1.0", states + kinds.get(GRADIENTS, 0))
    if zero.offload_optimizer is None and runtime_is_separate(engine):
        yield ConfigChange('zero_optimization.offload_optimizer {"device": "cpu"}', states + kinds.get(GRADIENTS, 0))
    if zero.stage < 3 and world > 1:
        yield ConfigChange("zero_optimization.stage 3", int((whole + kinds.get(GATHERED, 0)) * left))
    yield from _shared_sequences(engine, kinds.get(REST, 0))
    if zero.stage == 3 and zero.offload_param is None and runtime_is_separate(engine):
        yield ConfigChange('zero_optimization.offload_param {"device": "cpu"}', kinds.get(SHARDS, 0))


def _activation_changes(engine: Any, rest: int) -> Iterator[ConfigChange]:
    """Changes that free activations: gradient checkpointing, tiling, and layer inputs in host memory."""
    config, shape = text_config(getattr(engine.module, "config", None)), tuple(engine.input_shape or ())
    blocks = int(getattr(config, "num_hidden_layers", None) or _BLOCKS_WITHOUT_A_NUMBER)
    resolved, tokens = engine.settings.resolved, math.prod(shape)
    tiling = resolved.section(Tiling)
    is_off = _can_checkpoint(engine.module)
    if is_off:
        yield ConfigChange("gradient checkpointing (--gradient_checkpointing)", int(rest * (1 - 2 / (blocks + 1))))
    size = next((parameter.element_size() for parameter in engine.module.parameters()), 4)
    cut = max(0, tokens - _TILE_TOKENS)  # tokens whose memory is saved when only one tile exists at a time
    logits = cut * int(getattr(config, "vocab_size", None) or 0) * (size + LOSS_BYTES)
    if logits and not tiling.tiled_loss:
        yield ConfigChange('hf_zero {"tiled_loss": true}', min(rest, logits))
    inner = cut * int(getattr(config, "intermediate_size", None) or 0) * size * _MLP_TENSORS
    if inner and not tiling.tiled_mlp:
        yield ConfigChange('hf_zero {"tiled_mlp": true}', min(rest, inner * (blocks if is_off else 1)))
    inputs = tokens * int(getattr(config, "hidden_size", None) or 0) * size
    inputs = on_host(inputs, blocks)
    if inputs and not resolved.section(ActivationCheckpointing).cpu_checkpointing and runtime_is_separate(engine):
        also = "gradient checkpointing and " if is_off else ""
        yield ConfigChange(also + 'activation_checkpointing {"cpu_checkpointing": true}', min(rest, inputs))


def _shared_sequences(engine: Any, rest: int) -> Iterator[ConfigChange]:
    config = text_config(getattr(engine.module, "config", None))
    heads, ranks = int(getattr(config, "num_attention_heads", None) or 0), engine.groups.shard.size
    shared = max((n for n in range(1, ranks + 1) if heads and ranks % n == 0 and heads % n == 0), default=1)
    if shared > 1 and engine.settings.resolved.sequence_size == 1:
        yield ConfigChange(f"sequence_parallel_size {shared}", int(rest * (1 - 1 / shared)))


def runtime_is_separate(engine: Any) -> bool:
    """Whether the device has memory of its own, apart from host memory."""
    return runtime_of(engine.device).has_own_memory


def _can_checkpoint(module: Any) -> bool:
    if not getattr(module, "supports_gradient_checkpointing", False):
        return False
    # transformers 5 renamed the attribute, and warns if the old name is used.
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return not next((getattr(module, name) for name in names if hasattr(type(module), name)), True)
