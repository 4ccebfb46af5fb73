"""Leaf modules: modules that stage 3 gathers as one unit, with everything in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from hf_zero.config import Zero

_MARK = "_z3_leaf"  # DeepSpeed's name; others look for it


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether `module` is marked as a leaf."""
    return bool(getattr(module, _MARK, False))


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    setattr(module, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes (or class names); returns them.

    Raises:
        ValueError: when there is none and `raise_if_not_found`.
    """
    return _mark(model, _of_class(leaf_module_classes), True, raise_if_not_found, leaf_module_classes)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away; returns the modules."""
    return _mark(model, _of_class(leaf_module_classes), False, raise_if_not_found, leaf_module_classes)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names (as `named_modules` gives them), or with `flag` false take the mark away.

    Returns:
        (the modules, the names that no module has)

    Raises:
        ValueError: when there are such names and `raise_if_not_found`.
    """
    return _mark_each(model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same for all modules whose name ends in one of these."""
    return _mark_each(model, module_name_suffixes, lambda name, suffix: name.endswith(suffix), flag, raise_if_not_found)


def mark_leaves(model: nn.Module, policy: Zero) -> None:
    """What zero_optimization.leaf_module asks for; names that a model does not have are no error there."""
    wanted = policy.leaf_module
    if wanted is None:
        return
    if wanted.classes:
        set_z3_leaf_modules(model, wanted.classes, raise_if_not_found=False)
    if wanted.names:
        set_z3_leaf_modules_by_name(model, wanted.names, raise_if_not_found=False)
    if wanted.name_suffixes:
        set_z3_leaf_modules_by_suffix(model, wanted.name_suffixes, raise_if_not_found=False)


def _mark_each(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    found: dict[int, nn.Module] = {}
    missing = []
    for word in wanted:
        matches = [module for name, module in model.named_modules() if fits(name, word)]
        found.update((id(module), module) for module in matches)
        if not matches:
            missing.append(word)
    if missing and raise_if_not_found:
        names = [name for name, _ in model.named_modules() if name][:8]
        raise ValueError(f"leaf modules: {missing} match no module of the model, whose names are like {names}")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _of_class(classes: Sequence[type | str]) -> Callable[[str, nn.Module], bool]:
    types = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind.rsplit(".", 1)[-1] for kind in classes if isinstance(kind, str)}
    return lambda _, module: isinstance(module, types) or type(module).__name__ in names


def _mark(
    model: nn.Module,
    matches: Callable[[str, nn.Module], bool],
    flag: bool,
    raise_if_not_found: bool,
    wanted: Iterable[object],
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if matches(name, module)]
    if not found and raise_if_not_found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"leaf modules: {list(wanted)} match nothing in the model, whose classes are {classes}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
