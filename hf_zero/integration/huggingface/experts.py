"""Experts in transformers, under a ds.json.

They are distributed over ranks if a program requests it by `DistributedConfig(ep_size=...)`. Checkpoints with single
experts are read into a model that packs them: a pack is assembled directly in its parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_zero.config import ConfigError, Problem

_ASKED = "_hf_zero_experts"


def left_to_engine(distributed_config: Any) -> Any:
    """A config that leaves nothing for transformers to do; `write_asked_experts` reads the request from it.

    Raises:
        ConfigError: if it also shards matrices or layers.
    """
    cut = {name: size for name in ("tp_size", "pp_size") if (size := getattr(distributed_config, name, 1)) > 1}
    if cut and distributed_config.tp_plan != {}:
        rule = "beside a ds.json transformers does not cut the rest of the model"
        fix = "leave it out; tensor_parallel.autotp_size in the ds.json cuts matrices, those of experts among them"
        raise ConfigError(Problem("DistributedConfig", cut, rule, fix))
    config = type(distributed_config)()
    setattr(config, _ASKED, distributed_config.ep_size)
    return config


def write_asked_experts(config: dict[str, Any], model: Any) -> None:
    """Write the request that `model` was loaded with into the ds.json.

    Raises:
        ConfigError: if the ds.json contradicts it.
    """
    size = getattr(getattr(getattr(model, "config", None), "distributed_config", None), _ASKED, 1)
    if size == 1:
        return
    section = config.setdefault("expert_parallel", {})
    written = section.get("autoep_size", 1) if section.get("enabled") else 1
    if written not in (1, size):
        rule = f"the program asks for {size} ranks (DistributedConfig(ep_size=...))"
        raise ConfigError(Problem("expert_parallel.autoep_size", written, rule, f"write {size}, or remove it"))
    section.update(enabled=True, autoep_size=size)


def in_one_go(entry: Any) -> Any:
    """`entry` with stacking and concatenating merged into one operation, if these are its two operations."""
    operations = getattr(entry, "operations", [])
    if [type(operation).__name__ for operation in operations] != ["MergeModulelist", "Concatenate"]:
        return entry
    if operations[0].dim != 0 or operations[1].dim < 1:
        return entry
    changed = copy.copy(entry)
    changed.operations = [_Pack(*operations)]
    return changed


class _Pack:
    """Replaces transformers' MergeModulelist and Concatenate, without intermediate stacks and, until it is accessed,
    without the pack, all of which would be in memory in addition to the target parameter."""

    def __init__(self, merge: Any, concatenate: Any) -> None:
        self._operations = (merge, concatenate)
        self._dim: int = concatenate.dim

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Convert experts by source pattern, as lists of equal shapes, to one pack under the only target pattern."""
        parts = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        if len(target_patterns) != 1 or len(parts) < 2 or not all(isinstance(part, list) for part in parts):
            for operation in self._operations:
                input_dict = operation.convert(
                    input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
                )
            return input_dict
        return {target_patterns[0]: PackedExperts(parts, self._dim)}


class PackedExperts(Tensor):
    """A lazy `cat([stack(part) for part in parts], dim)`, assembled in the tensor that it is copied to.

    Copying it into a tensor writes every expert to its place; any other operation uses an ordinary tensor.
    """

    _parts: Sequence[Sequence[Tensor]]
    _dim: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: Sequence[Sequence[Tensor]], dim: int) -> PackedExperts:
        first = parts[0][0]
        shape = [len(parts[0]), *first.shape]
        shape[dim] = sum(part[0].shape[dim - 1] for part in parts)
        pack: PackedExperts = Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        pack._parts, pack._dim = parts, dim
        return pack

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return args[1].write_to(args[0])
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """An ordinary tensor of the same values."""
        return self.write_to(torch.empty(self.shape, dtype=self.dtype, device=self.device))

    def write_to(self, target: Tensor) -> Tensor:
        """Fill `target`, which has this shape."""
        sizes = [part[0].shape[self._dim - 1] for part in self._parts]
        for part, place in zip(self._parts, target.split(sizes, self._dim), strict=True):
            for row, expert in zip(place, part, strict=True):
                row.copy_(expert)
        return target
