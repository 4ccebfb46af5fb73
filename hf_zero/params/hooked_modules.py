"""Hooked modules: the modules that the parameter coordinator hooks, with the units it gathers around each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_zero.config import Zero
from hf_zero.params.gather_plan import GatherPlan, Use
from hf_zero.params.gathered_modules import GatheredModule
from hf_zero.params.unit import Unit


@dataclass(slots=True, eq=False)
class HookedModule:
    """A module whose forward is hooked, and the units whose parameters it reads.

    Attributes:
        units: units of parameters that the module itself owns or shares.
        position: index in the execution order of modules with units; None without units.
        subtree: ascending positions of itself and the hooked modules in it: what one pass through it gathers.
        inside: ids of itself and all modules in it.
        reads_in_backward: whether its backward needs its parameters' values (a plain embedding's does not).
        is_container: whether it contains hooked modules, so that its backward begins before theirs and ends after.
        entered: for each running forward, the number of its first autograd operation.
    """

    name: str
    module: nn.Module
    units: tuple[Unit, ...]
    position: int | None
    subtree: tuple[int, ...]
    inside: frozenset[int]
    reads_in_backward: bool
    is_container: bool
    entered: list[int] = field(default_factory=list)


class ExecutionOrder:
    """The hooked modules with units by position: in registration order, until forward is known to use another order.

    Attributes:
        hooked_modules: all hooked modules, including those without units.
        by_position: hooked modules with units, in order.
        gather_plan: which positions stay gathered.
        first_use: the first position of each unit.
    """

    def __init__(self, hooked_modules: Sequence[HookedModule], plan: Callable[[Sequence[Use]], GatherPlan]) -> None:
        """`plan`: computes the gather plan from the uses of all positions, in order."""
        self.hooked_modules = tuple(hooked_modules)
        self._plan = plan
        self._number([hooked for hooked in hooked_modules if hooked.position is not None])

    def change(self, order: Sequence[int]) -> None:
        """Move the hooked module at `order[i]` to position `i`."""
        new = {old: position for position, old in enumerate(order)}
        for hooked in self.hooked_modules:
            hooked.position = None if hooked.position is None else new[hooked.position]
            hooked.subtree = tuple(sorted(new[old] for old in hooked.subtree))
        self._number([self.by_position[old] for old in order])

    def _number(self, by_position: Sequence[HookedModule]) -> None:
        self.by_position = tuple(by_position)
        self.gather_plan = self._plan([_use_of(hooked) for hooked in by_position])
        self.first_use: dict[Unit, int] = {}
        for position, hooked in enumerate(by_position):
            for unit in hooked.units:
                self.first_use.setdefault(unit, position)


def hook_modules(gathered_modules: Sequence[GatheredModule], unit_of: Mapping[int, Unit]) -> list[HookedModule]:
    """Create the hooked modules and number those with units in execution order; none if nothing is ever gathered.

    A module without units is hooked too: called by itself, it may read a parameter of another module.
    """
    units = [_units_of(gathered.parameters, unit_of) for gathered in gathered_modules]
    with_units = [index for index, own in enumerate(units) if own]
    positions = {index: position for position, index in enumerate(with_units)}
    hooked = []
    for index, gathered in enumerate(gathered_modules) if positions else ():
        inside = frozenset(id(module) for module in gathered.module.modules())
        hooked.append(
            HookedModule(
                name=gathered.name or type(gathered.module).__name__,
                module=gathered.module,
                units=units[index],
                position=positions.get(index),
                subtree=tuple(positions[other] for other in with_units if id(gathered_modules[other].module) in inside),
                inside=inside,
                reads_in_backward=gathered.is_container or not isinstance(gathered.module, nn.Embedding),
                is_container=gathered.is_container,
            )
        )
    return hooked


def _units_of(parameters: Iterable[nn.Parameter], unit_of: Mapping[int, Unit]) -> tuple[Unit, ...]:
    by_index = {unit.index: unit for unit in (unit_of.get(id(p)) for p in parameters) if unit is not None}
    return tuple(by_index[index] for index in sorted(by_index))


def _use_of(hooked: HookedModule) -> Use:
    """The module's use of units, for the gather plan."""
    return Use(
        units=tuple(unit.index for unit in hooked.units),
        numel=sum(unit.numel for unit in hooked.units),
        has_trained=any(part.layout.trained_numel for unit in hooked.units for part in unit.parts),
        reads_in_backward=hooked.reads_in_backward,
    )


# Leaf modules: modules that stage 3 gathers as one unit, with everything in them.


_MARK = "_z3_leaf"  # DeepSpeed's name, which other libraries read


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module `model` is marked as a leaf."""
    return bool(getattr(model, _MARK, False))


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes (or class names) as leaves and return them.

    Raises:
        ValueError: if there is none and `raise_if_not_found`.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark modules and return them."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names (as in `named_modules`), or unmark them if `flag` is False.

    Returns:
        (the modules, the names that no module has)

    Raises:
        ValueError: if there are such names and `raise_if_not_found`.
    """
    return _mark_each(model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Like `set_z3_leaf_modules_by_name`, for all modules whose name has one of these suffixes."""
    return _mark_each(model, module_name_suffixes, lambda name, suffix: name.endswith(suffix), flag, raise_if_not_found)


def mark_leaves(model: nn.Module, policy: Zero) -> None:
    """Mark the modules of zero_optimization.leaf_module, where unknown names are allowed."""
    wanted = policy.leaf_module
    if wanted is not None:
        set_z3_leaf_modules(model, wanted.classes, raise_if_not_found=False)
        set_z3_leaf_modules_by_name(model, wanted.names, raise_if_not_found=False)
        set_z3_leaf_modules_by_suffix(model, wanted.name_suffixes, raise_if_not_found=False)


def _mark_each(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    marked: dict[int, nn.Module] = {}
    missing = []
    for word in wanted:
        matches = [module for name, module in model.named_modules() if fits(name, word)]
        marked.update((id(module), module) for module in matches)
        if not matches:
            missing.append(word)
    if missing and raise_if_not_found:
        names = [name for name, _ in model.named_modules() if name][:8]
        raise ValueError(f"leaf modules: {missing} match no module of the model, whose names are like {names}")
    for module in marked.values():
        set_z3_leaf_module(module, flag)
    return list(marked.values()), missing


def _mark_classes(
    model: nn.Module, wanted: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    types = tuple(kind for kind in wanted if isinstance(kind, type))
    names = {kind.rsplit(".", 1)[-1] for kind in wanted if isinstance(kind, str)}
    marked = [module for module in model.modules() if isinstance(module, types) or type(module).__name__ in names]
    if not marked and raise_if_not_found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"leaf modules: {list(wanted)} match nothing in the model, whose classes are {classes}")
    for module in marked:
        set_z3_leaf_module(module, flag)
    return marked
