"""The section compression_training: one section per technique, each with shared parameters and groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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

    @property
    def change_ratio(self) -> float | None:
        """Decrease of r per update; None without a gradual transition."""
        mixed = self.fp16_mixed_quantize
        return mixed.quantize_change_ratio if mixed.enabled else None


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

    @property
    def end(self) -> int:
        """snip_momentum: the update at which the ratio is reached."""
        return self.schedule_offset if self.schedule_offset_end is None else self.schedule_offset_end


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


# The policy that follows from compression_training.


ROOT = "compression_training"
EVERYTHING = "*"
BLOCK_PATTERN = re.compile(r"([1-9][0-9]*)([x:])([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueGroup:
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


@dataclass(frozen=True, slots=True)
class Technique:
    """An enabled technique: its shared parameters, and the rules of its groups."""

    shared: Any
    rules: tuple[TechniqueGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPolicy:
    """What a config enables; `techniques` are by their keys."""

    techniques: Mapping[str, Technique] = field(default_factory=dict)
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
        techniques={
            name: Technique(technique.shared_parameters, _rules(name, technique))
            for name, technique in enabled_techniques(section)
        },
        layers=layers if layers is not None and layers.enabled else None,
        distillation=own if own is not None and own.enabled else None,
    )


def enabled_techniques(section: Compression) -> Iterator[tuple[str, Any]]:
    """Key and section of each enabled technique, in the order in which they act."""
    for name, technique in section:
        if technique is not None and name != "layer_reduction" and technique.shared_parameters.enabled:
            yield name, technique


def _rules(name: str, technique: Any) -> tuple[TechniqueGroup, ...]:
    rules = tuple(
        TechniqueGroup(
            path=f"{ROOT}.{name}.different_groups.{group_name}",
            modules=tuple(group.modules),
            related=tuple(map(tuple, group.related_modules)),
            **_numbers(group.params),
        )
        for group_name, group in technique.different_groups.items()
    )
    if rules:
        return rules
    # Only snip_momentum may have no groups.
    return (
        TechniqueGroup(
            path=f"{ROOT}.{name}", modules=(EVERYTHING,), dense_ratio=technique.shared_parameters.dense_ratio
        ),
    )


def _numbers(params: Any) -> dict[str, Any]:
    if hasattr(params, "target_bits"):
        start = params.target_bits if params.start_bits is None else params.start_bits
        return {"start_bits": start, "bits": params.target_bits, "period": params.quantization_period}
    return {"bits": params.bits} if hasattr(params, "bits") else {"dense_ratio": params.dense_ratio}
