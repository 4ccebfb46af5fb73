"""Loads any checkpoint into a live training at any stage and world size; each rank reads the intervals it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.extra_states import pieces_of, restore_errors
from hf_zero.checkpoint.files.stream import fill, span
from hf_zero.checkpoint.subject import ModelSubject, Subject
from hf_zero.checkpoint.view import MASTER, CheckpointView, Group
from hf_zero.errors import CheckpointError
from hf_zero.layout import chunk_interval
from hf_zero.log import logger, tracked
from hf_zero.optim import SubGroup, Updater
from hf_zero.optim.updater import copied
from hf_zero.params.consolidation import persistent_buffers, with_extra_states
from hf_zero.params.store import ParameterStore, of

Parts = Callable[[int, int], Iterator[Tensor]]
_MANY = 5


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The source of everything, decided and checked before any element is copied.

    Attributes:
        weights: trained parameters (by layout index) and frozen ones (by name) -> elements [start, stop).
        groups: the saved group that each optimizer group continues; None if its optimizer state starts anew.
    """

    view: CheckpointView
    weights: Mapping[int, Parts]
    frozen: Mapping[str, Parts]
    buffers: Mapping[str, Tensor]
    groups: Sequence[Group | None]


def plan_load(subject: ModelSubject, view: CheckpointView, *, strict: bool, with_optimizer: bool) -> LoadPlan:
    """Match the checkpoint with the model. A model without optimizer only loads weights.

    Raises:
        CheckpointError: if a weight is missing or unexpected (with `strict`) or has another shape, or the optimizer
            state belongs to another optimizer.
    """
    names, shapes = subject.names, subject.shapes
    weights = {i: parts for i, name in enumerate(names) if (parts := _find(view, name, shapes[i])) is not None}
    frozen = {
        name: parts for name, p in subject.frozen().items() if (parts := _find(view, name, tuple(p.shape))) is not None
    }
    own_buffers = dict(persistent_buffers(subject.module))
    buffers = {name: view.buffers[name] for name in own_buffers if name in view.buffers}
    if strict:
        wanted = {*names, *subject.frozen(), *own_buffers}
        present = {*(names[i] for i in weights), *frozen, *buffers}
        saved = {*view.shapes, *view.frozen, *view.buffers}
        _refuse_differences(view, wanted - present, saved - wanted - set(subject.aliases()))
    for name, value in buffers.items():
        if value.shape != own_buffers[name].shape:
            raise _other_shape(view, name, tuple(value.shape), tuple(own_buffers[name].shape))
    groups: Sequence[Group | None] = ()
    if isinstance(subject, Subject):
        groups = _match_groups(subject, view) if with_optimizer else [None] * len(subject.assembly.members)
    return LoadPlan(view, weights, frozen, buffers, groups)


@torch.no_grad()
def apply(subject: ModelSubject, plan: LoadPlan) -> None:
    """Carry out the plan. Collective: ranks then gather the weights they read."""
    store = subject.store
    if store is not None:
        store.prepare_change()
        store.sync_masters()
    _write_unsharded(subject, plan)
    if store is not None and isinstance(subject, Subject):
        _write_trained(store, subject, plan)
    if store is not None:
        store.finish_update()


def _write_trained(store: ParameterStore, subject: Subject, plan: LoadPlan) -> None:
    stager = subject.assembly.optimizer.updater.stager
    for sub_group in tracked(subject.assembly.optimizer.sub_groups, "loading weights"):
        with stager.opened(sub_group, changes=True):
            _write_masters(sub_group, plan)
    for index in range(len(store.buckets)):
        store.all_gather_params(index).wait()
    if any(group is not None for group in plan.groups):
        _write_optimizer(subject, plan)
    subject.assembly.reducer.clear()  # gradients belong to the old weights
    _write_errors(subject, plan)


def _write_errors(subject: Subject, plan: LoadPlan) -> None:
    """Restore the errors of quantized gradients with the optimizer's states."""
    view, shard = plan.view, subject.groups.shard
    goes_on = view.world == shard.size and any(group is not None for group in plan.groups)
    saved = view.gradient_errors[shard.rank] if goes_on and view.gradient_errors else ()
    restore_errors(subject.assembly.reducer, subject.names, saved)


def _find(view: CheckpointView, name: str, shape: tuple[int, ...]) -> Parts | None:
    """Return a parameter's weights, trained or frozen in the checkpoint; None if it has none."""
    owner = name if name in view.shapes or name in view.frozen else view.aliases.get(name, "")
    if not owner:  # the model's first name of a tied pair may be the checkpoint's second
        owner = next((alias for alias, main in view.aliases.items() if main == name), "")
    if owner in view.shapes:
        elements = view.elements[MASTER]
        have, parts = view.shapes[owner], lambda start, stop: iter(elements.parts(owner, start, stop))
    elif owner in view.frozen:
        pieces = view.frozen[owner]
        have, parts = pieces.shape, lambda start, stop: span(pieces.parts, start, stop)
    else:
        return None
    if tuple(have) != shape:
        raise _other_shape(view, name, tuple(have), shape)
    return parts


def _refuse_differences(view: CheckpointView, missing: set[str], unexpected: set[str]) -> None:
    problems = []
    if missing:
        problems.append(f"lacks {_list(missing)}, which the model has")
    if unexpected:
        problems.append(f"holds {_list(unexpected)}, which the model does not have")
    if problems:
        raise CheckpointError(
            view.folder.path,
            " and ".join(problems),
            "build the model that was saved, or load with load_module_strict=False",
        )


def _list(names: set[str]) -> str:
    shown = ", ".join(repr(name) for name in sorted(names)[:_MANY])
    return shown + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")


def _other_shape(view: CheckpointView, name: str, have: tuple[int, ...], want: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        view.folder.path,
        f"{name!r} has the shape {have} there and {want} in the model",
        "build the model that was saved",
    )


def _match_groups(subject: Subject, view: CheckpointView) -> list[Group | None]:
    """The saved group of each optimizer group: the one with its first parameter."""
    if not view.groups:
        raise CheckpointError(
            view.folder.path,
            "holds no optimizer state that can be assigned to parameters",
            "load with load_optimizer_states=False to load only the weights",
        )
    holder = {name: group for group in view.groups for name in group.names}
    names, updater = subject.names, subject.assembly.optimizer.updater
    groups: list[Group | None] = []
    for members, options in zip(subject.assembly.members, subject.assembly.optimizer.param_groups, strict=True):
        group = next((holder[names[index]] for index in members if names[index] in holder), None)
        if group is None and members:
            logger.warning("%s: no state for the parameters of an optimizer group; it starts empty", view.folder.path)
        wanted = updater.state_names(options)
        _refuse_other_kinds(updater, view)
        if wanted and view.states() and not set(wanted) & set(view.states()):
            raise CheckpointError(
                view.folder.path,
                f"holds the optimizer states {', '.join(view.states())}; {type(updater.optimizer).__name__} has "
                f"{', '.join(wanted)}",
                "continue with the optimizer that was saved, or load with load_optimizer_states=False",
            )
        groups.append(group)
    return groups


def _refuse_other_kinds(updater: Updater, view: CheckpointView) -> None:
    """Raise an error if states of whole tensors meet an elementwise optimizer, or vice versa."""
    kind, whole_names = type(updater.optimizer).__name__, updater.whole_state_names()
    saved = {name for state in view.whole_states.values() for name in state}
    if view.whole_states and whole_names == ():
        problem = f"holds optimizer states of whole tensors, and {kind} updates one element at a time or flat shards"
    elif view.shard_states and not updater.may_bind_states:
        problem = f"holds optimizer states that only fit the flat shards they were saved from, and {kind} has others"
    elif whole_names and (view.states() or saved) and not saved & set(whole_names):
        known = ", ".join(sorted({*view.states(), *saved}))
        problem = f"holds the optimizer states {known}; {kind} has {', '.join(whole_names)} of whole tensors"
    else:
        return
    raise CheckpointError(
        view.folder.path,
        problem,
        "continue with the optimizer that was saved, and with its hf_zero.optimizer_sees, or load with "
        "load_optimizer_states=False",
    )


def _write_unsharded(subject: ModelSubject, plan: LoadPlan) -> None:
    own_buffers = dict(persistent_buffers(subject.module))
    for name, value in plan.buffers.items():
        own_buffers[name].copy_(value)
    extra = plan.view.meta.get(ds.EXTRA_STATES) or {}
    for name, inner in with_extra_states(subject.module):
        if name in extra:
            inner.set_extra_state(extra[name])
    frozen = subject.frozen()
    for name, parts in plan.frozen.items():
        _write_frozen(frozen[name], parts)


def _write_frozen(parameter: nn.Parameter, parts: Parts) -> None:
    handle = of(parameter)
    if handle is None and parameter.is_contiguous():
        fill(parameter.detach().view(-1), parts(0, parameter.numel()))
    elif handle is None:  # for example channels_last
        whole = torch.empty(parameter.numel(), dtype=parameter.dtype)
        fill(whole, parts(0, parameter.numel()))
        parameter.detach().copy_(whole.view(parameter.shape))
    elif handle.is_available:
        whole = torch.empty(handle.numel, dtype=handle.shard.dtype, device=handle.device)
        fill(whole, parts(0, handle.numel))
        handle.write(whole.view(handle.shape))
    else:
        for number, chunk in handle.chunks():
            part = chunk_interval(handle.numel, number, handle.groups.shard.size)
            with chunk.opened(changes=True) as values:
                fill(values.narrow(0, 0, part.numel), parts(part.start, part.stop))


def _write_masters(sub_group: SubGroup, plan: LoadPlan) -> None:
    for piece in sub_group.pieces:
        parts = plan.weights.get(piece.parameter)
        if parts is not None:
            target = sub_group.master.narrow(0, piece.in_shard, piece.numel)
            fill(target, parts(piece.in_parameter, piece.in_parameter + piece.numel))
    if sub_group.lp_param is not None:
        sub_group.lp_param.copy_(sub_group.master)


def _write_optimizer(subject: Subject, plan: LoadPlan) -> None:
    updater, names, view = subject.assembly.optimizer.updater, subject.names, plan.view
    steps: dict[int, int] = {}
    for sub_group in tracked(updater.sub_groups, "loading optimizer states"):
        group = plan.groups[sub_group.group]
        if group is None:
            _start_anew(updater, sub_group)
            continue
        common = group.scalars.get(ds.STEP)
        if common is not None:
            steps.update({p.parameter: int(view.steps.get(names[p.parameter], common)) for p in sub_group.pieces})
        if view.shard_states:
            _write_bound_state(updater, sub_group, view, names)
        elif not (updater.keeps_everything_whole and _restores_whole(updater, view)):
            if not (group.scalars or any(view.states_of(names[piece.parameter]) for piece in sub_group.pieces)):
                _start_anew(updater, sub_group)  # saved before its first update
            with updater.stager.opened(sub_group, changes=True):
                _write_sub_group_state(subject, sub_group, group, view, steps)
    for options, group in zip(subject.assembly.optimizer.param_groups, plan.groups, strict=True):
        if group is not None:
            _write_options(options, group.options)
    if type(updater.optimizer).__module__.startswith("torch.optim"):
        updater.optimizer.__setstate__({})  # converts plain numbers to tensors if this class needs them
    updater.state_replaced()
    if steps:
        updater.restore_steps(steps)
    _write_whole_states(subject, plan)
    states, device = cast("dict[Any, Any]", updater.optimizer.state), subject.assembly.store.device
    for key, other in view.other_states.items() if updater.keeps_everything_whole else ():
        states[key] = copied(other, device) if isinstance(other, Mapping) else other


def _start_anew(updater: Updater, sub_group: SubGroup) -> None:
    """Reset a sub-group without states in the checkpoint: its current states belong to other weights."""
    with updater.stager.opened(sub_group, changes=True):
        for tensor in sub_group.tensors:
            for value in updater.optimizer.state.pop(tensor.parameter, {}).values():
                if isinstance(value, Tensor):
                    value.zero_()  # keep the memory for reuse
    updater.stager.forget_states(sub_group)


def _write_sub_group_state(
    subject: Subject, sub_group: SubGroup, group: Group, view: CheckpointView, steps: Mapping[int, int]
) -> None:
    updater, names = subject.assembly.optimizer.updater, subject.names
    optimizer = updater.optimizer
    options = subject.assembly.optimizer.param_groups[sub_group.group]
    wanted = updater.state_names(options)
    there = {piece.parameter: view.states_of(names[piece.parameter]) for piece in sub_group.pieces}
    # A shard that only has padding gets the values of other shards of its group.
    has_any = set().union(*(there.values() if there else map(view.states_of, group.names)))
    kinds = [kind for kind in view.states() if kind in has_any and (wanted is None or kind in wanted)]
    for tensor in sub_group.tensors:
        state: dict[str, Any] = {}
        inside = [piece for piece in sub_group.pieces if tensor.interval.start <= piece.in_shard < tensor.interval.stop]
        for kind in kinds:
            form = updater.form_of(kind)
            dtype = getattr(optimizer, "state_dtype", None) if form is None else torch.float32
            value = torch.empty_like(tensor.parameter, dtype=dtype, memory_format=torch.contiguous_format)
            flat = value.view(-1)
            if flat.numel() != sum(piece.numel for piece in inside if kind in there[piece.parameter]):
                flat.zero_()
            for piece in inside:
                name = names[piece.parameter]
                if kind in there[piece.parameter]:
                    target = flat.narrow(0, piece.in_shard - tensor.interval.start, piece.numel)
                    view.read_into(target, name, kind, piece.in_parameter)
            state[kind] = value if form is None else form.store(flat)
        if kinds or group.scalars:
            state.update(group.scalars)
        if ds.STEP in state:
            state[ds.STEP] = float(max((steps.get(piece.parameter, 0) for piece in inside), default=0))
        if state:
            state = {key: torch.tensor(value) if key == ds.STEP else value for key, value in state.items()}
            optimizer.state[tensor.parameter] = state


def _write_bound_state(updater: Updater, sub_group: SubGroup, view: CheckpointView, names: Sequence[str]) -> None:
    """Restore states that only fit this shard."""
    saved = view.shard_states.get(pieces_of(sub_group, names))
    if saved is None:
        kind = type(updater.optimizer).__name__
        raise CheckpointError(
            view.folder.path,
            f"was saved by {kind} on flat shards of {view.world} ranks, and its states fit no other layout",
            f"continue with {view.world} ranks and the same stage and bucket sizes, or load with "
            'load_optimizer_states=False; with hf_zero.optimizer_sees "whole_tensors" states fit any number of ranks',
        )
    state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in saved.items()}
    updater.optimizer.state[sub_group.tensors[0].parameter] = state


def _write_whole_states(subject: Subject, plan: LoadPlan) -> None:
    updater, view = subject.assembly.optimizer.updater, plan.view
    wanted = updater.whole_parameters()
    if not wanted or (updater.keeps_everything_whole and not _restores_whole(updater, view)):
        return
    group_of = {index: plan.groups[number] for number, group in enumerate(subject.assembly.members) for index in group}
    states: dict[int, Mapping[str, Any]] = {}
    for index in wanted:
        group = group_of[index]
        saved = view.whole_states.get(subject.names[index], {})
        if group is not None and updater.keeps_everything_whole:
            states[index] = {**_from_elements(view, subject.names[index], group), **saved}
        elif group is not None:
            states[index] = saved
    updater.restore_whole_states({index: state for index, state in states.items() if state})


def _restores_whole(updater: Updater, view: CheckpointView) -> bool:
    """Whether states are passed to the updater as whole tensors; otherwise they were read by element."""
    reads_elements = any(tensor.whole is not None for sub_group in updater.sub_groups for tensor in sub_group.tensors)
    return bool(view.whole_states) or not reads_elements


def _from_elements(view: CheckpointView, name: str, group: Group) -> dict[str, Any]:
    """A parameter's whole per-element states; empty if it has had no update."""
    if name not in view.shapes or (view.whole_states and name not in view.whole_states):
        return {}
    steps = view.steps.get(name, group.scalars.get(ds.STEP))
    if steps is not None and not steps:
        return {}
    shape = view.shapes[name]
    states: dict[str, Any] = {kind: view.read(name, kind).view(shape) for kind in view.states_of(name)}
    counted = {ds.STEP: torch.tensor(float(steps))} if steps is not None else {}
    return {**group.scalars, **states, **counted}


def _write_options(options: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Update a group's hyperparameters in place, because schedulers reference the dictionary."""
    for key, value in saved.items():
        if key not in options or key == ds.PARAMS:
            continue
        if isinstance(options[key], Tensor):
            options[key].fill_(value)
        elif isinstance(options[key], tuple) and isinstance(value, list):
            options[key] = tuple(value)
        else:
            options[key] = value
