"""Writes a checkpoint in DeepSpeed's universal format: a folder per parameter, for resuming at any world size.

hf_zero itself does not need this: every checkpoint loads at any world size and stage. It is for returning to DeepSpeed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.files.stream import into_place, write_small
from hf_zero.checkpoint.files.torch_file import read_torch_file, write_torch_file
from hf_zero.checkpoint.opening import open_checkpoint
from hf_zero.checkpoint.tensor_ranks import saved_parts_of
from hf_zero.checkpoint.transaction import move_into_place
from hf_zero.checkpoint.view import MASTER, CheckpointView
from hf_zero.errors import CheckpointError
from hf_zero.staging import StagingFolder

# Keys of rank 0's state that are stored in the parameters' folders.
_IN_FOLDERS = (ds.BASE_OPTIMIZER_STATE, ds.BASE_OPTIMIZER_STATE_STEP, ds.FP32_PARTITIONS, ds.SLICE_MAPPINGS)


def convert_to_universal(source: Path, target: Path, on_parameter: Callable[[str], object] = lambda _: None) -> None:
    """Write the checkpoint in the folder `source` (of a tag) to `target`, and `latest_universal` next to it.

    One parameter is in memory at a time. An existing `target` stays until everything is written.

    Raises:
        CheckpointError: if the checkpoint cannot be read, or its states have no universal format.
    """
    view = open_checkpoint(source, with_optimizer=True)
    _refuse_unfit(view)
    staging = StagingFolder(target.parent, target.name)
    try:
        _write(view, staging.path, on_parameter)
        move_into_place(staging.path, target)
    finally:
        staging.remove()
    write_small(target.parent / ds.LATEST_UNIVERSAL, target.name.encode())


def _refuse_unfit(view: CheckpointView) -> None:
    where, fix = view.folder.path, "load it unconverted: hf_zero loads it at any stage and number of ranks"
    if view.folder.is_universal:
        raise CheckpointError(where, "is already universal", "give the folder that save_checkpoint wrote")
    if view.stage == 0:
        raise CheckpointError(where, "is of stage 0, whose weights are whole and have no universal form", fix)
    if not view.groups or MASTER not in view.elements:
        raise CheckpointError(where, "has no optimizer states with names of parameters", fix)
    if view.whole_states or view.shard_states:
        raise CheckpointError(where, "holds optimizer states that are not one value per element", fix)


def _write(view: CheckpointView, folder: Path, on_parameter: Callable[[str], object]) -> None:
    parameters = folder / ds.UNIVERSAL_FOLDER
    parameters.mkdir(parents=True)
    for path in view.folder.path.glob(f"*{ds.MODEL_SUFFIX}"):  # of all tensor ranks
        shutil.copyfile(path, folder / path.name)
    _write_file(parameters / ds.UNIVERSAL_OPTIMIZER_FILE, _common_state(view))
    is_flat = view.stage == 3 and not saved_parts_of(view)
    steps = {name: group.scalars.get(ds.STEP) for group in view.groups for name in group.names} | dict(view.steps)
    for name, shape in view.shapes.items():
        for kind in (MASTER, *view.states_of(name)):
            flat = view.read(name, kind).float()
            value = flat if is_flat else {ds.CAT_DIM: 0, ds.PARAM: flat.view(shape)}
            _write_file(parameters / name / f"{kind}.pt", value)
        if view.stage < 3 and steps.get(name) is not None:
            # A tensor, because DeepSpeed passes it to torch's own optimizers, which require one.
            _write_file(parameters / name / f"{ds.STEP}.pt", torch.tensor(float(steps[name] or 0)))
        on_parameter(name)
    for name, whole in _untrained(view).items() if view.stage < 3 else ():
        _write_file(parameters / name / f"{MASTER}.pt", {ds.PARAM: whole.float()})


def _untrained(view: CheckpointView) -> dict[str, Tensor]:
    """Frozen weights, buffers, and second names of tied parameters."""
    tensors = {name: value.materialise() for name, value in view.frozen.items()} | dict(view.buffers)
    for alias, owner in view.aliases.items():
        if owner in view.shapes:
            tensors[alias] = view.read(owner).view(view.shapes[owner])
        elif owner in tensors:
            tensors[alias] = tensors[owner]
    return tensors


def _common_state(view: CheckpointView) -> dict[str, Any]:
    """State shared by all parameters: rank 0's file without the contents of the folders."""
    path = view.folder.optimizer_files[min(view.folder.optimizer_files)]
    inner: Mapping[str, Any] = read_torch_file(path)[ds.OPTIMIZER_STATE_DICT]
    if view.stage == 3:
        return {**inner, ds.PARAM_GROUPS: inner[ds.OPTIMIZER_STATE_DICT][ds.PARAM_GROUPS]}
    groups = [{**group.options, ds.PARAMS: [number]} for number, group in enumerate(view.groups)]
    return {**{key: value for key, value in inner.items() if key not in _IN_FOLDERS}, ds.PARAM_GROUPS: groups}


def _write_file(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    into_place(path, lambda partial: write_torch_file(partial, value))
