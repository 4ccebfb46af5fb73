"""The section compression_training: one section per technique, each with shared parameters and groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hf_zero.config.schema.fields import (
    Count,
    Flag,
    Names,
    NonNegative,
    PathText,
    Positive,
    PositiveNumber,
    Section,
    as_lower,
    as_number,
    as_whole,
    detail,
    ignored,
    supported,
)


def _as_lists(value: object) -> object:
    """Accept null, [] and a list of lists of names; a single name counts as a list of one."""
    if value is None:
        return []
    return [[entry] if isinstance(entry, str) else entry for entry in value] if isinstance(value, list) else value


Bits = Annotated[int, BeforeValidator(as_whole), Field(ge=1, le=16)]
Ratio = Annotated[float, BeforeValidator(as_number), Field(gt=0, le=1)]
Related = Annotated[list[list[str]], BeforeValidator(_as_lists)]
Kind = Annotated[Literal["symmetric", "asymmetric"], BeforeValidator(as_lower)]
Rounding = Annotated[Literal["nearest", "stochastic"], BeforeValidator(as_lower)]
Range = Annotated[Literal["dynamic", "static"], BeforeValidator(as_lower)]
Method = Annotated[Literal["l1", "topk"], BeforeValidator(as_lower)]
SparseMethod = Annotated[Literal["l1", "topk", "snip_momentum"], BeforeValidator(as_lower)]

_MODULES = 'Regular expressions, searched for in module names; "*": all modules that the technique supports.'
_RELATED = "For each of `modules`, expressions of modules that lose the same rows, heads or channels on cleaning."
_OFFSET = "Updates before the technique begins."
_ON = "Enables the technique."
_SHARED = "Settings common to all groups."
_GROUPS = "Groups with arbitrary names, each with params and modules."
_RATIO = "Fraction that is kept."


class _Group(Section):
    modules: Names = supported(["*"], _MODULES)
    related_modules: Related = supported([], _RELATED)


class WeightParams(Section):
    """How one group's weights are quantized."""

    start_bits: Bits | None = supported(None, "Bits at the beginning; unset: target_bits.", unit="bits")
    target_bits: Bits | None = supported(None, "Bits in the end; required.", unit="bits")
    quantization_period: Count = supported(
        1, "Updates until bits decrease by one; each further bit takes twice as long. 0: all at once.", unit="updates"
    )


class WeightGroup(_Group):
    """A group of modules whose weights are quantized alike."""

    params: WeightParams = detail(WeightParams(), "Bits and schedule.")


class MixedQuantize(Section):
    """A gradual transition from exact to quantized weights."""

    enabled: Flag = supported(False, "Weights are (1 - r) * quantized + r * exact, r falling from 1 to 0.")
    quantize_change_ratio: PositiveNumber = supported(0.001, "Decrease of r per update.")


class WeightShared(Section):
    """Settings common to all groups of weight quantization."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(0, _OFFSET, unit="updates")
    quantize_groups: Positive = supported(1, "Number of equal groups per weight, each with its own scale.")
    quantization_type: Kind = supported("symmetric", "symmetric or asymmetric (3 bits or more).")
    rounding: Rounding = supported("nearest", "nearest or stochastic (3 bits or more).")
    quantize_verbose: Flag = supported(False, "Log every change of bits.")
    fp16_mixed_quantize: MixedQuantize = supported(MixedQuantize(), "A gradual transition, with any precision.")
    quantize_weight_in_forward: Flag = ignored(
        False,
        "Quantize in forward, or the stored low-precision weights after each update.",
        why="forward sees quantized weights and masters stay exact either way",
        met=True,
    )
    quantizer_kernel: Flag = ignored(False, "Use a GPU kernel.", why="results are the same", met=True)


class WeightQuantization(Section):
    """Forward uses weights rounded to few bits; gradients pass straight through."""

    shared_parameters: WeightShared = detail(WeightShared(), _SHARED)
    different_groups: dict[str, WeightGroup] = supported({}, _GROUPS)


class ActivationParams(Section):
    """How one group's inputs are quantized."""

    bits: Bits | None = supported(None, "Bits, at least 3; required.", unit="bits")


class ActivationGroup(_Group):
    """A group of modules whose inputs are quantized alike."""

    params: ActivationParams = detail(ActivationParams(), "Bits.")


class ActivationShared(Section):
    """Settings common to all groups of activation quantization."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    quantization_type: Kind = supported("symmetric", "symmetric or asymmetric.")
    range_calibration: Range = supported(
        "dynamic", "dynamic: a range for each token (image); static: a running range, 0.95 old + 0.05 new per update."
    )


class ActivationQuantization(Section):
    """Inputs of modules are rounded to few bits; gradients pass straight through."""

    shared_parameters: ActivationShared = detail(ActivationShared(), _SHARED)
    different_groups: dict[str, ActivationGroup] = supported({}, _GROUPS)


class PruningParams(Section):
    """The fraction of a group's modules that is kept."""

    dense_ratio: Ratio | None = supported(None, f"{_RATIO} Required.")


class PruningGroup(_Group):
    """A group of modules that are pruned alike."""

    params: PruningParams = detail(PruningParams(), "The ratio.")


class SparseShared(Section):
    """Settings common to all groups of sparse pruning."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    method: SparseMethod = supported(
        "l1", "l1: by magnitude when it begins; topk: by trained scores; snip_momentum: |weight * gradient|."
    )
    block_pattern: str = supported(
        "4x1", 'snip_momentum: prune blocks "NxM" (rows x columns), or "N:M", N of every M values in a row.'
    )
    dense_ratio: Ratio = supported(0.1, f"snip_momentum without groups: {_RATIO.lower()}")
    schedule_offset_stride: Positive = supported(1, "snip_momentum: updates between two prunings.", unit="updates")
    schedule_offset_end: Count | None = supported(
        None, "snip_momentum: the update at which the ratio is reached; unset: schedule_offset.", unit="updates"
    )
    excluded_modules: Names = supported([], "snip_momentum: expressions of modules not to prune.")


class SparsePruning(Section):
    """Sets single weights to zero."""

    shared_parameters: SparseShared = detail(SparseShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class PruningShared(Section):
    """Settings common to all groups of a pruning technique."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    method: Method = supported("l1", "l1: by magnitude when it begins; topk: by trained scores.")


class HeadShared(Section):
    """Settings common to all groups of head pruning."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    method: Method = supported("topk", "topk: by trained scores; l1: by magnitude when it begins.")
    num_heads: Positive | None = supported(
        None, "Heads per layer, required; with grouped queries the number of key-value heads."
    )


class RowPruning(Section):
    """Sets whole outputs of linear layers to zero."""

    shared_parameters: PruningShared = detail(PruningShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class ChannelPruning(RowPruning):
    """Sets whole filters of convolutions to zero."""


class HeadPruning(Section):
    """Sets whole attention heads to zero: `modules` are the output projections."""

    shared_parameters: HeadShared = detail(HeadShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class LayerReduction(Section):
    """A student with some of the model's layers."""

    enabled: Flag = supported(False, _ON)
    keep_number_layer: Positive | None = supported(None, "Layers of the student; unset: length of teacher_layer.")
    module_name_prefix: str | None = supported(None, "The list of layers, such as bert.encoder.layer.")
    teacher_layer: list[Count] = supported([], "Indices of the teacher's layers that the student keeps, ascending.")
    other_module_name: Names = supported([], "Other modules that a separate student copies from the teacher.")


class Compression(Section):
    """Smaller models: fewer bits, fewer weights, fewer layers."""

    layer_reduction: LayerReduction | None = detail(None, "Fewer layers.")
    weight_quantization: WeightQuantization | None = detail(None, "Fewer bits per weight.")
    activation_quantization: ActivationQuantization | None = detail(None, "Fewer bits per activation.")
    sparse_pruning: SparsePruning | None = detail(None, "Zeros among the weights.")
    row_pruning: RowPruning | None = detail(None, "Narrower linear layers.")
    head_pruning: HeadPruning | None = detail(None, "Fewer attention heads.")
    channel_pruning: ChannelPruning | None = detail(None, "Fewer channels of convolutions.")


class Distillation(Section):
    """A loss that also pulls the model towards a teacher; in DeepSpeed, scripts implement this themselves."""

    enabled: Flag = supported(True, "false: the section has no effect.")
    teacher: PathText | None = supported(None, "Folder of the teacher; unset: the model before compression.")
    temperature: PositiveNumber = supported(1.0, "Divides logits before softmax.")
    label_weight: NonNegative = supported(1.0, "Factor of the model's own loss.")
    logit_weight: NonNegative = supported(1.0, "Factor of the cross entropy between teacher and model.")
    hidden_weight: NonNegative = supported(0.0, "Factor of the squared error of hidden states, summed over layers.")
    attention_weight: NonNegative = supported(
        0.0, "Factor of the squared error of attention maps; needs attn_implementation eager."
    )


TECHNIQUES: dict[str, Any] = {
    "weight_quantization": WeightQuantization,
    "activation_quantization": ActivationQuantization,
    "sparse_pruning": SparsePruning,
    "row_pruning": RowPruning,
    "head_pruning": HeadPruning,
    "channel_pruning": ChannelPruning,
}


# The policy that follows from compression_training.


PruningMethod = Literal["l1", "topk", "snip_momentum"]
ROOT = "compression_training"
EVERYTHING = "*"
BLOCK_PATTERN = re.compile(r"([1-9][0-9]*)([x:])([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One group of a technique: its modules and parameters.

    Attributes:
        path: path of the group in ds.json, for messages.
        related: for each of `modules`, expressions of the related modules that are cut with it.
    """

    path: str
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...] = ()
    start_bits: int = 0
    bits: int = 0
    period: int = 1  # updates until bits decrease by one
    dense_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPolicy:
    """Fake quantization of weights."""

    offset: int  # updates before the technique begins
    rules: tuple[Rule, ...]
    num_groups: int
    symmetric: bool
    stochastic: bool
    verbose: bool
    change_ratio: float | None  # of a gradual transition, per update


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """Fake quantization of inputs."""

    offset: int
    rules: tuple[Rule, ...]
    symmetric: bool
    dynamic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningPolicy:
    """One pruning technique.

    Attributes:
        blocks: snip_momentum: (rows, columns) of the pruned blocks, ...
        n_of_m: ... or N of every M values in a row.
        stride, end: snip_momentum: updates between two prunings, and the update at which the ratio is reached.
        excluded: snip_momentum: expressions of modules not to prune.
    """

    offset: int
    rules: tuple[Rule, ...]
    method: PruningMethod
    num_heads: int = 0
    blocks: tuple[int, int] | None = None
    n_of_m: tuple[int, int] | None = None
    stride: int = 1
    end: int = 0
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPolicy:
    """The policies of all enabled techniques; `layers` and `distillation` are config sections."""

    weights: WeightPolicy | None = None
    activations: ActivationPolicy | None = None
    sparse: PruningPolicy | None = None
    rows: PruningPolicy | None = None
    heads: PruningPolicy | None = None
    channels: PruningPolicy | None = None
    layers: LayerReduction | None = None
    distillation: Distillation | None = None

    @property
    def is_on(self) -> bool:
        return self != CompressionPolicy()


def compression_policy(config: Any) -> CompressionPolicy:
    """The policy of a config, which must have no problems."""
    section = config.compression_training or Compression()
    layers, own = section.layer_reduction, config.hf_zero.distillation if config.hf_zero is not None else None
    return CompressionPolicy(
        weights=_weights(section),
        activations=_activations(section),
        sparse=_pruning(section, "sparse_pruning"),
        rows=_pruning(section, "row_pruning"),
        heads=_pruning(section, "head_pruning"),
        channels=_pruning(section, "channel_pruning"),
        layers=layers if layers is not None and layers.enabled else None,
        distillation=own if own is not None and own.enabled else None,
    )


def _weights(section: Compression) -> WeightPolicy | None:
    technique = section.weight_quantization
    if technique is None or not technique.shared_parameters.enabled:
        return None
    shared = technique.shared_parameters
    mixed = shared.fp16_mixed_quantize
    return WeightPolicy(
        offset=shared.schedule_offset,
        rules=_rules("weight_quantization", technique.different_groups),
        num_groups=shared.quantize_groups,
        symmetric=shared.quantization_type == "symmetric",
        stochastic=shared.rounding == "stochastic",
        verbose=shared.quantize_verbose,
        change_ratio=mixed.quantize_change_ratio if mixed.enabled else None,
    )


def _activations(section: Compression) -> ActivationPolicy | None:
    technique = section.activation_quantization
    if technique is None or not technique.shared_parameters.enabled:
        return None
    shared = technique.shared_parameters
    return ActivationPolicy(
        offset=shared.schedule_offset,
        rules=_rules("activation_quantization", technique.different_groups),
        symmetric=shared.quantization_type == "symmetric",
        dynamic=shared.range_calibration == "dynamic",
    )


def _pruning(section: Compression, name: str) -> PruningPolicy | None:
    technique = getattr(section, name)
    if technique is None or not technique.shared_parameters.enabled:
        return None
    shared = technique.shared_parameters
    rules = _rules(name, technique.different_groups)
    if shared.method != "snip_momentum":
        num_heads = getattr(shared, "num_heads", None) or 0
        return PruningPolicy(offset=shared.schedule_offset, rules=rules, method=shared.method, num_heads=num_heads)
    everything = Rule(path=f"{ROOT}.{name}", modules=(EVERYTHING,), dense_ratio=shared.dense_ratio)
    match = BLOCK_PATTERN.fullmatch(shared.block_pattern)
    assert match is not None, "checked before"
    pair = int(match[1]), int(match[3])
    return PruningPolicy(
        offset=shared.schedule_offset,
        rules=rules or (everything,),
        method=shared.method,
        blocks=pair if match[2] == "x" else None,
        n_of_m=pair if match[2] == ":" else None,
        stride=shared.schedule_offset_stride,
        end=shared.schedule_offset if shared.schedule_offset_end is None else shared.schedule_offset_end,
        excluded=tuple(shared.excluded_modules),
    )


def _rules(technique: str, groups: Mapping[str, Any]) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            path=f"{ROOT}.{technique}.different_groups.{name}",
            modules=tuple(group.modules),
            related=tuple(map(tuple, group.related_modules)),
            **_numbers(group.params),
        )
        for name, group in groups.items()
    )


def _numbers(params: Any) -> dict[str, Any]:
    if hasattr(params, "target_bits"):
        start = params.target_bits if params.start_bits is None else params.start_bits
        return {"start_bits": start, "bits": params.target_bits, "period": params.quantization_period}
    return {"bits": params.bits} if hasattr(params, "bits") else {"dense_ratio": params.dense_ratio}
