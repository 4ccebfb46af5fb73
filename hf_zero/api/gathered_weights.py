"""Weights for an engine that generates: whole, by the model's own names, never all of them at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.params.consolidation import unsharded_values
from hf_zero.params.unsharding import TOGETHER_NUMEL
from hf_zero.precision import is_packed


def gathered_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of `model` (an engine gives its own), one after the other: what an inference engine is given.

    Names are those of the Hugging Face model. Adapters of PEFT are merged into what is given, layer by layer, and so
    the whole model is never in memory: beside the shards, one parameter is (or small ones, 4 MB in fp32), and its sum
    with its adapter. Values are not to be written to, and are right until the next one is asked for. Collective: every
    rank goes through to the end. Tied weights come under each of their names.

        for name, values in hf_zero.gathered_weights(trainer.model_wrapped):
            inference_model.load_weights([(name, values)])

    Raises:
        ValueError: for adapters whose weights are no sum of two: DoRA and its kin, and those of quantised weights.
    """
    inner = getattr(model, "module", model)
    names, adapted = _names_without_adapters(inner), _adapters(inner)
    for parameter, values in unsharded_values(inner, together_numel=TOGETHER_NUMEL):
        for layer in adapted.get(id(parameter), ()):
            own = [each for name, each in layer.named_parameters() if "base_layer" not in name.split(".")]
            with torch.no_grad(), GatheredParameters(own):
                for adapter in layer.active_adapters:
                    values = values + layer.get_delta_weight(adapter).to(values)
        for name in names.get(id(parameter), ()):
            yield name, values
        del values  # before the next ones are gathered


def _adapters(model: nn.Module) -> dict[int, list[Any]]:
    """Layers of PEFT's around each parameter, by its id."""
    found: dict[int, list[Any]] = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "get_base_layer") or getattr(layer, "merged", False) or layer.disable_adapters:
            continue
        base = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"), None)
        is_sum = hasattr(layer, "get_delta_weight") and not any((getattr(layer, "use_dora", None) or {}).values())
        if not is_sum or base is None or is_packed(base) or not base.is_floating_point():
            raise ValueError(
                f"gathered_weights: the adapter of {name} is not added to a weight; call merge_adapter() inside "
                "hf_zero.gathered(model), which needs memory for the whole model"
            )
        found.setdefault(id(base), []).append(layer)
    return found


def _names_without_adapters(model: nn.Module) -> dict[int, list[str]]:
    """By the parameter's id; without those that only PEFT has."""
    prefix = getattr(model, "prefix", None)  # "lora_" and so on
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if prefix is not None:
            if prefix in name or "original_module" in name:
                continue
            name = re.sub(r"\.base_layer|\.modules_to_save\.[^.]+", "", name.removeprefix("base_model.model."))
        names.setdefault(id(parameter), []).append(name)
    return names
