"""Rules between the keys of compression_training and hf_zero.distillation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hf_zero.config.errors import Edit, Finding, Problem, Remark
from hf_zero.config.rules import Ranks, Several
from hf_zero.extras.compression.section import (
    BLOCK_PATTERN,
    EVERYTHING,
    ROOT,
    Compression,
    CompressionPolicy,
    LayerReduction,
    compression_policy,
    enabled_techniques,
)

_SNIP_ONLY = ("block_pattern", "dense_ratio", "schedule_offset_stride", "schedule_offset_end", "excluded_modules")


def policy_of(config: Any) -> CompressionPolicy | None:
    policy = compression_policy(config)
    return policy if policy.is_on else None


def _findings(config: Any, ranks: Ranks) -> Iterator[Finding]:
    """Check both sections."""
    yield from _problems(config)
    yield from _advice(config)


RULES = (Several(every=_findings),)


def _problems(config: Any) -> Iterator[Problem]:
    """Check all enabled techniques."""
    section = config.compression_training or Compression()
    for name, technique in enabled_techniques(section):
        yield from _technique_problems(f"{ROOT}.{name}", name, technique)
    yield from _layer_problems(section.layer_reduction or LayerReduction())
    own = config.hf_zero
    if own is not None and own.tiled_loss and own.distillation is not None:
        rule = "distillation compares the logits of student and teacher, which tiled_loss never computes in full"
        edit = Edit.at("hf_zero.tiled_loss", False)
        yield Problem("hf_zero.tiled_loss, hf_zero.distillation", True, rule, "set tiled_loss to false", edit=edit)


def _advice(config: Any) -> Iterator[Remark]:
    """Warn of keys for snip_momentum that are set with another method."""
    technique = (config.compression_training or Compression()).sparse_pruning
    if technique is None or not technique.shared_parameters.enabled:
        return
    shared = technique.shared_parameters
    for key in _SNIP_ONLY if shared.method != "snip_momentum" else ():
        if key in shared.model_fields_set:
            path = (ROOT, "sparse_pruning", "shared_parameters", key)
            text = f'no effect with method "{shared.method}" (used with snip_momentum)'
            yield Remark(".".join(path), text, getattr(shared, key), ignored=True, edit=Edit(path))


def _technique_problems(path: str, name: str, technique: Any) -> Iterator[Problem]:
    shared, groups = technique.shared_parameters, technique.different_groups
    takes_all = getattr(shared, "method", "") == "snip_momentum"
    if not groups and not takes_all:
        rule = "the technique is enabled but has no groups, so that no module is compressed"
        fix = 'give "different_groups": {"all": {"params": {...}, "modules": ["*"]}}, or set enabled to false'
        yield Problem(f"{path}.different_groups", None, rule, fix)
    if takes_all:
        yield from _snip_problems(f"{path}.shared_parameters", shared)
    if name == "head_pruning" and shared.num_heads is None:
        rule = "head pruning needs the number of heads in a layer"
        yield Problem(f"{path}.shared_parameters.num_heads", None, rule, "set it to the model's num_attention_heads")
    for group_name, group in groups.items():
        where = f"{path}.different_groups.{group_name}"
        yield from _group_problems(where, group)
        yield from _number_problems(f"{where}.params", name, group.params, shared)


def _snip_problems(path: str, shared: Any) -> Iterator[Problem]:
    match = BLOCK_PATTERN.fullmatch(shared.block_pattern)
    if match is None or (match[2] == ":" and int(match[1]) >= int(match[3])):
        rule = 'must be "NxM", such as "4x1", or "N:M" with N below M, such as "2:4"'
        yield Problem(f"{path}.block_pattern", shared.block_pattern, rule, 'correct it, or remove the key ("4x1")')
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        rule = f"must not be before schedule_offset, which is {shared.schedule_offset}"
        yield Problem(f"{path}.schedule_offset_end", end, rule, "raise it, or lower schedule_offset")
    for pattern in shared.excluded_modules:
        yield from _pattern_problem(f"{path}.excluded_modules", pattern)


def _group_problems(path: str, group: Any) -> Iterator[Problem]:
    if not group.modules:
        yield Problem(f"{path}.modules", [], "names no module", 'list expressions of modules, or remove the key ("*")')
    for pattern in group.modules:
        yield from _pattern_problem(f"{path}.modules", pattern)
    for pattern in (pattern for patterns in group.related_modules for pattern in patterns):
        yield from _pattern_problem(f"{path}.related_modules", pattern)
    if group.related_modules and len(group.related_modules) != len(group.modules):
        rule = f"needs one list for each of modules ({len(group.modules)})"
        shown = len(group.related_modules)
        yield Problem(f"{path}.related_modules", f"{shown} lists", rule, "write [[...], ...] in the order of modules")


def _pattern_problem(path: str, pattern: str) -> Iterator[Problem]:
    if pattern == EVERYTHING:
        return
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        rule = f"is not a valid regular expression: {error}"
        yield Problem(path, pattern, rule, 'escape it, for example "layer\\\\.0", or write "*" for all modules')


def _number_problems(path: str, name: str, params: Any, shared: Any) -> Iterator[Problem]:
    if name == "weight_quantization":
        yield from _weight_problems(path, params, shared)
    elif name == "activation_quantization":
        if params.bits is None or params.bits < 3:
            yield Problem(f"{path}.bits", params.bits, "must be a whole number from 3 to 16", "8 is usual")
    elif params.dense_ratio is None:
        yield Problem(f"{path}.dense_ratio", None, "each group needs the fraction to keep", "0.5 keeps half")


def _weight_problems(path: str, params: Any, shared: Any) -> Iterator[Problem]:
    target, start = params.target_bits, params.start_bits
    if target is None:
        yield Problem(f"{path}.target_bits", None, "each group needs its number of bits", "8 is usual")
        return
    if start is not None and start < target:
        rule = f"must be at least target_bits, which is {target}"
        yield Problem(f"{path}.start_bits", start, rule, "raise it, or remove the key")
    for key, value, plain in (
        ("quantization_type", shared.quantization_type, "symmetric"),
        ("rounding", shared.rounding, "nearest"),
    ):
        if target < 3 and value != plain:
            rule = f"1 and 2 bits need {plain}, but this group uses {value}"
            yield Problem(f"{path}.target_bits", target, rule, f'set {key} to "{plain}", or 3 bits or more')


def _layer_problems(section: LayerReduction) -> Iterator[Problem]:
    if not section.enabled:
        return
    path, layers = f"{ROOT}.layer_reduction", section.teacher_layer
    if not section.module_name_prefix:
        rule = "layer reduction needs the name of the list of layers"
        yield Problem(f"{path}.module_name_prefix", section.module_name_prefix, rule, 'such as "bert.encoder.layer"')
    if not layers:
        rule = "layer reduction needs the indices of the layers to keep"
        yield Problem(f"{path}.teacher_layer", [], rule, "such as [1, 3, 5, 7, 9, 11]")
    elif layers != sorted(set(layers)):
        yield Problem(f"{path}.teacher_layer", layers, "must be ascending", "sort it, and remove duplicates")
    keep = section.keep_number_layer
    if layers and keep is not None and keep != len(layers):
        rule = f"teacher_layer has {len(layers)} layers"
        yield Problem(f"{path}.keep_number_layer", keep, rule, "make them agree, or remove the key")
