"""Views of checkpoints of stages 1, 2 and 3: one optimizer file per rank."""

from __future__ import annotations

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
    scalar_states,
    scaler_values,
    shapes_in_groups,
)
from hf_zero.checkpoint.files.torch_reader import read_torch_file
from hf_zero.checkpoint.view import MASTER, CheckpointView, Group, StateElements, buffer_sizes, by_parameter
from hf_zero.checkpoint.whole_states import bound_together, merged
from hf_zero.errors import CheckpointError
from hf_zero.layout.partitions import GroupPartition, Member, SubGroupPartition
from hf_zero.layout.reshard import Extent

_FIX = "restore the files of one checkpoint from a copy, or load another checkpoint"


@dataclass(frozen=True, slots=True)
class _RankFile:
    """One rank's optimizer file, its inner dictionary."""

    path: Path
    inner: Mapping[str, Any]
    ours: Mapping[str, Any]


def read_sharded(folder: Folder) -> CheckpointView:
    """Open every file of a checkpoint of stages 1 to 3 and lay out what it holds."""
    model_paths = list(folder.model_files.values())
    models = [read_torch_file(path) for path in model_paths]
    files = [_rank_file(path) for path in folder.optimizer_files.values()]
    if not files and not models[0].get(ds.PARAM_SHAPES):
        return _untrained(folder, models, model_paths)
    stage = _stage(folder, files)
    _check_world(folder, models[0], model_paths[0], files)
    pieces = shapes_in_groups(models[0], ds.PARAM_SHAPES, model_paths[0])
    shapes = {name: shape for group in pieces for name, shape in group.items()}
    read = _stage_3 if stage == 3 else _stages_1_2
    elements, groups = read(pieces, files)
    part = module_part(models, model_paths, shapes)
    return CheckpointView(
        folder=folder,
        stage=stage,
        world=len(files),
        shapes=shapes,
        frozen=part.frozen,
        buffers=part.buffers,
        aliases=part.aliases,
        groups=groups,
        elements=elements,
        meta=part.meta,
        scaler=scaler_values(files[0].inner.get(ds.LOSS_SCALER)),
        steps=dict(files[0].ours.get(ds.STEPS) or {}),
        whole_states=merged(_of_all(files, ds.WHOLE_STATES)),
        shard_states=bound_together(_of_all(files, ds.SHARD_STATES)),
        gradient_errors=[file.ours.get(ds.GRADIENT_ERRORS, ()) for file in files],
    )


def _of_all(files: Sequence[_RankFile], key: str) -> list[tuple[Path, Any]]:
    return [(file.path, file.ours[key]) for file in files if key in file.ours]


def _untrained(folder: Folder, models: Sequence[Any], paths: Sequence[Path]) -> CheckpointView:
    """A model of stage 3 without optimizer."""
    check_manifest_is_there(models[0].get(ds.HF_ZERO), paths[0])
    part = module_part(models, paths, ())
    return CheckpointView(
        folder=folder,
        stage=3,
        world=len(models),
        shapes={},
        frozen=part.frozen,
        buffers=part.buffers,
        aliases=part.aliases,
        groups=(),
        elements={},
        meta=part.meta,
    )


def _rank_file(path: Path) -> _RankFile:
    content = read_torch_file(path)
    inner = need_mapping(content, ds.OPTIMIZER_STATE_DICT, path)
    check_manifest_is_there(content.get(ds.HF_ZERO), path)
    return _RankFile(path, inner, content.get(ds.HF_ZERO) or {})


def _stage(folder: Folder, files: Sequence[_RankFile]) -> int:
    if not files:
        raise CheckpointError(
            folder.path, f"holds no *{ds.OPTIMIZER_SUFFIX} file: its weights are those of the model file", _FIX
        )
    inner = files[0].inner
    if ds.ZERO_STAGE in inner:
        stage = int(inner[ds.ZERO_STAGE])
    else:  # one optimizer class of DeepSpeed (bf16, stage 1, fp32 accumulation) does not say
        stage = 3 if ds.FP32_FLAT_GROUPS in inner else 1
    if stage not in (1, 2, 3) or (stage == 3) != (ds.FP32_FLAT_GROUPS in inner):
        raise CheckpointError(files[0].path, f"says stage {stage}, and its content is of another", _FIX)
    return stage


def _check_world(folder: Folder, model: Any, model_path: Path, files: Sequence[_RankFile]) -> None:
    world = len(files)
    stated = {model_path: need_int(model, ds.DP_WORLD_SIZE, model_path) if ds.DP_WORLD_SIZE in model else world}
    for file in files:
        stated[file.path] = need_int(file.inner, ds.PARTITION_COUNT, file.path)
    for path, count in stated.items():
        if count != world:
            raise CheckpointError(
                path, f"is of a checkpoint of {count} ranks, and this folder holds the files of {world}", _FIX
            )


def _stages_1_2(pieces: Sequence[Mapping[str, tuple[int, ...]]], files: Sequence[_RankFile]) -> Any:
    world = len(files)
    alignment = files[0].inner.get(ds.ALIGNMENT_PADDINGS) or []
    partitions, next_index = [], 0
    for number, group in enumerate(pieces):
        members = []
        for shape in group.values():
            members.append(Member(next_index, math.prod(shape)))
            next_index += 1
        gaps = tuple(alignment[number]) if number < len(alignment) else ()
        partitions.append(GroupPartition(tuple(members), world, gaps))
    extents = [
        extent for g, partition in enumerate(partitions) for r in range(world) for extent in partition.extents(r, g)
    ]
    sizes = buffer_sizes(extents)
    buffers: dict[str, dict[tuple[int, int], Tensor]] = {}
    states = [_states_1_2(file, len(pieces)) for file in files]
    for rank, file in enumerate(files):
        masters = need_list(file.inner, ds.FP32_PARTITIONS, file.path)
        _check_count(len(masters), len(pieces), file.path)
        for number in range(len(pieces)):
            place, wanted = (rank, number), sizes.get((rank, number), 0)
            _check_available(masters[number], partitions[number], rank, file.path)
            buffers.setdefault(MASTER, {})[place] = flat(masters[number], f"group {number}", file.path, wanted)
            for kind, tensor in element_states(states[rank][number], wanted).items():
                buffers.setdefault(kind, {})[place] = flat(tensor, f"{kind} of group {number}", file.path, wanted)
    options = _options(files[0], len(pieces))
    groups = [Group(tuple(group), options[number], _scalars(states, number)) for number, group in enumerate(pieces)]
    return _elements(extents, buffers), tuple(groups)


def _check_available(tensor: Any, partition: GroupPartition, rank: int, path: Path) -> None:
    stripped = partition.partition_numel - partition.padding(rank)
    have = tensor.numel() if isinstance(tensor, Tensor) else -1
    if have not in (stripped, partition.partition_numel):
        raise CheckpointError(
            path,
            f"holds {have} master weights of a group whose part on this rank has {stripped} "
            f"(the group has {partition.used_numel} elements)",
            _FIX,
        )


def _states_1_2(file: _RankFile, count: int) -> list[Mapping[str, Any]]:
    base = need(file.inner, ds.BASE_OPTIMIZER_STATE, file.path)
    if isinstance(base, (list, tuple)):  # elastic_checkpoint: a list without hyper-parameters
        _check_count(len(base), count, file.path)
        return [state if isinstance(state, Mapping) else {} for state in base]
    state = need_mapping(base, ds.STATE, file.path)
    return [state.get(number, {}) for number in range(count)]


def _stage_3(pieces: Sequence[Mapping[str, tuple[int, ...]]], files: Sequence[_RankFile]) -> Any:
    world, next_index = len(files), 0
    subs = []
    for group in pieces:
        members = [Member(next_index + i, math.prod(shape)) for i, shape in enumerate(group.values())]
        next_index += len(members)
        subs.append(SubGroupPartition(tuple(members), world))
    extents = [extent for s, sub in enumerate(subs) for r in range(world) for extent in sub.extents(r, s)]
    buffers: dict[str, dict[tuple[int, int], Tensor]] = {}
    torch_states = [need_mapping(file.inner, ds.OPTIMIZER_STATE_DICT, file.path) for file in files]
    states = [[state.get(ds.STATE, {}).get(s, {}) for s in range(len(subs))] for state in torch_states]
    for rank, file in enumerate(files):
        masters = need_list(file.inner, ds.FP32_FLAT_GROUPS, file.path)
        _check_count(len(masters), len(subs), file.path)
        for number, sub in enumerate(subs):
            place = (rank, number)
            what = f"sub-group {number}"
            master = flat(masters[number], what, file.path, sub.numel)
            if master.numel() != sub.numel:
                raise CheckpointError(
                    file.path, f"{what} has {master.numel()} elements where its shapes give {sub.numel}", _FIX
                )
            buffers.setdefault(MASTER, {})[place] = master
            for kind, tensor in element_states(states[rank][number], sub.numel).items():
                buffers.setdefault(kind, {})[place] = flat(tensor, f"{kind} of {what}", file.path, sub.numel)
    return _elements(extents, buffers), _groups_3(
        pieces, need_list(torch_states[0], ds.PARAM_GROUPS, files[0].path), states
    )


def _groups_3(pieces: Sequence[Mapping[str, Any]], stated: Sequence[Any], states: Any) -> tuple[Group, ...]:
    """Sub-groups put together again, as the optimizer's own groups list them."""
    groups = []
    for group in stated:
        members = [int(number) for number in group.get(ds.PARAMS, ()) if int(number) < len(pieces)]
        names = tuple(name for number in members for name in pieces[number])
        options = {key: value for key, value in group.items() if key != ds.PARAMS}
        groups.append(Group(names, options, _scalars(states, members[0]) if members else {}))
    return tuple(groups)


def _options(file: _RankFile, count: int) -> list[Mapping[str, Any]]:
    base = file.inner[ds.BASE_OPTIMIZER_STATE]
    if isinstance(base, (list, tuple)):
        return [{}] * count
    stated = need_list(base, ds.PARAM_GROUPS, file.path)
    _check_count(len(stated), count, file.path)
    return [{key: value for key, value in group.items() if key != ds.PARAMS} for group in stated]


def _scalars(states: Sequence[Sequence[Mapping[str, Any]]], number: int) -> dict[str, Any]:
    for mine in states:
        if mine[number]:
            return scalar_states(mine[number], element_states(mine[number], 0))
    return {}


def _elements(
    extents: Sequence[Extent], buffers: Mapping[str, Mapping[tuple[int, int], Tensor]]
) -> dict[str, StateElements]:
    """By kind of state, where every rank has it for any group (before the first step there is none)."""
    ordered = by_parameter(extents)
    found = {kind: StateElements(ordered, mine) for kind, mine in buffers.items()}
    return {kind: elements for kind, elements in found.items() if any(map(elements.has, ordered))}


def _check_count(have: int, wanted: int, path: Path) -> None:
    if have != wanted:
        raise CheckpointError(path, f"holds {have} groups where the model file lists {wanted}", _FIX)
