"""Scopes as the gatherer sees them: modules whose forward it watches, and what it gathers around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_zero.params.gather_plan import Use
from hf_zero.params.hooked_modules import Scope
from hf_zero.params.unit import Unit


@dataclass(slots=True, eq=False)
class HookedScope:
    """A module whose forward is watched, and the units whose parameters it reads.

    Attributes:
        units: of the parameters that the module itself owns or shares.
        position: place among the scopes that have units, in the order in which all ranks pass them; None without units.
        reach: positions of the scopes in the module and of itself, ascending: what one pass through it gathers.
        inside: ids of the modules in it and of itself.
        reads_in_backward: its backward needs the values of its parameters (a plain embedding's does not).
        is_container: other scopes lie in it, so that its backward begins before theirs and ends after them.
        entered: of each running forward, the number of autograd's first operation in it.
    """

    name: str
    module: nn.Module
    units: tuple[Unit, ...]
    position: int | None
    reach: tuple[int, ...]
    inside: frozenset[int]
    reads_in_backward: bool
    is_container: bool
    entered: list[int] = field(default_factory=list)


def hooked_scopes(scopes: Sequence[Scope], unit_of: Mapping[int, Unit]) -> list[HookedScope]:
    """The scopes, those with something to gather numbered along their line; none where nothing is ever gathered.

    A scope without units counts too: called by itself, it may read a parameter of another one.
    """
    inside = [frozenset(id(module) for module in scope.module.modules()) for scope in scopes]
    units = [_units_of(scope.parameters, unit_of) for scope in scopes]
    positions: dict[int, int] = {}
    for index, own in enumerate(units):
        if own:
            positions[index] = len(positions)
    hooked = []
    for index, scope in enumerate(scopes):
        reach = tuple(position for other, position in positions.items() if id(scopes[other].module) in inside[index])
        if positions:
            hooked.append(
                HookedScope(
                    name=scope.name or type(scope.module).__name__,
                    module=scope.module,
                    units=units[index],
                    position=positions.get(index),
                    reach=reach,
                    inside=inside[index],
                    reads_in_backward=scope.is_container or not isinstance(scope.module, nn.Embedding),
                    is_container=scope.is_container,
                )
            )
    return hooked


def _units_of(parameters: Iterable[nn.Parameter], unit_of: Mapping[int, Unit]) -> tuple[Unit, ...]:
    found = {unit.index: unit for unit in (unit_of.get(id(p)) for p in parameters) if unit is not None}
    return tuple(found[index] for index in sorted(found))


def use_of(scope: HookedScope) -> Use:
    """What the gather plan need to know of it."""
    return Use(
        units=tuple(unit.index for unit in scope.units),
        numel=sum(unit.numel for unit in scope.units),
        has_trained=any(part.layout.trained_numel for unit in scope.units for part in unit.parts),
        reads_in_backward=scope.reads_in_backward,
    )
