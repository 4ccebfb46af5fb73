"""Layer reduction: a student of some of a teacher's layers.

Either the model itself loses the other layers, in place, or a student that was built with fewer layers takes over the
parameters of the chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_zero.config import ConfigError, Problem
from hf_zero.extras.compression.matching import nearest
from hf_zero.extras.compression.section import LayerReduction
from hf_zero.log import logger
from hf_zero.params.sharded_parameter import of
from hf_zero.params.unsharding import reshard, unshard

_PATH = "compression_training.layer_reduction"
_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")


def reduce_layers(model: nn.Module, section: LayerReduction) -> int:
    """Leave only the chosen layers in `model`, and let its config say so; returns how many there were.

    Raises:
        ConfigError: there is no such list of layers, or it is too short.
    """
    layers = _list_of_layers(model, section)
    before = len(layers)
    kept = nn.ModuleList([layers[index] for index in section.teacher_layer])
    parent, _, name = str(section.module_name_prefix).rpartition(".")
    setattr(model.get_submodule(parent), name, kept)
    _number(kept)
    _follow_in_config(getattr(model, "config", None), before, section.teacher_layer)
    logger.info("layer reduction: %s keeps %d of %d layers", section.module_name_prefix, len(kept), before)
    return before


def is_reduced(model: nn.Module, section: LayerReduction) -> bool:
    """Whether the model has as many layers as the student is to have."""
    return len(_list_of_layers(model, section, checks_length=False)) == len(section.teacher_layer)


@torch.no_grad()
def take_over(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy the chosen layers of `teacher`, and the other modules named, into `student`. Collective at stage 3.

    Raises:
        ConfigError: names that one of them does not have, or shapes that differ.
    """
    sources = _list_of_layers(teacher, section)
    targets = _list_of_layers(student, section, checks_length=False)
    if len(targets) != len(section.teacher_layer):
        rule = f"names {len(section.teacher_layer)} layers, and the student has {len(targets)}"
        fix = "build the student with as many layers (num_hidden_layers), or leave teacher_model out"
        raise ConfigError(Problem(f"{_PATH}.teacher_layer", list(section.teacher_layer), rule, fix))
    for target, index in zip(targets, section.teacher_layer, strict=True):
        _copy(target, sources[index], f"{section.module_name_prefix}.{index}")
    for name in section.other_module_name:
        _copy(_submodule(student, name), _submodule(teacher, name), name)


def _copy(target: nn.Module, source: nn.Module, name: str) -> None:
    theirs, own = dict(source.named_parameters()), dict(target.named_parameters())
    wrong = [key for key in {**theirs, **own} if key not in theirs or key not in own]
    wrong += [key for key in own if key in theirs and own[key].shape != theirs[key].shape]
    if wrong:
        rule = f"teacher and student differ in {name}: {', '.join(sorted(wrong)[:4])}"
        raise ConfigError(Problem(_PATH, name, rule, "build the student from the teacher's config with fewer layers"))
    with _writing([*own.values()]), _reading([*theirs.values()]):
        for key, parameter in own.items():
            parameter.copy_(theirs[key].to(parameter.device, parameter.dtype))
    for key, buffer in target.named_buffers():
        buffer.copy_(source.get_buffer(key))


@contextmanager
def _writing(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Whole values that stay as they are written, rank 0's on all ranks."""
    handles = [handle for handle in map(of, parameters) if handle is not None]
    unshard(handles)
    yield
    reshard(handles, 0)


@contextmanager
def _reading(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    handles = [handle for handle in map(of, parameters) if handle is not None]
    unshard(handles)
    yield
    reshard(handles)


def _list_of_layers(model: nn.Module, section: LayerReduction, *, checks_length: bool = True) -> nn.ModuleList:
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    prefix = str(section.module_name_prefix)
    found = lists.get(prefix)
    if found is None:
        near = ", ".join(nearest(prefix, list(lists))) or "none"
        rule = "the model has no list of layers of this name"
        raise ConfigError(Problem(f"{_PATH}.module_name_prefix", prefix, rule, f"lists of layers: {near}"))
    if checks_length and section.teacher_layer[-1] >= len(found):
        rule = f"{prefix} has the layers 0 to {len(found) - 1}"
        raise ConfigError(Problem(f"{_PATH}.teacher_layer", list(section.teacher_layer), rule, "name these only"))
    return found


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        near = ", ".join(nearest(name, [other for other, _ in model.named_modules() if other]))
        rule = "there is no module of this name"
        raise ConfigError(Problem(f"{_PATH}.other_module_name", name, rule, f"nearest: {near}")) from None


def _number(layers: nn.ModuleList) -> None:
    """Caches of keys and values are found by the number of a layer."""
    for position, layer in enumerate(layers):
        for module in layer.modules():
            for name in ("layer_idx", "layer_id"):
                if isinstance(vars(module).get(name), int):
                    setattr(module, name, position)


def _follow_in_config(config: Any, before: int, kept: Sequence[int]) -> None:
    """The number of layers, and lists with an entry for each of them."""
    if config is None:
        return
    values = dict(vars(config))
    for name, value in values.items():
        if name in _NUM_LAYERS and value == before:
            setattr(config, name, len(kept))
        elif name == "layer_types" and isinstance(value, list) and len(value) == before:
            setattr(config, name, [value[index] for index in kept])
