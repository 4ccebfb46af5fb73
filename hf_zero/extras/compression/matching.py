"""Finds the layers of a model that can be compressed, and matches them with the rules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hf_zero.config import ConfigError, Problem
from hf_zero.extras.compression.section import EVERYTHING, CompressionPolicy, TechniqueGroup

LayerKind = Literal["linear", "conv", "embedding", "packed"]
_ADAPTERS = (".lora_", "lora_embedding")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A weight and the module that uses it.

    Attributes:
        name: name of the module, or of the parameter if the module has several weights (packed experts).
        out_dim, in_dim: output and input dimension of the weight; -1 if it has none.
        host: module whose forward reads the weight; differs from the owner in torch's MultiheadAttention.
    """

    name: str
    module: nn.Module
    weight: str
    kind: LayerKind
    out_dim: int
    in_dim: int
    host: nn.Module

    @property
    def parameter(self) -> nn.Parameter:
        """The weight with its full shape, read without the hook that gathers it at stage 3."""
        parameter = dict.__getitem__(self.module._parameters, self.weight)
        assert parameter is not None
        return parameter

    @property
    def bias(self) -> nn.Parameter | None:
        return dict.get(self.module._parameters, "bias") if self.kind in ("linear", "conv") else None

    @property
    def num_out(self) -> int:
        return int(self.parameter.shape[self.out_dim])

    @property
    def num_in(self) -> int:
        return int(self.parameter.shape[self.in_dim])

    @property
    def takes_inputs(self) -> bool:
        """Whether its input is the first argument of its own forward."""
        return self.kind in ("linear", "conv") and self.host is self.module


def layers_of(model: nn.Module) -> list[Layer]:
    """All weights that can be compressed, in registration order, without adapters. Shared modules occur once."""
    layers: list[Layer] = []
    hosts = {id(module.out_proj): module for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if not any(adapter in f".{name}" for adapter in _ADAPTERS):
            layers += _layers_in(name, module, hosts.get(id(module), module))
    return layers


def _layers_in(name: str, module: nn.Module, host: nn.Module) -> Iterator[Layer]:
    if isinstance(module, nn.Linear):
        yield Layer(name, module, "weight", "linear", 0, 1, host)
    elif is_transposed(module):
        yield Layer(name, module, "weight", "linear", 1, 0, host)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        yield Layer(name, module, "weight", "conv", 0, 1, host)
    elif isinstance(module, nn.Embedding):
        yield Layer(name, module, "weight", "embedding", -1, -1, host)
    elif not isinstance(module, nn.RNNBase):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.is_floating_point() and parameter_name != "bias_k":
                path = f"{name}.{parameter_name}" if name else parameter_name
                yield Layer(path, module, parameter_name, "packed", -1, -1, host)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D: a linear layer with a weight of shape (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and "weight" in module._parameters


KINDS: Mapping[str, tuple[LayerKind, ...]] = {
    "weight_quantization": ("linear", "conv", "embedding", "packed"),
    "activation_quantization": ("linear", "conv"),
    "sparse_pruning": ("linear", "conv", "packed"),
    "row_pruning": ("linear",),
    "head_pruning": ("linear",),
    "channel_pruning": ("conv",),
}
_NUM_NEAREST = 3


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A layer, the rule that matches it, and the related modules that are cut with it.

    Attributes:
        related: (name, module) for each related expression of the rule, paired with this layer by position.
    """

    layer: Layer
    rule: TechniqueGroup
    related: tuple[tuple[str, nn.Module], ...] = ()


def match_all(model: nn.Module, policy: CompressionPolicy) -> dict[str, list[Match]]:
    """Match the layers of a model with a policy, by technique, in the order of the model.

    Raises:
        ConfigError: lists all expressions that match nothing, modules in two groups, and related modules that do not
            pair up.
    """
    layers, problems = layers_of(model), list[Problem]()
    matches: dict[str, list[Match]] = {}
    for name, technique in policy.techniques.items():
        usable = [x for x in layers if x.kind in KINDS[name]]
        if name == "activation_quantization":
            usable = [x for x in usable if x.takes_inputs]
        elif getattr(technique.shared, "method", "") == "snip_momentum":
            spared = technique.shared.excluded_modules
            usable = [x for x in usable if x.kind == "linear" and not any(_is_meant(p, x.name) for p in spared)]
        matches[name] = _match(model, technique.rules, usable, problems)
    if problems:
        raise ConfigError(problems)
    return matches


def listing(matches: Mapping[str, Sequence[Match]]) -> dict[str, list[str]]:
    """Names of the matched modules, by the rule's path."""
    names: dict[str, list[str]] = {}
    for match in (match for each in matches.values() for match in each):
        names.setdefault(match.rule.path, []).append(match.layer.name)
    return names


def _match(
    model: nn.Module, rules: Sequence[TechniqueGroup], usable: Sequence[Layer], problems: list[Problem]
) -> list[Match]:
    matches: dict[str, Match] = {}
    for rule in rules:
        for index, pattern in enumerate(rule.modules):
            meant = [layer for layer in usable if _is_meant(pattern, layer.name)]
            if not meant:
                problems.append(_nothing(f"{rule.path}.modules", pattern, [layer.name for layer in usable]))
            expressions = rule.related[index] if rule.related else ()
            related = list(_related(model, rule, meant, expressions, problems))
            for position, layer in enumerate(meant):
                if layer.name in matches:
                    words = f"matches {layer.name}, which {matches[layer.name].rule.path} already matches"
                    problems.append(
                        Problem(f"{rule.path}.modules", pattern, words, "put each module in only one group")
                    )
                    break
                partners = tuple(partner[position] for partner in related)
                matches[layer.name] = Match(layer, rule, partners)
    order = {layer.name: position for position, layer in enumerate(usable)}
    return sorted(matches.values(), key=lambda match: order[match.layer.name])


def _related(
    model: nn.Module, rule: TechniqueGroup, meant: Sequence[Layer], expressions: Sequence[str], problems: list[Problem]
) -> Iterator[list[tuple[str, nn.Module]]]:
    """For each expression, its modules, of which there must be as many as layers."""
    named = [(name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    for expression in expressions:
        partners = [(name, module) for name, module in named if _is_meant(expression, name)]
        path = f"{rule.path}.related_modules"
        if not partners:
            problems.append(_nothing(path, expression, [name for name, _ in named]))
        elif len(partners) != len(meant):
            words = f"matches {len(partners)} modules, but the group matches {len(meant)}"
            shown = ", ".join(name for name, _ in partners[:_NUM_NEAREST])
            problems.append(Problem(path, expression, words, f"make it as narrow as modules; it matches {shown} ..."))
        else:
            yield partners


def _is_meant(pattern: str, name: str) -> bool:
    return pattern == EVERYTHING or re.search(pattern, name) is not None


def _nothing(path: str, pattern: str, names: Sequence[str]) -> Problem:
    near = nearest(pattern, names)
    fix = f"nearest: {', '.join(near)}" if near else "this model has no such layers; remove the group"
    return Problem(path, pattern, "matches no module that can be compressed so", fix)


def nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """The names, or parts of names with the pattern's number of components, that are most similar to a pattern."""
    plain = re.sub(r"[\\^$*+?()\[\]{}|]", "", pattern).strip(".") or pattern
    length = plain.count(".") + 1
    parts: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        for start in range(max(1, len(words) - length + 1)):
            part = ".".join(words[start : start + length])
            if not part.isdecimal():
                parts[part] = None
    return difflib.get_close_matches(plain, parts, n=_NUM_NEAREST, cutoff=0.3) or list(dict.fromkeys(names))[:3]
