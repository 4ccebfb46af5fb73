"""Builds the dictionaries of DeepSpeed's files at every stage from plain descriptions, without files or ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.classes import DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address
from hf_zero.checkpoint.files.stream import Awaited, Streamed
from hf_zero.checkpoint.files.torch_file import plain
from hf_zero.layout.reshard import GroupPartition

Content = Tensor | Streamed | Awaited
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of training, and the caller's client state."""

    stage: int
    world: int
    global_steps: int
    skipped_steps: int
    global_samples: int
    lr_scheduler: Mapping[str, Any] | None
    config: Mapping[str, Any]
    client_state: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)  # states by feature
    model_size: int = 1


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Content of one model file.

    Attributes:
        module: the state dict; at stage 3 with an empty tensor for every parameter.
        buffer_names: persistent buffers among its keys.
        shared: second names of tied parameters -> first names.
        frozen_shapes, frozen: parameters that are not trained: whole, or this rank's shard at stage 3. None leaves
            them out of the file (`exclude_frozen_parameters`).
        affine_maps: how parameters are split that this file has parts of; see `tensor_parts`.
    """

    module: Mapping[str, Content]
    buffer_names: Sequence[str]
    shared: Mapping[str, str]
    frozen_shapes: Shapes | None
    frozen: Mapping[str, Content] | None
    affine_maps: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupState:
    """This rank's part of one optimizer group (at stage 3: of one sub-group), in DeepSpeed's layout.

    Attributes:
        master: fp32 weights, with or without padding at the end, depending on the stage.
        moments: per-element states by name, padded.
        scalars: step counters and other single values.
    """

    master: Content
    moments: Mapping[str, Content]
    scalars: Mapping[str, Any]


def _torch_states(groups: Iterable[tuple[int, GroupState]]) -> dict[int, dict[str, Any]]:
    """The optimizer's `state` by group; without the groups that have had no step."""
    return {
        number: {**_scalars(group.scalars), **group.moments}
        for number, group in groups
        if group.moments or group.scalars
    }


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """Optimizer data shared by all groups.

    Attributes:
        options: hyperparameters per optimizer group, without `params`.
        scaler: attributes of the loss scaler; empty for a scale of one.
        steps: updates by parameter name, if these differ.
        whole: this rank's states of whole tensors by parameter name; see `whole_states`.
        bound: this rank's states that only fit its own shards.
        others: states under other keys than parameters.
        errors: error feedback of this rank's quantized gradients; see `gradient_errors`.
    """

    options: Sequence[Mapping[str, Any]]
    overflow: bool
    clip_grad: float
    scaler: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bound: Sequence[Mapping[str, Any]] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    errors: Sequence[Mapping[str, Any]] = ()


def model_states(
    run: RunState,
    weights: ModelWeights,
    group_shapes: Sequence[Shapes] | None,
    optimizer: Mapping[str, Any] | None = None,
    ours: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Content of a model file.

    Args:
        group_shapes: trainable parameters in the order of the optimizer files, one dictionary per group (stage 3: per
            sub-group); None without an optimizer.
        optimizer: at stage 0, the whole optimizer state.
        ours: values that only hf_zero reads.
    """
    frozen_shapes = None if weights.frozen is None else _sizes(weights.frozen_shapes or {})
    states: dict[str, Any] = {
        ds.MODULE: OrderedDict(weights.module),
        ds.BUFFER_NAMES: list(weights.buffer_names),
        ds.OPTIMIZER: optimizer,
        ds.PARAM_SHAPES: None if group_shapes is None else [_sizes(shapes) for shapes in group_shapes],
        ds.FROZEN_PARAM_SHAPES: frozen_shapes,
        ds.SHARED_PARAMS: dict(weights.shared),
        ds.FROZEN_PARAM_FRAGMENTS: None if weights.frozen is None else OrderedDict(weights.frozen),
        ds.LR_SCHEDULER: plain(run.lr_scheduler),
        **_features(run.features),
        ds.SKIPPED_STEPS: run.skipped_steps,
        ds.GLOBAL_STEPS: run.global_steps,
        ds.GLOBAL_SAMPLES: run.global_samples,
        ds.DP_WORLD_SIZE: run.world,
        ds.MP_WORLD_SIZE: run.model_size,
        ds.PARALLEL_DIMENSIONS: {ds.PP_DEGREE: 1, ds.TP_DEGREE: run.model_size},
        ds.DS_CONFIG: plain(run.config),
        ds.DS_VERSION: ds.FORMAT_VERSION,
        ds.UNIVERSAL_INFO: {ds.UNIVERSAL_VERSION_KEY: ds.UNIVERSAL_VERSION, **weights.affine_maps},
    }
    # The client state may contain keys of an earlier checkpoint, which describe other files.
    client_state = {key: value for key, value in run.client_state.items() if key not in states}
    return {**states, **plain(client_state), **({ds.HF_ZERO: dict(ours)} if ours else {})}


def _features(states: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's two entries, and one additional entry for all other features, if any."""
    entries = {key: plain(states.get(key)) for key in (ds.DATA_SAMPLER, ds.RANDOM_LTD)}
    others = {name: plain(state) for name, state in states.items() if name not in entries}
    return {**entries, ds.TRAINING_FEATURES: others} if others else entries


def optimizer_states_1_2(
    run: RunState,
    rank: int,
    part: OptimizerPart,
    names: Sequence[str],
    layouts: Sequence[GroupPartition],
    groups: Sequence[GroupState],
) -> dict[str, Any]:
    """Content of `rank`'s optimizer file at stages 1 and 2. Masters come without padding, moments with it.

    Args:
        names: of the parameters, by the numbers that the layouts use.
    """
    inner = {
        ds.LOSS_SCALER: loss_scaler(part.scaler),
        ds.DYNAMIC_LOSS_SCALE: bool(part.scaler.get("dynamic")),
        ds.OVERFLOW: part.overflow,
        ds.CLIP_GRAD: part.clip_grad,
        ds.BASE_OPTIMIZER_STATE: {
            ds.STATE: _torch_states(enumerate(groups)),
            ds.PARAM_GROUPS: [{**plain(options), ds.PARAMS: [g]} for g, options in enumerate(part.options)],
        },
        ds.FP32_PARTITIONS: [group.master for group in groups],
        ds.ZERO_STAGE: ZeroStageEnum(run.stage),
        ds.GROUP_PADDINGS: [layout.padding(rank) for layout in layouts],
        ds.ALIGNMENT_PADDINGS: [[0] * len(layout.members) for layout in layouts],
        ds.PARTITION_COUNT: [run.world] * len(layouts),
        ds.DS_VERSION: ds.FORMAT_VERSION,
        ds.SLICE_MAPPINGS: [
            OrderedDict((names[e.parameter], fragment_address(e.numel, e.offset)) for e in layout.extents(rank, 0))
            for layout in layouts
        ],
    }
    return _file(run, part, inner)


def optimizer_states_3(
    run: RunState, part: OptimizerPart, sub_groups: Sequence[Sequence[int]], groups: Sequence[GroupState]
) -> dict[str, Any]:
    """Content of one rank's optimizer file at stage 3.

    Args:
        sub_groups: the numbers of its sub-groups, per optimizer group.
        groups: per sub-group; masters and moments include the padding of every parameter.
    """
    inner = {
        ds.ZERO_STAGE: ZeroStageEnum(3),
        ds.LOSS_SCALER: loss_scaler(part.scaler),
        ds.DYNAMIC_LOSS_SCALE: bool(part.scaler.get("dynamic")),
        ds.OVERFLOW: part.overflow,
        ds.PARTITION_COUNT: run.world,
        ds.OPTIMIZER_STATE_DICT: {
            ds.STATE: _torch_states(enumerate(groups)),
            ds.PARAM_GROUPS: [
                {**plain(options), ds.PARAMS: list(numbers)}
                for options, numbers in zip(part.options, sub_groups, strict=True)
            ],
        },
        ds.FP32_FLAT_GROUPS: [group.master for group in groups],
    }
    return _file(run, part, inner)


def optimizer_states_0(
    part: OptimizerPart, groups: Sequence[Shapes], states: Mapping[str, GroupState], *, has_masters: bool
) -> dict[str, Any]:
    """The `optimizer` entry of stage 0's model file: one entry per parameter.

    Args:
        states: by parameter name, whole; masters in the parameter's shape.
        has_masters: whether 16-bit weights have separate fp32 masters.
    """
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    torch_form = {
        ds.STATE: _torch_states((number, states[name]) for name, number in numbers.items()),
        ds.PARAM_GROUPS: [
            {**plain(options), ds.PARAMS: [numbers[name] for name in group]}
            for options, group in zip(part.options, groups, strict=True)
        ],
    }
    if not has_masters:
        return torch_form
    entries = {
        ds.DYNAMIC_LOSS_SCALE: bool(part.scaler.get("dynamic")),
        "cur_scale": float(part.scaler.get("cur_scale", 1.0)),
        "cur_iter": 0,
    }
    for key in ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis"):
        if key in part.scaler:
            entries[key] = part.scaler[key]
    masters = [[states[name].master for name in group] for group in groups]
    return {**entries, ds.OPTIMIZER_STATE_DICT: torch_form, ds.FP32_GROUPS: masters, ds.CLIP_GRAD: part.clip_grad}


def loss_scaler(attributes: Mapping[str, Any]) -> LossScaler | DynamicLossScaler:
    """The object in DeepSpeed's files for a loss scaler with these attributes."""
    if not attributes.get("dynamic"):
        return LossScaler(float(attributes.get("cur_scale", 1.0)))
    return DynamicLossScaler(**attributes)


def _file(run: RunState, part: OptimizerPart, inner: dict[str, Any]) -> dict[str, Any]:
    stated = {ds.OPTIMIZER_STATE_DICT: inner, ds.DS_CONFIG: plain(run.config), ds.DS_VERSION: ds.FORMAT_VERSION}
    return {**stated, ds.HF_ZERO: ours(part)}


def ours(part: OptimizerPart) -> dict[str, Any]:
    """Keys that only hf_zero reads: that the file has a manifest, and values without a key in DeepSpeed."""
    extras = {ds.STEPS: dict(part.steps), ds.WHOLE_STATES: dict(part.whole), ds.SHARD_STATES: list(part.bound)}
    extras[ds.OTHER_STATES] = dict(part.others)
    extras[ds.GRADIENT_ERRORS] = list(part.errors)
    return {ds.MANIFEST_KEY: True, **{key: value for key, value in extras.items() if value}}


def _sizes(shapes: Shapes) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())


def _scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Step counters first, as ints unless they are tensors, which torch's own optimizers require."""
    values = {key: plain(value) for key, value in scalars.items()}
    if ds.STEP in values:
        step = values.pop(ds.STEP)
        values = {ds.STEP: step if isinstance(step, Tensor) else int(step), **values}
    return values
