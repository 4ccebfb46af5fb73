"""Around the conversion of checkpoints (experts into packs) at stage 3: memory of one group is free for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hf_zero.memory.host_heap import trim


def around(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def _apply_weight_conversions_to_state_dict(model: Any, state_dict: Any, weight_mapping: Any) -> Iterator[Any]:
        for held in map(_boxed, original(model, state_dict, weight_mapping)):
            trim()
            yield held.pop()  # no reference stays here while the next group is made
            trim()

    return _apply_weight_conversions_to_state_dict


def _boxed(group: Any) -> list[Any]:
    return [group]
