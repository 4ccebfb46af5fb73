"""compression_training as a policy, and what is wrong with it that no single field can see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.extras.compression.section import Compression, Distillation, LayerReduction

PruningMethod = Literal["l1", "topk", "snip_momentum"]
ROOT = "compression_training"
EVERYTHING = "*"
BLOCK_PATTERN = re.compile(r"([1-9][0-9]*)([x:])([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One group of a technique: which modules, and what it asks of them.

    Attributes:
        path: of the group in ds.json, for messages.
        related: for each of `modules` the expressions of what is cut with it.
    """

    path: str
    modules: tuple[str, ...]
    related: tuple[tuple[str, ...], ...] = ()
    start_bits: int = 0
    bits: int = 0
    period: int = 1  # updates until one bit less
    dense_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPolicy:
    """Fake quantisation of weights."""

    offset: int  # updates before it begins
    rules: tuple[Rule, ...]
    num_groups: int
    symmetric: bool
    stochastic: bool
    verbose: bool
    change_ratio: float | None  # of a soft transition, per update


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """Fake quantisation of inputs."""

    offset: int
    rules: tuple[Rule, ...]
    symmetric: bool
    dynamic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningPolicy:
    """One pruning technique.

    Attributes:
        blocks: snip_momentum: (rows, columns) that go as one, ...
        n_of_m: ... or N of every M in a row.
        stride, end: snip_momentum: updates between two prunings, and the one with which the ratio is reached.
        excluded: snip_momentum: expressions of what is spared.
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
    """Each technique that is on; of two the section itself."""

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
    """What the config asks for; only for one without problems."""
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
    found = BLOCK_PATTERN.fullmatch(shared.block_pattern)
    assert found is not None, "checked before"
    pair = int(found[1]), int(found[3])
    return PruningPolicy(
        offset=shared.schedule_offset,
        rules=rules or (everything,),
        method=shared.method,
        blocks=pair if found[2] == "x" else None,
        n_of_m=pair if found[2] == ":" else None,
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
