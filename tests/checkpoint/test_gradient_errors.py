"""The error feedback of quantized gradients is restored to the same bucket, or dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_zero.checkpoint.extra_states import errors_for_file, restore_errors
from hf_zero.comm.collectives import Collectives, LoneCollectives
from hf_zero.comm.quantized import FeedbackRule, QuantizedReduction

NAMES = ["a", "b", "c"]


class Four(LoneCollectives):
    def __init__(self) -> None:
        Collectives.__init__(self, 0, 4)


def reducer(*buckets: list[int], row: int = 100) -> Any:
    reduction = QuantizedReduction([Four()], 4, FeedbackRule(0.8, 10))
    found = []
    for slots in buckets:
        wire = reduction.wire(row, torch.device("cpu")) if slots else None
        bucket = SimpleNamespace(slots=[SimpleNamespace(parameter=index) for index in slots])
        found.append(SimpleNamespace(bucket=bucket, wire=wire))
    return SimpleNamespace(buckets=found)


def test_errors_find_their_bucket() -> None:
    source = reducer([0, 1], [], [2])
    for number, bucket in enumerate((source.buckets[0], source.buckets[2])):
        bucket.wire.errors[0].fill_(number + 1)
        bucket.wire.num_reduced = number + 5
    saved = errors_for_file(source, NAMES)
    assert [entry["parameters"] for entry in saved] == [["a", "b"], ["c"]]

    target = reducer([2], [0, 1])
    restore_errors(target, NAMES, saved)
    assert [bucket.wire.num_reduced for bucket in target.buckets] == [6, 5]
    assert all(bool((b.wire.errors[0] == value).all()) for b, value in zip(target.buckets, (2, 1), strict=True))


def test_errors_of_another_layout_are_left() -> None:
    source, target = reducer([0, 1]), reducer([0, 1], row=300)
    source.buckets[0].wire.errors[0].fill_(1)
    target.buckets[0].wire.errors[0].fill_(7)
    target.buckets[0].wire.num_reduced = 3
    restore_errors(target, NAMES, errors_for_file(source, NAMES))
    assert not bool(target.buckets[0].wire.errors[0].any()) and target.buckets[0].wire.num_reduced == 0
