"""Finds the units of a model: which parameters are gathered together, and around which module's forward.

Model                     container      its own direct parameters, if any, are a unit
  embed_tokens            unit
  layers (ModuleList)
    0, 1, 2 ...           unit each      a transformer block with everything in it, experts too
  norm                    unit
  lm_head                 unit           if tied to embed_tokens: no separate unit, its module uses that one
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.jit import ScriptModule

# A block above both limits that is itself a list of blocks (a stage of a hierarchical vision model) is split.
OVERSIZED_NUMEL = 1 << 26
OVERSIZED_SHARE = 4
_LISTS = (nn.ModuleList, nn.ModuleDict)
_PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class GatheredModule:
    """A module whose parameters are gathered around its forward.

    Attributes:
        parameters: those of the module, without duplicates, that no gathered module below it has.
        is_container: whether it has gathered modules below it.
    """

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    is_container: bool


class _Walk:
    def __init__(self, root: nn.Module, leaves: Collection[nn.Module]) -> None:
        self.leaves = leaves
        self.modules: list[GatheredModule] = []
        self.seen: set[int] = set()
        self.most_numel = max(OVERSIZED_NUMEL, _numel(root) // OVERSIZED_SHARE)

    def container(self, name: str, module: nn.Module) -> None:
        position = len(self.modules)
        for child_name, child in _children(module):
            self._child(_join(name, child_name), child)
        if not _is_list(module):
            self.modules.insert(position, GatheredModule(name, module, tuple(_own(module)), is_container=True))

    def _child(self, name: str, child: nn.Module) -> None:
        if child in self.leaves or not _opens(child):
            self._whole(name, child)
        elif _is_list(child) or isinstance(child, nn.Sequential):
            for element_name, element in _children(child):
                self._element(_join(name, element_name), element)
        else:
            self._container_once(name, child)

    def _element(self, name: str, element: nn.Module) -> None:
        if element not in self.leaves and _numel(element) > self.most_numel and _has_blocks(element):
            self._container_once(name, element)
        elif _is_list(element):
            self._child(name, element)
        else:
            self._whole(name, element)

    def _container_once(self, name: str, module: nn.Module) -> None:
        if id(module) not in self.seen:
            self.seen.add(id(module))
            self.container(name, module)

    def _whole(self, name: str, module: nn.Module) -> None:
        # A module of torch.jit takes no hooks: its parameters are the root's, as others outside of gathered modules.
        if id(module) not in self.seen and not isinstance(module, ScriptModule):
            self.seen.add(id(module))
            self.modules.append(GatheredModule(name, module, tuple(module.parameters()), is_container=False))


def find_gathered_modules(root: nn.Module) -> list[GatheredModule]:
    """All gathered modules of `root`, containers before their contents, otherwise in registration order."""
    leaves = [module for module in root.modules() if getattr(module, "_z3_leaf", False)]
    if root in leaves:
        return [GatheredModule("", root, tuple(root.parameters()), is_container=False)]
    walk = _Walk(root, leaves)
    walk.container("", root)
    return _with_leftovers(root, walk.modules)


def _with_leftovers(root: nn.Module, gathered_modules: list[GatheredModule]) -> list[GatheredModule]:
    """Assign parameters outside of all gathered modules to the root: those of a list that also has children."""
    covered = {id(parameter) for gathered in gathered_modules for parameter in gathered.parameters}
    left = tuple(parameter for parameter in root.parameters() if id(parameter) not in covered)
    if not left:
        return gathered_modules
    assert gathered_modules[0].module is root, "the root is the first"
    return [replace(gathered_modules[0], parameters=(*gathered_modules[0].parameters, *left)), *gathered_modules[1:]]


def assign_units(gathered_modules: Sequence[GatheredModule]) -> list[tuple[GatheredModule, tuple[nn.Parameter, ...]]]:
    """The units: every parameter belongs to the first module that has it; modules without parameters have none."""
    taken: set[int] = set()
    units = []
    for gathered in gathered_modules:
        mine = tuple(parameter for parameter in gathered.parameters if id(parameter) not in taken)
        taken.update(id(parameter) for parameter in mine)
        if mine:
            units.append((gathered, mine))
    return units


def _opens(module: nn.Module) -> bool:
    """Whether the units are below `module` instead of `module` itself."""
    if _is_list(module) or isinstance(module, nn.Sequential):
        return True
    return any(
        _is_list(inner) and any(True for _ in _children(inner)) and not _stays_together(name)
        for name, inner in module.named_modules()
    )


def _is_list(module: nn.Module) -> bool:
    """Whether `module` only contains others. A list with its own parameters (torch's ParametrizationList) does not."""
    return isinstance(module, _LISTS) and not any(True for _ in module.parameters(recurse=False))


def _stays_together(list_name: str) -> bool:
    # Ranks may use experts in different orders, so experts are gathered together with the layer that routes to them; a
    # parametrization is read whenever its weight is read.
    return "expert" in list_name.lower() or "parametrizations" in list_name


def _has_blocks(module: nn.Module) -> bool:
    lists = [name for name, inner in module.named_modules() if _is_list(inner)]
    return bool(lists) and not any(_stays_together(name) for name in lists)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not isinstance(child, _PARAMETER_LISTS) and any(True for _ in child.parameters()):
            yield name, child


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters of the module itself, and of its parameter lists."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, _PARAMETER_LISTS):
            yield from child.parameters()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
