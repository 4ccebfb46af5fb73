"""The section compression_training: one section per technique, each with what all its groups share, and its groups."""

from __future__ import annotations

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
    as_number,
    as_whole,
    detail,
    ignored,
    supported,
)


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _as_lists(value: object) -> object:
    """null, [], and a list of lists of names; a name in place of a list counts as a list of one."""
    if value is None:
        return []
    return [[entry] if isinstance(entry, str) else entry for entry in value] if isinstance(value, list) else value


Bits = Annotated[int, BeforeValidator(as_whole), Field(ge=1, le=16)]
Ratio = Annotated[float, BeforeValidator(as_number), Field(gt=0, le=1)]
Related = Annotated[list[list[str]], BeforeValidator(_as_lists)]
Kind = Annotated[Literal["symmetric", "asymmetric"], BeforeValidator(_lowered)]
Rounding = Annotated[Literal["nearest", "stochastic"], BeforeValidator(_lowered)]
Range = Annotated[Literal["dynamic", "static"], BeforeValidator(_lowered)]
Method = Annotated[Literal["l1", "topk"], BeforeValidator(_lowered)]
SparseMethod = Annotated[Literal["l1", "topk", "snip_momentum"], BeforeValidator(_lowered)]

_MODULES = 'Regular expressions, searched for in the names of modules; "*": all that the technique can do.'
_RELATED = "For each of `modules`, expressions of what loses the same rows, heads or channels on cleaning."
_OFFSET = "Updates before it begins."
_ON = "Switches the technique on."
_SHARED = "What all groups have in common."
_GROUPS = "Groups by any name, each with params and modules."
_RATIO = "Share that is kept."


class _Group(Section):
    modules: Names = supported(["*"], _MODULES)
    related_modules: Related = supported([], _RELATED)


class WeightParams(Section):
    """How one group's weights are quantised."""

    start_bits: Bits | None = supported(None, "Bits at the beginning; unset: target_bits.", unit="bits")
    target_bits: Bits | None = supported(None, "Bits in the end; required.", unit="bits")
    quantization_period: Count = supported(
        1, "Updates until one bit less; each further bit takes twice as long. 0: all at once.", unit="updates"
    )


class WeightGroup(_Group):
    """A group of modules whose weights are quantised alike."""

    params: WeightParams = detail(WeightParams(), "How.")


class MixedQuantize(Section):
    """Weights that go over to their quantised values little by little."""

    enabled: Flag = supported(False, "Weights are (1 - r) * quantised + r * exact, r falling from 1 to 0.")
    quantize_change_ratio: PositiveNumber = supported(0.001, "How much r falls with each update.")


class WeightShared(Section):
    """What all groups of weight quantisation have in common."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(0, _OFFSET, unit="updates")
    quantize_groups: Positive = supported(1, "Groups of equal size per weight, each with a scale of its own.")
    quantization_type: Kind = supported("symmetric", "symmetric or asymmetric (3 bits or more).")
    rounding: Rounding = supported("nearest", "nearest or stochastic (3 bits or more).")
    quantize_verbose: Flag = supported(False, "A line in the log for every change of bits.")
    fp16_mixed_quantize: MixedQuantize = supported(MixedQuantize(), "A soft transition, at any precision.")
    quantize_weight_in_forward: Flag = ignored(
        False,
        "Quantise in forward, or the stored low-precision weights after each update.",
        why="forward sees quantised weights and masters stay exact either way",
        met=True,
    )
    quantizer_kernel: Flag = ignored(False, "Use a kernel of the GPU.", why="results are the same", met=True)


class WeightQuantization(Section):
    """Weights that forward sees rounded to few bits; gradients pass straight through."""

    shared_parameters: WeightShared = detail(WeightShared(), _SHARED)
    different_groups: dict[str, WeightGroup] = supported({}, _GROUPS)


class ActivationParams(Section):
    """How one group's inputs are quantised."""

    bits: Bits | None = supported(None, "Bits, at least 3; required.", unit="bits")


class ActivationGroup(_Group):
    """A group of modules whose inputs are quantised alike."""

    params: ActivationParams = detail(ActivationParams(), "How.")


class ActivationShared(Section):
    """What all groups of activation quantisation have in common."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    quantization_type: Kind = supported("symmetric", "symmetric or asymmetric.")
    range_calibration: Range = supported(
        "dynamic", "dynamic: a range for each token (image); static: a running range, 0.95 old + 0.05 new per update."
    )


class ActivationQuantization(Section):
    """Inputs of modules rounded to few bits; gradients pass straight through."""

    shared_parameters: ActivationShared = detail(ActivationShared(), _SHARED)
    different_groups: dict[str, ActivationGroup] = supported({}, _GROUPS)


class PruningParams(Section):
    """How much of a group's modules is kept."""

    dense_ratio: Ratio | None = supported(None, f"{_RATIO} Required.")


class PruningGroup(_Group):
    """A group of modules that are pruned alike."""

    params: PruningParams = detail(PruningParams(), "How much.")


class SparseShared(Section):
    """What all groups of sparse pruning have in common."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    method: SparseMethod = supported(
        "l1", "l1: by magnitude when it begins; topk: by scores that are trained; snip_momentum: |weight * gradient|."
    )
    block_pattern: str = supported(
        "4x1", 'snip_momentum: blocks "NxM" (rows x columns) that go as one, or "N:M", N of every M in a row go.'
    )
    dense_ratio: Ratio = supported(0.1, f"snip_momentum without groups: {_RATIO.lower()}")
    schedule_offset_stride: Positive = supported(1, "snip_momentum: updates between two prunings.", unit="updates")
    schedule_offset_end: Count | None = supported(
        None, "snip_momentum: the update with which the ratio is reached; unset: schedule_offset.", unit="updates"
    )
    excluded_modules: Names = supported([], "snip_momentum: expressions of modules that are spared.")


class SparsePruning(Section):
    """Single weights become zero."""

    shared_parameters: SparseShared = detail(SparseShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class PruningShared(Section):
    """What all groups of a pruning technique have in common."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    method: Method = supported("l1", "l1: by magnitude when it begins; topk: by scores that are trained.")


class HeadShared(Section):
    """What all groups of head pruning have in common."""

    enabled: Flag = supported(False, _ON)
    schedule_offset: Count = supported(1000, _OFFSET, unit="updates")
    method: Method = supported("topk", "topk: by scores that are trained; l1: by magnitude when it begins.")
    num_heads: Positive | None = supported(
        None, "Heads per layer, required; with grouped queries the number of key-value heads."
    )


class RowPruning(Section):
    """Whole outputs of linear layers become zero."""

    shared_parameters: PruningShared = detail(PruningShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class ChannelPruning(Section):
    """Whole filters of convolutions become zero."""

    shared_parameters: PruningShared = detail(PruningShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class HeadPruning(Section):
    """Whole attention heads become zero: `modules` are the output projections."""

    shared_parameters: HeadShared = detail(HeadShared(), _SHARED)
    different_groups: dict[str, PruningGroup] = supported({}, _GROUPS)


class LayerReduction(Section):
    """A student of some of the model's layers."""

    enabled: Flag = supported(False, _ON)
    keep_number_layer: Positive | None = supported(None, "Layers of the student; unset: as many as teacher_layer says.")
    module_name_prefix: str | None = supported(None, "The list of layers, such as bert.encoder.layer.")
    teacher_layer: list[Count] = supported([], "The teacher's layers that the student is made of, ascending.")
    other_module_name: Names = supported([], "Modules that a student of its own takes over from the teacher, too.")


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
    """A loss that also pulls the model towards a teacher: our own; in DeepSpeed it is the script's."""

    enabled: Flag = supported(True, "Without it the section asks for nothing.")
    teacher: PathText | None = supported(None, "Folder of the teacher; unset: the model as it was before compression.")
    temperature: PositiveNumber = supported(1.0, "Divides logits before softmax.")
    label_weight: NonNegative = supported(1.0, "Factor of the model's own loss.")
    logit_weight: NonNegative = supported(1.0, "Factor of the cross entropy of the teacher's answers and the model's.")
    hidden_weight: NonNegative = supported(0.0, "Factor of the squared error of hidden states, summed over layers.")
    attention_weight: NonNegative = supported(
        0.0, "Factor of the same of attention maps; needs attn_implementation eager."
    )


TECHNIQUES: dict[str, Any] = {
    "weight_quantization": WeightQuantization,
    "activation_quantization": ActivationQuantization,
    "sparse_pruning": SparsePruning,
    "row_pruning": RowPruning,
    "head_pruning": HeadPruning,
    "channel_pruning": ChannelPruning,
}
