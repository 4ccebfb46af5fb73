"""Views of DeepSpeed's checkpoints: sharded (stages 1 to 3: one optimizer file per rank), whole, and universal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.folder import Folder
from hf_zero.checkpoint.deepspeed.state_dicts import (
    check_manifest_is_there,
    element_states,
    flat,
    module_part,
    need,
    need_int,
    need_list,
    need_mapping,
    numel_of,
    parts_of,
    scalar_states,
    scaler_values,
    shapes_in_groups,
)
from hf_zero.checkpoint.deepspeed.tensor_parts import saved_parts
from hf_zero.checkpoint.extra_states import FIX, bound_together, merged
from hf_zero.checkpoint.files.stream import Parts
from hf_zero.checkpoint.files.torch_file import read_torch_file
from hf_zero.checkpoint.view import MASTER, CheckpointView, Group, StateElements, buffer_sizes, by_parameter
from hf_zero.errors import CheckpointError
from hf_zero.layout.reshard import Extent, GroupPartition, Member, SubGroupPartition

_Buffers = dict[str, dict[tuple[int, int], Parts]]
"""Kind of state -> (rank, number of the group or sub-group) -> its elements."""


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The inner dictionary of one rank's optimizer file."""

    path: Path
    inner: Mapping[str, Any]
    ours: Mapping[str, Any]


def read_sharded(folder: Folder) -> CheckpointView:
    """Open every file of a checkpoint of stages 1 to 3 and create its view."""
    model_paths = list(folder.model_files.values())
    models = [read_torch_file(path) for path in model_paths]
    _refuse_experts(models[0], model_paths[0])
    files = [_rank_file(path) for path in folder.optimizer_files.values()]
    if not files and not models[0].get(ds.PARAM_SHAPES):
        return _untrained(folder, models, model_paths)
    stage = _stage(folder, files)
    _check_world(models[0], model_paths[0], files)
    pieces = shapes_in_groups(models[0], model_paths[0])
    shapes = {name: shape for group in pieces for name, shape in group.items()}
    read = _stage_3 if stage == 3 else _stages_1_2
    extents, buffers, groups = read(pieces, files)
    return CheckpointView(
        folder=folder,
        stage=stage,
        world=len(files),
        shapes=shapes,
        groups=groups,
        elements=_elements(extents, buffers, list(shapes)),
        **module_part(models, model_paths, shapes),
        scaler=scaler_values(files[0].inner.get(ds.LOSS_SCALER)),
        steps=dict(files[0].ours.get(ds.STEPS) or {}),
        whole_states=merged(_of_all(files, ds.WHOLE_STATES)),
        shard_states=bound_together(_of_all(files, ds.SHARD_STATES)),
        other_states=dict(files[0].ours.get(ds.OTHER_STATES) or {}),
        gradient_errors=[file.ours.get(ds.GRADIENT_ERRORS, ()) for file in files],
    )


def _of_all(files: Sequence[_RankFile], key: str) -> list[tuple[Path, Any]]:
    return [(file.path, file.ours[key]) for file in files if key in file.ours]


def _untrained(folder: Folder, models: Sequence[Any], paths: Sequence[Path]) -> CheckpointView:
    """The view of a stage 3 model without optimizer."""
    check_manifest_is_there(models[0].get(ds.HF_ZERO), paths[0])
    part = module_part(models, paths, ())
    return CheckpointView(folder=folder, stage=3, world=len(models), shapes={}, groups=(), elements={}, **part)


def _refuse_experts(model: Mapping[str, Any], path: Path) -> None:
    """DeepSpeed's AutoEP makes other modules of experts, whose shards at stage 3 belong to other groups of ranks."""
    if model.get(ds.AUTOEP_LAYERS_KEY) or model.get(ds.AUTOEP_LAYERS_KEY_LEGACY):
        raise CheckpointError(
            path,
            "is of DeepSpeed's expert parallelism, whose experts have other names and forms than the model's",
            "save whole weights with the DeepSpeed that wrote it, and start from these",
        )


def _rank_file(path: Path) -> _RankFile:
    content = read_torch_file(path, stays_in_parts=ds.OPTIMIZER_STATE_DICT.__eq__)
    inner = need_mapping(content, ds.OPTIMIZER_STATE_DICT, path)
    check_manifest_is_there(content.get(ds.HF_ZERO), path)
    return _RankFile(path, inner, content.get(ds.HF_ZERO) or {})


def _stage(folder: Folder, files: Sequence[_RankFile]) -> int:
    if not files:
        raise CheckpointError(
            folder.path, f"has no *{ds.OPTIMIZER_SUFFIX} file: its weights are in the model file", FIX
        )
    inner = files[0].inner
    if ds.ZERO_STAGE in inner:
        stage = int(inner[ds.ZERO_STAGE])
    else:  # one optimizer class of DeepSpeed lacks it (bf16, stage 1, fp32 accumulation)
        stage = 3 if ds.FP32_FLAT_GROUPS in inner else 1
    if stage not in (1, 2, 3) or (stage == 3) != (ds.FP32_FLAT_GROUPS in inner):
        raise CheckpointError(files[0].path, f"says stage {stage}, but its content is of another stage", FIX)
    return stage


def _check_world(model: Any, model_path: Path, files: Sequence[_RankFile]) -> None:
    world = len(files)
    stated = {model_path: need_int(model, ds.DP_WORLD_SIZE, model_path) if ds.DP_WORLD_SIZE in model else world}
    for file in files:
        stated[file.path] = need_int(file.inner, ds.PARTITION_COUNT, file.path)
    for path, count in stated.items():
        if count != world:
            raise CheckpointError(
                path, f"is of a checkpoint of {count} ranks, but this folder has the files of {world}", FIX
            )


def _stages_1_2(
    pieces: Sequence[Mapping[str, tuple[int, ...]]], files: Sequence[_RankFile]
) -> tuple[list[Extent], _Buffers, tuple[Group, ...]]:
    world = len(files)
    gaps = [tuple(each) for each in files[0].inner.get(ds.ALIGNMENT_PADDINGS) or ()]
    gaps += [()] * (len(pieces) - len(gaps))
    partitions = [GroupPartition(members, world, mine) for members, mine in zip(_members(pieces), gaps)]
    extents = [
        extent for g, partition in enumerate(partitions) for r in range(world) for extent in partition.extents(r, g)
    ]
    sizes = buffer_sizes(extents)
    buffers: _Buffers = {}
    states = [_states_1_2(file, len(pieces)) for file in files]
    for rank, file in enumerate(files):
        masters = need_list(file.inner, ds.FP32_PARTITIONS, file.path)
        _check_count(len(masters), len(pieces), file.path)
        for number in range(len(pieces)):
            place, wanted = (rank, number), sizes.get((rank, number), 0)
            _check_available(masters[number], partitions[number], rank, file.path)
            buffers.setdefault(MASTER, {})[place] = parts_of(masters[number], f"group {number}", file.path, wanted)
            for kind, tensor in element_states(states[rank][number], wanted).items():
                buffers.setdefault(kind, {})[place] = parts_of(tensor, f"{kind} of group {number}", file.path, wanted)
    options = _options(files[0], len(pieces))
    groups = [Group(tuple(group), options[number], _scalars(states, number)) for number, group in enumerate(pieces)]
    return extents, buffers, tuple(groups)


def _members(pieces: Sequence[Mapping[str, tuple[int, ...]]]) -> list[tuple[Member, ...]]:
    """The members of every group, numbered through all groups."""
    numbers = itertools.count()
    return [tuple(Member(next(numbers), math.prod(shape)) for shape in group.values()) for group in pieces]


def _check_available(tensor: Any, partition: GroupPartition, rank: int, path: Path) -> None:
    stripped = partition.partition_numel - partition.padding(rank)
    have = numel_of(tensor)
    if have not in (stripped, partition.partition_numel):
        raise CheckpointError(
            path,
            f"holds {have} master weights of a group whose part on this rank should have {stripped} "
            f"(the group has {partition.used_numel} elements)",
            FIX,
        )


def _states_1_2(file: _RankFile, count: int) -> list[Mapping[str, Any]]:
    base = need(file.inner, ds.BASE_OPTIMIZER_STATE, file.path)
    if isinstance(base, (list, tuple)):  # elastic_checkpoint: a list without hyper-parameters
        _check_count(len(base), count, file.path)
        return [state if isinstance(state, Mapping) else {} for state in base]
    state = need_mapping(base, ds.STATE, file.path)
    return [state.get(number, {}) for number in range(count)]


def _stage_3(
    pieces: Sequence[Mapping[str, tuple[int, ...]]], files: Sequence[_RankFile]
) -> tuple[list[Extent], _Buffers, tuple[Group, ...]]:
    world = len(files)
    subs = [SubGroupPartition(members, world) for members in _members(pieces)]
    extents = [extent for s, sub in enumerate(subs) for r in range(world) for extent in sub.extents(r, s)]
    buffers: _Buffers = {}
    torch_states = [need_mapping(file.inner, ds.OPTIMIZER_STATE_DICT, file.path) for file in files]
    states = [[state.get(ds.STATE, {}).get(s, {}) for s in range(len(subs))] for state in torch_states]
    for rank, file in enumerate(files):
        masters = need_list(file.inner, ds.FP32_FLAT_GROUPS, file.path)
        _check_count(len(masters), len(subs), file.path)
        for number, sub in enumerate(subs):
            place = (rank, number)
            what = f"sub-group {number}"
            buffers.setdefault(MASTER, {})[place] = parts_of(masters[number], what, file.path, sub.numel)
            if (have := numel_of(masters[number])) != sub.numel:
                raise CheckpointError(file.path, f"{what} has {have} elements, but its shapes give {sub.numel}", FIX)
            for kind, tensor in element_states(states[rank][number], sub.numel).items():
                buffers.setdefault(kind, {})[place] = parts_of(tensor, f"{kind} of {what}", file.path, sub.numel)
    return extents, buffers, _groups_3(pieces, need_list(torch_states[0], ds.PARAM_GROUPS, files[0].path), states)


def _groups_3(pieces: Sequence[Mapping[str, Any]], stated: Sequence[Any], states: Any) -> tuple[Group, ...]:
    """Join sub-groups into the optimizer's own groups."""
    groups = []
    for group in stated:
        members = [int(number) for number in group.get(ds.PARAMS, ()) if int(number) < len(pieces)]
        names = tuple(name for number in members for name in pieces[number])
        groups.append(Group(names, _without_params(group), _scalars(states, members[0]) if members else {}))
    return tuple(groups)


def _options(file: _RankFile, count: int) -> list[Mapping[str, Any]]:
    base = file.inner[ds.BASE_OPTIMIZER_STATE]
    if isinstance(base, (list, tuple)):
        return [{}] * count
    stated = need_list(base, ds.PARAM_GROUPS, file.path)
    _check_count(len(stated), count, file.path)
    return list(map(_without_params, stated))


def _scalars(states: Sequence[Sequence[Mapping[str, Any]]], number: int) -> dict[str, Any]:
    for mine in states:
        if mine[number]:
            return scalar_states(mine[number], element_states(mine[number], 0))
    return {}


def _elements(
    extents: Sequence[Extent], buffers: Mapping[str, Mapping[tuple[int, int], Parts]], names: Sequence[str]
) -> dict[str, StateElements]:
    """Elements by kind of state, if every rank has it for some group (before the first step there are none)."""
    ordered = {names[index]: mine for index, mine in by_parameter(extents).items()}
    by_kind = {kind: StateElements(ordered, mine) for kind, mine in buffers.items()}
    return {kind: elements for kind, elements in by_kind.items() if any(map(elements.has, ordered))}


def _check_count(have: int, wanted: int, path: Path) -> None:
    if have != wanted:
        raise CheckpointError(path, f"holds {have} groups, but the model file lists {wanted}", FIX)


# Views of stage 0 checkpoints (everything in the model file) and of universal checkpoints (a folder per parameter).


Shapes = Mapping[str, tuple[int, ...]]
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")


def read_stage_0(folder: Folder, groups: Sequence[Shapes] | None) -> CheckpointView:
    """A checkpoint of whole weights.

    Args:
        groups: names and shapes of the optimizer's groups. DeepSpeed writes no names at stage 0; without `groups` its
            optimizer state cannot be assigned, and the view only has the model's weights, as frozen parameters.
    """
    (path,) = folder.model_files.values()
    model = read_torch_file(path)
    check_manifest_is_there(model.get(ds.HF_ZERO), path)
    if model.get(ds.PARAM_SHAPES):
        groups = shapes_in_groups(model, path)
    optimizer = model.get(ds.OPTIMIZER)
    if not groups or not isinstance(optimizer, Mapping):
        groups, optimizer = (), {}
    shapes = {name: shape for group in groups for name, shape in group.items()}
    part = module_part([model], [path], shapes)
    ours = model.get(ds.HF_ZERO) or {}
    module = {**need_mapping(model, ds.MODULE, path), **(ours.get(ds.OUTSIDE_WEIGHTS) or {})}
    buffers = {MASTER: {i: flat(need(module, name, path), f"{name!r}", path) for i, name in enumerate(shapes)}}
    inner = optimizer.get(ds.OPTIMIZER_STATE_DICT, optimizer)
    is_flat = ds.FP32_GROUPS_FLAT in optimizer
    if is_flat:
        buffers[MASTER] = dict(enumerate(optimizer[ds.FP32_GROUPS_FLAT]))
    elif ds.FP32_GROUPS in optimizer:
        buffers[MASTER] = dict(enumerate(tensor for group in optimizer[ds.FP32_GROUPS] for tensor in group))
    extents = _whole_extents(groups, is_flat)
    sizes = {number: numel for (_, number), numel in buffer_sizes(extents).items()}
    states = inner.get(ds.STATE, {})
    whole = {} if is_flat else _whole_states(states, dict(enumerate(shapes.items())))
    for number, state in states.items() if not whole else ():
        for kind, tensor in element_states(state, sizes.get(number, 0), of_scalar=sizes.get(number) == 1).items():
            buffers.setdefault(kind, {})[number] = tensor
    stated = inner.get(ds.PARAM_GROUPS, [{}] * len(groups))
    if groups and len(stated) != len(groups):
        raise CheckpointError(path, f"holds {len(stated)} optimizer groups, but should hold {len(groups)}", FIX)
    return CheckpointView(
        folder=folder,
        stage=0,
        world=int(model.get(ds.DP_WORLD_SIZE, 1)),
        shapes=shapes,
        **part,
        groups=tuple(
            Group(tuple(group), _without_params(stated[number]), _scalars_0(states, stated[number]))
            for number, group in enumerate(groups)
        ),
        elements=_whole_elements(extents, buffers, list(shapes), path),
        scaler={key: optimizer[key] for key in _SCALER_KEYS if key in optimizer}
        | ({"dynamic": bool(optimizer[ds.DYNAMIC_LOSS_SCALE])} if ds.DYNAMIC_LOSS_SCALE in optimizer else {}),
        steps=_steps_0(states, stated, groups, is_flat) | dict(ours.get(ds.STEPS) or {}),
        whole_states=whole,
        other_states=dict(ours.get(ds.OTHER_STATES) or {}),
    )


def _whole_states(
    states: Mapping[int, Any], numbered: Mapping[int, tuple[str, tuple[int, ...]]]
) -> dict[str, Mapping[str, Any]]:
    """All states by parameter name, if any of them is a tensor that is not per element."""
    named = {numbered[number][0]: state for number, state in states.items() if number in numbered}
    shapes = dict(numbered.values())
    has_other_shapes = any(
        isinstance(value, Tensor) and value.ndim and value.numel() != math.prod(shapes[name])
        for name, state in named.items()
        for value in state.values()
    )
    return named if has_other_shapes else {}


def read_universal(folder: Folder) -> CheckpointView:
    """The view of a universal checkpoint: whole `zero/<parameter>/fp32.pt` and moments."""
    paths = list(folder.model_files.values())
    if not paths:
        raise CheckpointError(folder.path, f"has no *{ds.MODEL_SUFFIX} file", FIX)
    models = [read_torch_file(path) for path in paths]
    _refuse_experts(models[0], paths[0])
    states = read_torch_file(folder.path / ds.UNIVERSAL_FOLDER / ds.UNIVERSAL_OPTIMIZER_FILE)
    saved = saved_parts(models[0], paths[0])
    cuts = saved.cuts if saved is not None else {}
    parts_in_groups = shapes_in_groups(models[0], paths[0])
    pieces = [{n: cuts[n].shape if n in cuts else shape for n, shape in group.items()} for group in parts_in_groups]
    shapes = {name: shape for group in pieces for name, shape in group.items()}
    part = module_part(models, paths, shapes)
    buffers: dict[str, dict[int, Tensor]] = {}
    steps: dict[str, Any] = {}
    for index, name in enumerate(shapes):
        for file in _parameter_files(folder, name):
            value = read_torch_file(file)
            value = value.get(ds.PARAM) if isinstance(value, Mapping) else value
            if file.stem == ds.STEP:
                steps[name] = int(value or 0)
            elif isinstance(value, Tensor):
                buffers.setdefault(file.stem, {})[index] = value
    _check_complete(folder, pieces, buffers)
    extents = _whole_extents(pieces, False)
    inner = states.get(ds.OPTIMIZER_STATE_DICT) or {}
    scalars = {number: scalar_states(one, element_states(one, 0)) for number, one in inner.get(ds.STATE, {}).items()}
    return CheckpointView(
        folder=folder,
        stage=3 if folder.model_file_per_rank else 2,
        world=len(paths),
        shapes=shapes,
        **part,
        groups=_universal_groups(pieces, states.get(ds.PARAM_GROUPS) or (), scalars, steps),
        elements=_whole_elements(extents, buffers, list(shapes), folder.path / ds.UNIVERSAL_FOLDER),
        scaler=scaler_values(states.get(ds.LOSS_SCALER)),
    )


def _check_complete(folder: Folder, pieces: Sequence[Shapes], buffers: Mapping[str, Mapping[int, Tensor]]) -> None:
    """Check that every parameter has its weights and all moments of its group."""
    numbers = iter(range(sum(map(len, pieces))))
    for group in pieces:
        members = dict(zip(group, numbers))
        for kind in {MASTER, *(kind for kind, mine in buffers.items() if not mine.keys().isdisjoint(members.values()))}:
            for name, index in members.items():
                if index not in buffers.get(kind, {}):
                    path = folder.path / ds.UNIVERSAL_FOLDER / name / f"{kind}.pt"
                    raise CheckpointError(path, "this file of the checkpoint is missing", FIX)


def _universal_groups(
    pieces: Sequence[Shapes],
    stated: Sequence[Mapping[str, Any]],
    scalars: Mapping[int, Mapping[str, Any]],
    steps: Mapping[str, int],
) -> tuple[Group, ...]:
    """Sub-groups joined as in `params` (stage 3), or one to one."""
    joins = [[int(number) for number in group.get(ds.PARAMS, ())] for group in stated]
    if sorted(number for join in joins for number in join) != list(range(len(pieces))):
        joins = [[number] for number in range(len(pieces))]
    groups = []
    for number, join in enumerate(joins):
        names = tuple(name for member in join for name in pieces[member])
        known = [steps[name] for name in names if name in steps]
        options = _without_params(stated[number]) if number < len(stated) else {}
        common = next((scalars[member] for member in join if member in scalars), {})
        groups.append(Group(names, options, {**common, **({ds.STEP: max(known)} if known else {})}))
    return tuple(groups)


def _parameter_files(folder: Folder, name: str) -> list[Path]:
    if "/" in name or "\\" in name or name.startswith("."):
        raise CheckpointError(folder.path, f"lists a parameter {name!r}, which is not a folder name", FIX)
    place = folder.path / ds.UNIVERSAL_FOLDER / name
    if not place.is_dir():
        raise CheckpointError(place, f"the folder of parameter {name!r} is missing", FIX)
    return sorted(place.glob("*.pt"))


def _whole_extents(groups: Sequence[Shapes], is_flat: bool) -> list[Extent]:
    """One buffer per group, or one per parameter; everything on rank 0."""
    extents: list[Extent] = []
    for number, group in enumerate(groups):
        cursor = 0
        for shape in group.values():
            numel, parameter = math.prod(shape), len(extents)
            buffer, offset = (number, cursor) if is_flat else (parameter, 0)
            extents.append(Extent(parameter, 0, numel, 0, buffer, offset))
            cursor += numel
    return extents


def _whole_elements(
    extents: Sequence[Extent], buffers: Mapping[str, Mapping[int, Tensor]], names: Sequence[str], path: Path
) -> dict[str, StateElements]:
    ordered = {names[index]: mine for index, mine in by_parameter(extents).items()}
    sizes = buffer_sizes(extents)
    by_kind = {}
    for kind, mine in buffers.items():
        there = {place: numel for place, numel in sizes.items() if place[1] in mine}
        if there:
            flats = {place: flat(mine[place[1]], f"{kind} #{place[1]}", path, numel) for place, numel in there.items()}
            by_kind[kind] = StateElements(ordered, flats)
    return by_kind


def _scalars_0(states: Mapping[int, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Single values of the parameter with the most updates."""
    latest: dict[str, Any] = {}
    for number in group.get(ds.PARAMS, ()):
        state = states.get(number)
        if state:
            scalars = scalar_states(state, element_states(state, 1, of_scalar=True))
            if not latest or scalars.get(ds.STEP, 0) > latest.get(ds.STEP, 0):
                latest = scalars
    return latest


def _steps_0(
    states: Mapping[int, Any], stated: Sequence[Mapping[str, Any]], groups: Sequence[Shapes], is_flat: bool
) -> dict[str, int]:
    """Updates by parameter: at stage 0 each has a separate counter, or none before its first update."""
    if is_flat:
        return {}
    steps = {}
    for names, group in zip(groups, stated, strict=True):
        for name, number in zip(names, group.get(ds.PARAMS, ()), strict=False):
            steps[name] = int((states.get(number) or {}).get(ds.STEP, 0))
    return steps


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != ds.PARAMS}
