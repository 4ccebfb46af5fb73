"""What quantised gradients have left out so far (LoCo), as part of a rank's optimizer file: a part of ours.

It belongs to one rank's messages about one bucket, so it fits the same layout and number of ranks only; elsewhere a
training goes on with nothing left out, as it began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_zero.grads.bucket import BucketGradients
from hf_zero.grads.reducer import GradientReducer
from hf_zero.log import logger

_PARAMETERS, _REDUCED, _ERRORS = "parameters", "reduced", "errors"


def errors_for_file(reducer: GradientReducer, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of this rank's buckets, made of plain containers; empty without error feedback."""
    return [
        {
            _PARAMETERS: _names(bucket, names),
            _REDUCED: bucket.wire.num_reduced,
            _ERRORS: [errors.detach() for errors in bucket.wire.errors],
        }
        for bucket in reducer.buckets
        if bucket.wire is not None and bucket.wire.errors
    ]


def restore_errors(reducer: GradientReducer, names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> None:
    """Take over what `errors_for_file` has said of the same buckets; others have nothing left out."""
    known = {tuple(entry[_PARAMETERS]): entry for entry in saved}
    num_lost = 0
    for bucket in reducer.buckets:
        wire = bucket.wire
        if wire is None or not wire.errors:
            continue
        wire.forget()
        entry = known.get(tuple(_names(bucket, names)), {})
        errors: Sequence[Tensor] = entry.get(_ERRORS, ())
        if [part.shape for part in errors] != [part.shape for part in wire.errors]:
            num_lost += 1
            continue
        wire.num_reduced = int(entry[_REDUCED])
        for own, theirs in zip(wire.errors, errors, strict=True):
            own.copy_(theirs)
    if num_lost and saved:
        logger.info("errors of quantised gradients fit the layout they were saved from only: they begin at zero")


def _names(bucket: BucketGradients, names: Sequence[str]) -> list[str]:
    return [names[slot.parameter] for slot in bucket.bucket.slots]
