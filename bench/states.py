"""Bytes that an engine keeps between steps, by kind, read from its vectors and tensors."""

from __future__ import annotations

from typing import Any

import torch


def state_bytes(engine: Any) -> dict[str, int]:
    """This rank's bytes on all devices, after a step that has created all states."""
    assembly = engine.gradients.assembly
    store, updater = assembly.store, assembly.optimizer.updater
    return {
        "parameters": _parameters(engine.module, store),
        "gradients": sum(bucket.reduced.vector.num_bytes for bucket in assembly.reducer.buckets),
        "optimizer": _masters(store) + _states(updater),
    }


def _parameters(module: torch.nn.Module, store: Any) -> int:
    if not hasattr(store, "units"):
        trained = {id(parameter) for parameter in store.parameters}
        frozen = sum(p.numel() * p.itemsize for p in module.parameters() if id(p) not in trained)
        return frozen + sum(bucket.flat.numel() * bucket.flat.itemsize for bucket in store.buckets)
    rows = sum(part.stored.num_bytes for unit in store.units for part in unit.parts)
    whole = sum(
        part.layout.full_numel * part.dtype.itemsize
        for unit in store.units
        if unit.is_persistent
        for part in unit.parts
    )
    return rows + whole


def _masters(store: Any) -> int:
    groups = [sub_group.stored for bucket in store.buckets for sub_group in bucket.sub_groups]
    return sum(stored.master.num_bytes for stored in groups if stored.lp_param is not None)


def _states(updater: Any) -> int:
    """The optimizer's tensors, and its vectors in files."""
    far = sum(
        vector.num_bytes
        for sub_group in updater.sub_groups
        if sub_group.stored is not None
        for vector in sub_group.stored.vectors.values()
    )
    if far:
        return far
    tensors = [value for state in updater.optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.itemsize for value in tensors if isinstance(value, torch.Tensor) and value.dim())
