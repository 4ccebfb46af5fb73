"""State of sequence parallelism: attached models, and the inputs of their current forward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hf_zero.comm import Collectives


@dataclass(frozen=True, slots=True)
class Shared:
    """Settings of a model that shares sequences.

    Attributes:
        group: the ranks that hold parts of the same sequences, in the order of positions.
        config: config of the model's text part.
        skips_evaluation: whether inputs in eval mode are whole sequences.
        attends: whether the model has attention, in which ranks exchange heads.
        has_mixers: whether layers combine positions outside of attention.
    """

    group: Collectives
    config: Any
    skips_evaluation: bool
    attends: bool = True
    has_mixers: bool = False

    def is_on(self, module: nn.Module) -> bool:
        return module.training or not self.skips_evaluation


@dataclass(slots=True)
class Sight:
    """The inputs of one forward over all ranks.

    Attributes:
        length, whole_length: number of positions on this rank and on all ranks.
        padding: attention mask of whole sequences, bool [batch, whole_length], False for padding; None without padding,
            or if it is only at the end under causal attention, where no token attends to it.
        positions: position ids of whole sequences, [batch or 1, whole_length]; None if they are not 2-D.
        asks_for_documents: whether transformers has looked for packed documents since it last created a mask.
        num_exchanges: number of attention calls so far for which ranks exchanged heads.
    """

    config: Any
    length: int
    whole_length: int
    padding: Tensor | None
    positions: Tensor | None
    asks_for_documents: bool = False
    num_exchanges: int = 0


CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")  # arguments with states of earlier forwards
MODULES: WeakKeyDictionary[nn.Module, Shared] = WeakKeyDictionary()  # every module of an attached model


def shares_sequences(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is attached."""
    return any(module in MODULES for module in model.modules())


@dataclass(frozen=True, slots=True)
class Mixing:
    """The forward of a module that combines positions outside of attention.

    Attributes:
        length: number of positions on this rank.
        functions: those with which it combines positions, where ranks exchange heads; none: it runs on whole sequences.
        calls: functions that it has called.
    """

    mixer: nn.Module
    group: Collectives
    samples: int
    length: int
    functions: tuple[str, ...]
    calls: set[str] = field(default_factory=set)


class _Running:
    """The running forwards of this process, outermost first.

    Attributes:
        mixers: the mixers that run, outermost first.
    """

    def __init__(self) -> None:
        self.sights: list[Sight | None] = []
        self.mixers: list[Mixing] = []

    @property
    def sight(self) -> Sight | None:
        return self.sights[-1] if self.sights else None

    @property
    def scanning(self) -> Mixing | None:
        """The running mixer, if ranks exchange heads in it."""
        return self.mixers[-1] if self.mixers and self.mixers[-1].functions else None


RUNNING = _Running()


@contextmanager
def with_groups_of_heads(module: nn.Module, num_groups: int) -> Iterator[None]:
    """Context that sets the number of query heads per key head in `module`."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == num_groups:
        yield
        return
    module.num_key_value_groups = num_groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


def copies_of_key_heads(num_key_heads: int, size: int) -> int:
    """The number of copies of every key head for which `size` ranks get the same number of heads.

    With H query heads, a multiple of `size`, H / copies is still a multiple of the number of key heads.
    """
    return size // math.gcd(num_key_heads, size)


def check_heads(num_heads: int, size: int) -> None:
    """Raises ValueError if heads cannot be divided evenly."""
    if num_heads % size:
        divisors = [divisor for divisor in range(2, num_heads + 1) if num_heads % divisor == 0]
        raise ValueError(
            f"attention heads = ranks per sequence x heads per rank does not hold: {num_heads} != {size} x n; use a "
            f"sequence_parallel_size (sp_size) that divides {num_heads}: {', '.join(map(str, divisors)) or 'only 1'}"
        )
