"""Expert weights packed in one step equal those that transformers packs in two, in all layouts of its models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from hf_zero.integration.huggingface.experts import PackedExperts, in_one_go
from hf_zero.integration.patches.transformers_integrations_deepspeed import around_conversions

SOURCES = ["experts.*.w1.weight", "experts.*.w3.weight"]
TARGET = "experts.gate_up_proj"


def converter(*operations: Any) -> WeightConverter:
    return WeightConverter(SOURCES, TARGET, operations=list(operations))


def experts(rows: tuple[int, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {source: [torch.randn(count, 5) for _ in range(4)] for source, count in zip(SOURCES, rows, strict=True)}


def through(entry: WeightConverter, found: dict[str, Any]) -> dict[str, Any]:
    for operation in entry.operations:
        found = operation.convert(
            found, source_patterns=entry.source_patterns, target_patterns=entry.target_patterns, config=None
        )
    return found


@pytest.mark.parametrize(("dim", "rows"), [(1, (3, 3)), (1, (3, 2)), (2, (3, 3))])
def test_a_pack_is_what_transformers_makes_of_it(dim: int, rows: tuple[int, int]) -> None:
    """Stacks, packed tensor and parameter were in memory at once: Mixtral needed more than a share and one layer."""
    theirs = converter(MergeModulelist(dim=0), Concatenate(dim=dim))
    ours = in_one_go(theirs)
    assert len(ours.operations) == 1 and len(theirs.operations) == 2
    packed = through(ours, experts(rows))
    assert packed.keys() == {TARGET}
    expected = through(theirs, experts(rows))[TARGET]
    assert packed[TARGET].shape == expected.shape and packed[TARGET].dtype == expected.dtype
    assert torch.equal(torch.empty_like(expected).copy_(packed[TARGET]), expected)
    assert torch.equal(torch.empty_like(expected, dtype=torch.bfloat16).copy_(packed[TARGET]), expected.bfloat16())
    assert torch.equal(packed[TARGET] * 2, expected * 2)  # it supports further operations
    assert torch.equal(packed[TARGET][1:], expected[1:])


def test_what_is_stacked_already_takes_their_way() -> None:
    stacked = {source: torch.stack(found) for source, found in experts((3, 3)).items()}
    theirs = converter(MergeModulelist(dim=0), Concatenate(dim=1))
    try:
        expected = through(theirs, dict(stacked))[TARGET]
    except TypeError:  # the oldest supported transformers only stacks lists
        with pytest.raises(TypeError):
            through(in_one_go(theirs), dict(stacked))
        return
    assert torch.equal(through(in_one_go(theirs), dict(stacked))[TARGET], expected)


def all_at_once(model: object, state_dict: dict[str, Any], weight_mapping: list[WeightConverter]) -> dict[str, Any]:
    return through(weight_mapping[0], state_dict)


def in_groups(model: object, state_dict: dict[str, Any], weight_mapping: list[WeightConverter]) -> Iterator[Any]:
    yield from ({key: value} for key, value in through(weight_mapping[0], state_dict).items())


def test_both_forms_of_upstreams_conversion_are_patched() -> None:
    """Up to transformers 5.17 at least, the function returns a dict. The patch iterated over it as over the groups of
    later versions: the loader got keys instead of weights, and no checkpoint of experts loaded at stage 3."""
    theirs = converter(MergeModulelist(dim=0), Concatenate(dim=1))
    expected = through(theirs, experts((3, 3)))[TARGET]
    (group,) = around_conversions(in_groups, None, experts((3, 3)), [theirs])
    at_once = around_conversions(all_at_once, None, experts((3, 3)), [theirs])
    assert isinstance(group[TARGET], PackedExperts) and isinstance(at_once[TARGET], PackedExperts)
    for converted in (group, at_once):
        assert converted.keys() == {TARGET} and torch.equal(converted[TARGET].whole(), expected)


def test_other_conversions_are_left_alone() -> None:
    for operations in ([Concatenate(dim=0)], [MergeModulelist(dim=1), Concatenate(dim=2)]):
        entry = converter(*operations)
        assert in_one_go(entry) is entry
