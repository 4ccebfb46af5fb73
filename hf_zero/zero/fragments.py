"""Full and local views of one parameter's fp32 weight, gradient and optimizer state, at any stage.

The functions' names are DeepSpeed's. Those with `full` in their name are collective; shapes are the parameter's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.layout import Piece
from hf_zero.optim import MasterShard
from hf_zero.zero.assemble import Assembly
from hf_zero.zero.sharded_parameter import of

_ATTRIBUTE = "hf_zero_fragments"


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank owns of a parameter: `piece` of `shard`."""

    shard: MasterShard
    piece: Piece


class Fragments:
    """Finds the parts of every trained parameter; hangs on the parameters."""

    def __init__(self, assembly: Assembly, collectives: Collectives) -> None:
        self._assembly = assembly
        self._collectives = collectives
        self._parts: dict[int, list[_Part]] = {}
        for shard in assembly.optimizer.shards:
            for piece in shard.pieces:
                self._parts.setdefault(piece.parameter, []).append(_Part(shard, piece))
        self._index = {id(parameter): index for index, parameter in enumerate(assembly.store.parameters)}
        self._owns_all = not assembly.optimizer.sharding.shards_optimizer

    def read(self, parameter: nn.Parameter, source: Callable[[MasterShard], Tensor | None]) -> Tensor | None:
        """The whole of what `source` gives for the shards of `parameter`; None where no rank has it. Collective."""
        flat = torch.zeros(parameter.numel() + 1, dtype=torch.float32, device=self._assembly.store.device)
        for part, values in self._owned(parameter, source):
            flat.narrow(0, part.piece.in_parameter, part.piece.numel).copy_(values)
            flat[-1] = 1.0
        if not self._owns_all:
            self._collectives.all_reduce(flat).wait()
        return flat[:-1].view(parameter.shape).clone() if flat[-1] > 0 else None

    def write(self, parameter: nn.Parameter, values: Tensor, target: Callable[[MasterShard], Tensor | None]) -> None:
        """Put this rank's part of `values` (the parameter's shape) where `target` says."""
        if values.shape != parameter.shape:
            raise ValueError(f"values of shape {tuple(values.shape)} for a parameter of {tuple(parameter.shape)}")
        flat = values.detach().reshape(-1)
        for part, place in self._owned(parameter, target):
            place.copy_(flat.narrow(0, part.piece.in_parameter, part.piece.numel))

    def local(self, parameter: nn.Parameter, source: Callable[[MasterShard], Tensor | None]) -> Tensor | None:
        """This rank's chunk at stage 3: a view, without padding."""
        found = [values for _, values in self._owned(parameter, source)]
        return found[0] if found else None

    def _owned(
        self, parameter: nn.Parameter, source: Callable[[MasterShard], Tensor | None]
    ) -> Iterable[tuple[_Part, Tensor]]:
        for part in self._parts.get(self._index[id(parameter)], []):
            values = source(part.shard)
            if values is not None:
                yield part, values.view(-1).narrow(0, part.piece.in_shard, part.piece.numel)

    # Where things are

    def master(self, shard: MasterShard) -> Tensor | None:
        return shard.master

    def gradient(self, shard: MasterShard) -> Tensor | None:
        return self._assembly.optimizer.reduced_gradient(shard)

    def state(self, key: str) -> Callable[[MasterShard], Tensor | None]:
        return lambda shard: self._assembly.optimizer.optimizer_state(shard, key)

    @property
    def gradient_factor(self) -> float:
        return self._assembly.optimizer.gradient_factor

    def finish_reductions(self) -> None:
        self._assembly.reducer.wait()

    def publish(self, parameter: nn.Parameter) -> None:
        """Let edited masters be seen by the model. Collective."""
        self._assembly.optimizer.publish_master(self._index[id(parameter)])


def attach_fragments(assembly: Assembly, collectives: Collectives) -> None:
    """Let the functions below find what belongs to the parameters of `assembly`."""
    fragments = Fragments(assembly, collectives)
    for parameter in assembly.store.parameters:
        setattr(parameter, _ATTRIBUTE, weakref.ref(fragments))
    assembly.optimizer.fragments = fragments


def _fragments_of(parameter: nn.Parameter) -> Fragments | None:
    reference = getattr(parameter, _ATTRIBUTE, None)
    return reference() if reference is not None else None


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The master weight, fp32; None for a parameter that no engine trains."""
    fragments = _fragments_of(param)
    return fragments.read(param, fragments.master) if fragments else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient reduced since the last step (mean over ranks, before clipping), fp32; None when there is none."""
    fragments = _fragments_of(param)
    if fragments is None:
        return None
    fragments.finish_reductions()
    total = fragments.read(param, fragments.gradient)
    return None if total is None else total.mul_(fragments.gradient_factor)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """One optimizer state ("exp_avg", ...); None before the first step and for unknown keys."""
    fragments = _fragments_of(param)
    return fragments.read(param, fragments.state(optim_state_key)) if fragments else None


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite master and model weight; `value` is the same on all ranks."""
    fragments = _managed(param)
    fragments.write(param, value, fragments.master)
    fragments.publish(param)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the reduced gradient between backward and step (in the units of `safe_get_full_grad`)."""
    fragments = _managed(param)
    fragments.finish_reductions()
    fragments.write(param, value / fragments.gradient_factor, fragments.gradient)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    fragments = _managed(param)
    fragments.write(param, value, fragments.state(optim_state_key))


def safe_update_full_grad_vectorized(params: Iterable[nn.Parameter], update_func: Callable[[Tensor], Any]) -> None:
    """Replace the full gradient of each parameter by what `update_func` returns (or leaves in place, for None)."""
    for param in params:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            updated = update_func(gradient)
            safe_set_full_grad(param, gradient if updated is None else updated)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's chunk of the master weight; stage 3 only."""
    fragments = _sharded(param)
    return fragments.local(param, fragments.master)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    fragments = _sharded(param)
    fragments.finish_reductions()
    chunk = fragments.local(param, fragments.gradient)
    return None if chunk is None else chunk.float() * fragments.gradient_factor


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    fragments = _sharded(param)
    return fragments.local(param, fragments.state(optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    fragments = _sharded(param)
    _copy_local(fragments.local(param, fragments.master), value)
    fragments.publish(param)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    fragments = _sharded(param)
    fragments.finish_reductions()
    _copy_local(fragments.local(param, fragments.gradient), value / fragments.gradient_factor)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    fragments = _sharded(param)
    _copy_local(fragments.local(param, fragments.state(optim_state_key)), value)


def _copy_local(chunk: Tensor | None, value: Tensor) -> None:
    if chunk is not None:
        chunk.copy_(value.reshape(-1)[: chunk.numel()])


def _managed(param: nn.Parameter) -> Fragments:
    fragments = _fragments_of(param)
    if fragments is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is not trained by any engine: it has no master weight, "
            "gradient or optimizer state to set. For frozen weights use "
            "deepspeed.zero.GatheredParameters(param, modifier_rank=0)."
        )
    return fragments


def _sharded(param: nn.Parameter) -> Fragments:
    fragments = _managed(param)
    if of(param) is None:
        raise RuntimeError("the safe_*_local_* functions need ZeRO stage 3 and more than one rank; use safe_*_full_*")
    return fragments
