"""From the trace of a model with a few equal layers to that of one with many.

    4 layers     | before | 0 | 1 | 2 | 3 | loss | 3 | 2 | 1 | 0 | after |
    80 layers    | before | 0 | 1 | 1 + d | 1 + 2d ... | 79 | loss | ...

Every layer keeps the same number of bytes and makes the same events, so what lives at layer i + 1 is what lived at
layer i and a constant. Where the traced layers do not show that, there is no such trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from hf_zero.planning.trace import Segment, Trace

FEW = 4  # the first and the last may differ from the two between them


class NotAlike(ValueError):
    """Layers differ from one another."""


def stretch(trace: Trace, layers: int, prefix: str) -> Trace:
    """The trace of `FEW` layers as that of `layers` (at least as many).

    Args:
        prefix: what precedes the number of a layer in names, `model.layers.`.

    Raises:
        NotAlike: when the two in the middle differ by more than a constant.
    """
    loss = next(i for i, segment in enumerate(trace.segments) if segment.event == "loss")
    parts = (trace.segments[:loss], True), (trace.segments[loss:], False)
    found = [each for segments, rising in parts for each in _stretched(segments, layers, prefix, rising=rising)]
    return Trace(tuple(found), trace.note)


def _stretched(segments: Sequence[Segment], layers: int, prefix: str, *, rising: bool) -> Iterator[Segment]:
    """Of one pass, in which layers come in rising order or in falling order."""
    groups = [(layer, list(group)) for layer, group in groupby(segments, lambda each: _layer_of(each.name, prefix))]
    order = [layer for layer, _ in groups if layer is not None]
    if order != sorted(range(FEW), reverse=not rising):
        raise NotAlike(f"layers are passed in the order {order}")
    by_layer = {layer: group for layer, group in groups if layer is not None}
    step, more = _difference(by_layer[1], by_layer[2]), layers - FEW
    passed = 0
    for layer, group in groups:
        if layer is not None:
            passed += 1
            for number in _stands_for(layer, layers, rising=rising):
                offset = (number - layer) * step
                yield from (_moved(each, offset, _renamed(each.name, prefix, number)) for each in group)
        elif passed in (0, FEW):
            all_live = rising == (passed == FEW)
            yield from (_moved(each, more * step if all_live else 0, each.name) for each in group)
        else:
            raise NotAlike("something else happens between layers")


def _stands_for(layer: int, layers: int, *, rising: bool) -> Sequence[int]:
    """Which layers of the long model a traced one represents, in execution order."""
    more = layers - FEW
    if layer != 1:
        return (layer + more,) if layer else (0,)
    numbers = range(1, 2 + more)
    return numbers if rising else numbers[::-1]


def _layer_of(name: str, prefix: str) -> int | None:
    number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
    return int(number) if number.isdigit() else None


def _renamed(name: str, prefix: str, number: int) -> str:
    _, dot, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{number}{dot}{rest}"


def _difference(first: Sequence[Segment], second: Sequence[Segment]) -> int:
    """Bytes by which the second lies higher."""
    if [(each.event, each.flops, each.sent) for each in first] != [(e.event, e.flops, e.sent) for e in second]:
        raise NotAlike("layers do different things")
    differences = {b.peak - a.peak for a, b in zip(first, second)}
    if len(differences) != 1:
        raise NotAlike("layers keep different numbers of bytes")
    return differences.pop()


def _moved(segment: Segment, offset: int, name: str) -> Segment:
    return replace(segment, peak=segment.peak + offset, name=name)
