"""Full and local access to one parameter's fp32 weight, gradient and optimizer state, at any stage.

Function names are DeepSpeed's. Functions with `full` in their name are collective; shapes are the parameter's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.comm import ParallelGroups
from hf_zero.layout import Piece
from hf_zero.layout.buckets import round_up
from hf_zero.offload.sub_group import SubGroup, wait_for_readers
from hf_zero.params.store import of
from hf_zero.precision import is_packed, is_wrapped
from hf_zero.step.assemble import Assembly
from hf_zero.step.sharded_step import Source

# By the parameter's id, and not on the parameter, so that models can be pickled.
_FRAGMENTS: weakref.WeakValueDictionary[int, Fragments] = weakref.WeakValueDictionary()
# The same for all parameters that an engine's ranks have whole, including frozen ones.
_WHOLE: weakref.WeakValueDictionary[int, Fragments] = weakref.WeakValueDictionary()
# Gradients of the last step, where something keeps them.
LAST_GRADIENTS = WeakTensorKeyDictionary()


class Fragments:
    """Finds this rank's parts of every trained parameter, and keeps these and the frozen ones alive."""

    def __init__(self, assembly: Assembly, groups: ParallelGroups, frozen: Sequence[nn.Parameter] = ()) -> None:
        self._assembly = assembly
        self._groups = groups
        self._frozen = tuple(frozen)
        self._parts: dict[int, list[tuple[SubGroup, Piece]]] = {}  # by the parameter's index
        for sub_group in assembly.optimizer.sub_groups:
            for piece in sub_group.pieces:
                self._parts.setdefault(piece.parameter, []).append((sub_group, piece))
        self._index = {id(parameter): index for index, parameter in enumerate(assembly.store.parameters)}
        self._owns_all = not assembly.optimizer.sharding.shards_optimizer

    def masters(self) -> Source:
        """The masters, after edits of weights have been applied to them."""
        self._assembly.store.sync_masters()
        return self._assembly.step.values.master

    def gradients(self) -> Source:
        """The reduced gradients, after the last reduction has finished."""
        self._assembly.reducer.wait()
        self._assembly.reducer.sum_over_replicas()
        return self._assembly.step.values.gradient

    def states(self, key: str) -> Source:
        return self._assembly.step.values.state(key)

    def read(self, parameter: Tensor, source: Source) -> Tensor | None:
        """Read the whole of `source` for `parameter`; None if no rank has it. Collective.

        Raises:
            StorageError: on all ranks, if one could not read its part from a drive.
        """
        numel, groups = parameter.numel(), self._groups.of(parameter)
        # One more element counts the ranks that have values, and a sum needs a multiple of the world size.
        padded = round_up(numel + 1, groups.access.size)
        flat = torch.zeros(padded, dtype=torch.float32, device=self._assembly.store.device)
        for sub_group, piece in self._parts_of(parameter):
            with source(sub_group, False) as values:
                if values is not None:
                    flat.narrow(0, piece.in_parameter, piece.numel).copy_(_inside(values, piece))
                    flat[numel] = 1.0
        self._assembly.placements.check(groups.access_copies)
        if not self._owns_all:
            groups.access.all_reduce(flat).wait()
        return flat[:numel].view(parameter.shape).clone() if flat[numel] > 0 else None

    def write(self, parameter: Tensor, values: Tensor, target: Source) -> None:
        """Write this rank's part of `values` (of the parameter's shape) to `target`."""
        if values.shape != parameter.shape:
            raise ValueError(f"values of shape {tuple(values.shape)} for a parameter of {tuple(parameter.shape)}")
        self._write(parameter, values, target, [piece.in_parameter for _, piece in self._parts_of(parameter)])

    def read_local(self, parameter: Tensor, source: Source) -> Tensor | None:
        """This rank's chunk at stage 3, without padding: a view if it is in memory, else a copy.

        Raises:
            StorageError: if it could not be read from a drive.
        """
        stays, chunks = self._assembly.optimizer.updater.stager.always_at_hand, []
        for sub_group, piece in self._parts_of(parameter):
            with source(sub_group, False) as values:
                if values is not None:
                    chunks.append(_inside(values, piece) if stays else _inside(values, piece).clone())
        if self._assembly.placements.failure is not None:
            raise self._assembly.placements.failure
        return chunks[0] if len(chunks) == 1 else (torch.cat(chunks) if chunks else None)

    def write_state(self, parameter: Tensor, key: str, write: Callable[[Source], None]) -> None:
        """Call `write` with the `Source` of a state that exists.

        Raises:
            RuntimeError: if the optimizer has no such state of the parameter, or of any parameter.
        """
        states = self.states(key)
        lacks = [each for each, _ in self._parts_of(parameter) if not _has(states, each)]
        known = {name for state in self._assembly.optimizer.optimizer.state.values() for name in state}
        if lacks or key not in known:
            name = self._assembly.store.layout.specs[self._index[id(parameter)]].name
            fix = f"it has {', '.join(sorted(map(repr, known)))}" if known else "states are created by the first update"
            raise RuntimeError(f"the optimizer has no state {key!r} per element of {name!r} that could be set: {fix}")
        write(states)

    def write_local(self, parameter: Tensor, values: Tensor, target: Source) -> None:
        """Overwrite this rank's chunk at stage 3; `values` may have padding at the end."""
        numels = (piece.numel for _, piece in self._parts_of(parameter))
        self._write(parameter, values, target, accumulate(numels, initial=0))

    def _write(self, parameter: Tensor, values: Tensor, target: Source, starts: Iterable[int]) -> None:
        wait_for_readers()
        flat = values.detach().reshape(-1)
        for (sub_group, piece), start in zip(self._parts_of(parameter), starts):
            with target(sub_group, True) as place:
                if place is not None:
                    _inside(place, piece).copy_(flat.narrow(0, start, piece.numel))

    def take_from(self, rank: int, parameter: Tensor) -> None:
        """Give all ranks and the masters `rank`'s values of a parameter that ranks have whole. Collective."""
        groups, values = self._groups.of(parameter), parameter.detach().contiguous()
        groups.access_copies.broadcast([values], source=groups.place_beside(rank))
        if not parameter.is_contiguous():
            parameter.data.copy_(values)
        if id(parameter) in self._index:
            self.write(parameter, values, self.masters())

    def _parts_of(self, parameter: Tensor) -> list[tuple[SubGroup, Piece]]:
        return self._parts.get(self._index[id(parameter)], [])

    def set_steps(self, parameter: Tensor, steps: int) -> None:
        self._assembly.optimizer.updater.set_steps(self._index[id(parameter)], steps)

    @property
    def gradient_factor(self) -> float:
        """Factor from a reduced gradient to the gradient of the loss, before clipping."""
        return self._assembly.step.factors.of_gradients

    def has_reduced(self, parameter: Tensor) -> bool:
        """Whether a gradient has been reduced since the last step; the same on all ranks."""
        index = self._index[id(parameter)]
        reduced = (bucket.bucket.slots for bucket in self._assembly.reducer.buckets if bucket.reduced.is_there)
        return any(slot.parameter == index for slots in reduced for slot in slots)

    def unreduced(self, parameter: Tensor) -> Tensor | None:
        """This rank's whole gradient before reduction (stages 0 and 1 between micro-batches): a view, 1-D."""
        index = self._index[id(parameter)]
        for bucket in self._assembly.reducer.buckets:
            if bucket.local is None or bucket.bucket.by_rows or index not in bucket.arrivals.used:
                continue
            slots = [slot for slot in bucket.bucket.slots if slot.parameter == index]
            if slots:
                return bucket.local.narrow(0, slots[0].offset, slots[0].numel)
        return None

    @property
    def unreduced_factor(self) -> float:
        """Factor from an unreduced gradient to the gradient of this rank's loss."""
        optimizer = self._assembly.optimizer
        return self.gradient_factor * (optimizer.sharding.num_ranks if optimizer.rules.gradients.average else 1)

    def all_gather_params(self, parameter: Tensor) -> None:
        """Copy edited masters to the model. Collective."""
        self._assembly.step.values.master_to_params(self._index[id(parameter)])


def _has(source: Source, sub_group: SubGroup) -> bool:
    with source(sub_group, False) as values:
        return values is not None


def _inside(values: Tensor, piece: Piece) -> Tensor:
    return values.view(-1).narrow(0, piece.in_shard, piece.numel)


def attach_fragments(assembly: Assembly, groups: ParallelGroups, model: nn.Module) -> None:
    """Attach `Fragments`, which the functions below need, to the parameters of `assembly` and of its model."""
    trained = assembly.store.parameters
    known = {id(parameter) for parameter in trained}
    frozen = [parameter for parameter in model.parameters() if id(parameter) not in known]
    fragments = Fragments(assembly, groups, frozen)
    _FRAGMENTS.update(dict.fromkeys(map(id, trained), fragments))
    whole = [each for each in (*trained, *frozen) if of(each) is None and not (is_packed(each) or is_wrapped(each))]
    _WHOLE.update(dict.fromkeys(map(id, whole), fragments))
    assembly.optimizer.fragments = fragments


def take_from(rank: int, parameters: Iterable[Tensor]) -> None:
    """Give all ranks, and the masters, what `rank` has written into those of `parameters` that an engine's ranks have
    whole. Collective."""
    for parameter in parameters:
        fragments = _WHOLE.get(id(parameter))
        if fragments is not None:
            fragments.take_from(rank, parameter)


def _fragments_of(parameter: Tensor) -> Fragments | None:
    return _FRAGMENTS.get(id(parameter))


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole master weight; None for a parameter that no engine trains. Collective."""
    fragments = _fragments_of(param)
    return fragments.read(param, fragments.masters()) if fragments else None


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole gradient since the last step (mean over ranks, before clipping); None if there is none (with
    AdaLoRA after a step: the clipped gradient of that step). Collective.

    While gradients accumulate without a reduction (stages 0 and 1 before the boundary, and inside `no_sync`) the result
    is this rank's own gradient.
    """
    fragments = _fragments_of(param)
    if fragments is None:
        return None
    gradients, own = fragments.gradients(), fragments.unreduced(param)
    if own is not None:
        return (own.float() * fragments.unreduced_factor).view(param.shape)
    total = fragments.read(param, gradients)
    return LAST_GRADIENTS.get(param) if total is None else total.mul_(fragments.gradient_factor)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return one whole optimizer state; None before the first step and for unknown keys. Collective.

    Args:
        optim_state_key: the name in the torch optimizer's state: "exp_avg", "exp_avg_sq", ...
    """
    fragments = _fragments_of(param)
    return fragments.read(param, fragments.states(optim_state_key)) if fragments else None


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Overwrite master and model weight. Collective.

    Args:
        value: of the parameter's shape, any dtype, the same on all ranks.

    Raises:
        ValueError: for another shape.
        RuntimeError: if no engine trains the parameter.
    """
    fragments = _managed(param)
    fragments.write(param, value, fragments.masters())
    fragments.all_gather_params(param)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Overwrite the gradient between backward and step, in the units of `safe_get_full_grad`. Collective.

    Args:
        value: of the parameter's shape, the same on all ranks.

    Raises:
        ValueError: for another shape.
        RuntimeError: if there is no gradient, or no engine trains the parameter.
    """
    fragments = _managed(param)
    gradients, own = fragments.gradients(), fragments.unreduced(param)
    if own is not None:
        own.copy_((value / fragments.unreduced_factor).reshape(-1))
        return
    if not fragments.has_reduced(param):
        raise RuntimeError(
            f"safe_set_full_grad: the parameter of shape {tuple(param.shape)} has no gradient to overwrite; call this "
            "between engine.backward() and engine.step()"
        )
    fragments.write(param, value / fragments.gradient_factor, gradients)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor | float, optim_state_key: str) -> None:
    """Overwrite one optimizer state; with the key "step" the parameter's count of updates, by a number. Collective.

    Args:
        value: of the parameter's shape, the same on all ranks.
        optim_state_key: the name in the torch optimizer's state.

    Raises:
        ValueError: for another shape.
        RuntimeError: if the optimizer has no such state, as before its first update.
    """
    fragments = _managed(param)
    if optim_state_key == "step":
        fragments.set_steps(param, int(value))
        return
    values = torch.as_tensor(value)
    fragments.write_state(param, optim_state_key, functools.partial(fragments.write, param, values))


def safe_update_full_grad_vectorized(param_list: Iterable[Tensor], update_func: Callable[[Tensor, Any], Any]) -> None:
    """Replace each whole gradient by the result of `update_func(gradient, parameter)`; None means an in-place change.
    Parameters without a gradient are left out. Collective."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            updated = update_func(gradient, param)
            safe_set_full_grad(param, gradient if updated is None else updated)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this rank's chunk of the master weight, 1-D and without padding; None for a rank that has none.

    Raises:
        RuntimeError: below stage 3, with one rank, or if no engine trains the parameter (as in all `safe_*_local_*`).
    """
    fragments = _sharded(param)
    return fragments.read_local(param, fragments.masters())


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's chunk of `safe_get_full_grad`, 1-D; None if there is no gradient."""
    fragments = _sharded(param)
    chunk = fragments.read_local(param, fragments.gradients())
    return None if chunk is None else chunk.float() * fragments.gradient_factor


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return this rank's chunk of one optimizer state, 1-D; None before the first step and for unknown keys."""
    fragments = _sharded(param)
    return fragments.read_local(param, fragments.states(optim_state_key))


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Overwrite this rank's chunk of the master weight, and the model's weight with all chunks. Collective.

    Args:
        value: as many elements as the chunk has; more are padding and left out.
    """
    fragments = _sharded(param)
    fragments.write_local(param, value, fragments.masters())
    fragments.all_gather_params(param)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Overwrite this rank's chunk of the gradient between backward and step, in the units of `safe_get_full_grad`."""
    fragments = _sharded(param)
    fragments.write_local(param, value / fragments.gradient_factor, fragments.gradients())


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's chunk of one optimizer state.

    Raises:
        RuntimeError: if the optimizer has no such state, as before its first update.
    """
    fragments = _sharded(param)
    fragments.write_state(param, optim_state_key, functools.partial(fragments.write_local, param, value))


def _managed(param: Tensor) -> Fragments:
    fragments = _fragments_of(param)
    if fragments is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} is not trained by any engine: it has no master weight, "
            "gradient or optimizer state to set. For frozen weights use "
            "deepspeed.zero.GatheredParameters(param, modifier_rank=0)."
        )
    return fragments


def _sharded(param: Tensor) -> Fragments:
    fragments = _managed(param)
    if of(param) is None:
        raise RuntimeError("the safe_*_local_* functions need ZeRO stage 3 and more than one rank; use safe_*_full_*")
    return fragments
