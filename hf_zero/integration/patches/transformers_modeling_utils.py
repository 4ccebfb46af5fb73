"""transformers.modeling_utils: loading and saving models that stage 3 has sharded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm.parts import OF_ADAPTERS, parts_among, refuse_parts
from hf_zero.integration.huggingface.experts import left_to_engine
from hf_zero.integration.patches import Function, Patches
from hf_zero.params.sharded_parameter import HANDLE
from hf_zero.params.stand_ins import ReleasedView

PATCHES = Patches("transformers.modeling_utils")
NOTED = "_hf_zero_unexpected_keys"
"""Attribute of a model that is being loaded: keys of the checkpoint that have no place in it."""


@PATCHES.add(
    "PreTrainedModel._adjust_missing_and_unexpected_keys(self, loading_info)",
    without="keys of a checkpoint that the model does not have are passed over in silence at stage 3",
    until="_load_state_dict_into_zero3_model reports unexpected keys itself",
)
def around_adjust_keys(original: Callable[..., None], self: Any, loading_info: Any) -> None:
    """Keys noted while loading at stage 3 enter the report that every load gives."""
    loading_info.unexpected_keys |= vars(self).pop(NOTED, set())
    original(self, loading_info)


@PATCHES.add(
    "PreTrainedModel.initialize_weights(self)",
    without="models with a parametrization (weight norm) cannot be loaded at stage 3",
    until="transformers gathers the tensors of a parametrization, or does not read weights that are loaded",
)
def around_initialize_weights(original: Callable[..., None], self: Any) -> None:
    """Whatever a checkpoint lacks is initialised by methods that first look at every weight, also at those that are
    made by a parametrization of others."""
    with GatheredParameters(behind_parametrizations(self)):
        original(self)


def behind_parametrizations(model: nn.Module) -> list[nn.Parameter]:
    """The parameters behind parametrized weights."""
    parametrized: list[Any] = [module for module in model.modules() if hasattr(module, "parametrizations")]
    return [parameter for module in parametrized for parameter in module.parametrizations.parameters()]


@PATCHES.add(
    "PreTrainedModel.save_pretrained(self, save_directory, is_main_process, state_dict, push_to_hub, max_shard_size, "
    "variant, token, save_peft_format, save_original_format, distributed_checkpoint, kwargs)",
    without="save_pretrained without a state dict writes the parts of weights that one rank holds, and before "
    "transformers 5.15, which asks should_save_on_this_rank, is_main_process=False writes all the same",
    until="save_pretrained asks the library that cut a model for its whole weights",
    older=(
        "self, save_directory, is_main_process, state_dict, push_to_hub, max_shard_size, variant, token, "
        "save_peft_format, save_original_format, kwargs",
    ),
)
def around_save_pretrained(
    original: Callable[..., None],
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    *arguments: Any,
    **options: Any,
) -> None:
    """Parts of weights are refused before they are written; at stage 3 only ranks that should write do.

    `accelerator.get_state_dict` gives the first rank the whole state dict and the others none, so these may hold parts.
    Before 5.15, every rank wrote the weights over those of the others, and read its own released ones for that.
    """
    if is_main_process:
        of = OF_ADAPTERS if getattr(self, "_hf_peft_config_loaded", False) else ()
        refuse_parts(self, dict(self.named_parameters()) if state_dict is None else state_dict, of)
    sharded = any(hasattr(parameter, HANDLE) for parameter in self.parameters())
    if is_main_process or not sharded or hasattr(self, "should_save_on_this_rank"):
        original(self, save_directory, is_main_process, state_dict, *arguments, **options)


@PATCHES.add(
    "revert_weight_conversion(model, state_dict)",
    without="models whose experts are packed may not be saved at stage 3",
    until="save_pretrained converts on the ranks that write, and on no others",
)
def around_reverting(original: Callable[..., dict[str, Any]], model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Skipped on ranks that write nothing: without values, or with parts of them, there is nothing to convert."""
    is_released = any(isinstance(value, ReleasedView) for value in state_dict.values())
    return state_dict if is_released or any(parts_among(model, state_dict)) else original(model, state_dict)


def around_distributing(original: Function, distributed_config: Any, *rest: Any, **named: Any) -> Any:
    """Under a ds.json, `DistributedConfig(ep_size=...)` means its section expert_parallel: weights are loaded as the
    stage wants them, and initialize() spreads the experts. Upstream makes DTensors, of which `zero.Init` knows nothing,
    and its gathers wait for each other."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.integrations.deepspeed import deepspeed_config

    if deepspeed_config() is None or distributed_config is None:
        return original(distributed_config, *rest, **named)
    if isinstance(distributed_config, dict):
        distributed_config = DistributedConfig.from_dict(distributed_config)
    if (getattr(distributed_config, "ep_size", None) or 1) > 1:
        distributed_config = left_to_engine(distributed_config)
    return original(distributed_config, *rest, **named)


if find_spec("transformers.distributed.mixin") is not None:  # before that, an engine could not do it instead
    PATCHES.add(
        "PreTrainedModel.prepare_distribute_model(distributed_config, device_map)",
        without="from_pretrained(distributed_config=DistributedConfig(ep_size=...)) beside a ds.json hangs or fails; "
        "write expert_parallel into the ds.json",
        until="from_pretrained leaves experts to the engine where there is a ds.json (transformers#45548)",
        older=("distributed_config, device_mesh, device_map",),
    )(around_distributing)
