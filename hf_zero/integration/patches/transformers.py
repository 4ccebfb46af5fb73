"""transformers, except its Trainer and its integration of DeepSpeed."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm.parts import OF_ADAPTERS, parts_among, refuse_parts
from hf_zero.integration.huggingface.experts import left_to_engine
from hf_zero.integration.patches import Function, Patches
from hf_zero.log import logger
from hf_zero.params.stand_ins import ReleasedView
from hf_zero.params.store import HANDLE, of
from hf_zero.precision import WRAPPED_AT_STAGE_3
from hf_zero.sequence.forwards import asked_for_documents
from hf_zero.tensor.layers import check_random_states

# Loading and saving models that stage 3 has sharded.
MODELS = Patches("transformers.modeling_utils")
NOTED = "_hf_zero_unexpected_keys"
"""Attribute of a model that is being loaded: keys of the checkpoint that have no place in it."""


@MODELS.add(
    "PreTrainedModel._adjust_missing_and_unexpected_keys(self, loading_info)",
    without="keys of a checkpoint that the model does not have are passed over in silence at stage 3",
    until="_load_state_dict_into_zero3_model reports unexpected keys itself",
)
def around_adjust_keys(original: Callable[..., None], self: Any, loading_info: Any) -> None:
    """Add keys recorded while loading at stage 3 to the loading report."""
    loading_info.unexpected_keys |= vars(self).pop(NOTED, set())
    original(self, loading_info)


@MODELS.add(
    "PreTrainedModel.initialize_weights(self)",
    without="models with a parametrization (weight norm) cannot be loaded at stage 3",
    until="transformers gathers the tensors of a parametrization, or does not read weights that are loaded",
)
def around_initialize_weights(original: Callable[..., None], self: Any) -> None:
    """Weights missing in a checkpoint are initialised by methods that first read every weight, including parametrized
    ones, which are computed from others."""
    with GatheredParameters(behind_parametrizations(self)):
        original(self)


def behind_parametrizations(model: nn.Module) -> list[nn.Parameter]:
    """The parameters behind parametrized weights."""
    parametrized: list[Any] = [module for module in model.modules() if hasattr(module, "parametrizations")]
    return [parameter for module in parametrized for parameter in module.parametrizations.parameters()]


@MODELS.add(
    "caching_allocator_warmup(model, expanded_device_map, hf_quantizer)",
    without="loading a quantized model at stage 3 first reserves the device memory of the whole model",
    until="from_pretrained shards quantized weights as it loads them",
)
def around_warmup(original: Callable[..., None], model: Any, expanded_device_map: Any, hf_quantizer: Any) -> None:
    """Reserve nothing for a quantized model that is sharded as it is loaded. (Others are built under `zero.Init`, where
    upstream has no device map.)"""
    if hf_quantizer is None or not is_stage_3():
        original(model, expanded_device_map, hf_quantizer)


def is_stage_3() -> bool:
    """Whether transformers knows of a config at stage 3."""
    return bool(sys.modules["transformers.integrations.deepspeed"].is_deepspeed_zero3_enabled())


@MODELS.add(
    "PreTrainedModel.tie_weights(self, missing_keys, recompute_mapping)",
    without="a checkpoint that has a tied weight under both of its names cannot be loaded at stage 3",
    until="tie_weights gathers the weights that it compares",
)
def around_tie_weights(
    original: Callable[..., None], self: Any, missing_keys: set[str] | None = None, recompute_mapping: bool = True
) -> None:
    """Gather tied weights that a checkpoint has under several names, because upstream ties only equal ones."""
    names = set[str]()
    if missing_keys is not None:
        pairs = (getattr(self, "all_tied_weights_keys", None) or {}).items()
        names = {name for pair in pairs if missing_keys.isdisjoint(pair) for name in pair}
    named = self.named_parameters(remove_duplicate=False) if names else ()
    with GatheredParameters([parameter for name, parameter in named if name in names]):
        original(self, missing_keys, recompute_mapping)


@MODELS.add(
    "PreTrainedModel.resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)",
    without="the embedding of a quantized model cannot be resized at stage 3",
    until="from_pretrained shards quantized weights as it loads them, and resizing gathers where there are shards",
)
def around_resize(original: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Resize the embedding of a quantized model as that of others: upstream gathers no weights if there is a quantizer,
    because it does not shard them."""
    quantizer = getattr(self, "hf_quantizer", None)
    if quantizer is None or not any(of(parameter) for parameter in self.parameters()):
        return original(self, *args, **options)
    self.hf_quantizer = None
    try:
        return original(self, *args, **options)
    finally:
        self.hf_quantizer = quantizer


@MODELS.add(
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
    """Reject parts of weights before they are written; at stage 3 only ranks that should write do.

    `accelerator.get_state_dict` gives the first rank the whole state dict and the others none, so these may hold parts.
    Before 5.15, every rank overwrote the others' files, and read its own released weights for that.
    """
    if is_main_process:
        words = OF_ADAPTERS if getattr(self, "_hf_peft_config_loaded", False) else ()
        refuse_parts(self, dict(self.named_parameters()) if state_dict is None else state_dict, words)
    sharded = any(hasattr(parameter, HANDLE) for parameter in self.parameters())
    if is_main_process or not sharded or hasattr(self, "should_save_on_this_rank"):
        original(self, save_directory, is_main_process, state_dict, *arguments, **options)


@MODELS.add(
    "revert_weight_conversion(model, state_dict)",
    without="models whose experts are packed may not be saved at stage 3",
    until="save_pretrained converts on the ranks that write, and on no others",
)
def around_reverting(original: Callable[..., dict[str, Any]], model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Skip the conversion on ranks that write nothing, which have no values or only parts of them."""
    is_released = any(isinstance(value, ReleasedView) for value in state_dict.values())
    return state_dict if is_released or any(parts_among(model, state_dict)) else original(model, state_dict)


def around_distributing(original: Function, distributed_config: Any, *rest: Any, **named: Any) -> Any:
    """With a ds.json, `DistributedConfig(ep_size=...)` means its section expert_parallel: weights are loaded as the
    stage requires, and initialize() distributes the experts. Upstream creates DTensors, which `zero.Init` does not
    support, and its gathers deadlock."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.integrations.deepspeed import deepspeed_config

    if deepspeed_config() is None or distributed_config is None:
        return original(distributed_config, *rest, **named)
    if isinstance(distributed_config, dict):
        distributed_config = DistributedConfig.from_dict(distributed_config)
    if (getattr(distributed_config, "ep_size", None) or 1) > 1:
        distributed_config = left_to_engine(distributed_config)
    return original(distributed_config, *rest, **named)


if find_spec("transformers.distributed.mixin") is not None:  # older versions cannot leave it to the engine
    MODELS.add(
        "PreTrainedModel.prepare_distribute_model(distributed_config, device_map)",
        without="from_pretrained(distributed_config=DistributedConfig(ep_size=...)) beside a ds.json hangs or fails; "
        "write expert_parallel into the ds.json",
        until="from_pretrained leaves experts to the engine where there is a ds.json (transformers#45548)",
        older=("distributed_config, device_mesh, device_map",),
    )(around_distributing)


GENERATION = Patches("transformers.generation.utils")


@GENERATION.add(
    "is_fsdp_managed_module(module)",
    without="ranks whose texts end at different lengths may wait for each other in generate() at stage 3",
    until="generate() asks the parameters, and not a config object, whether they are sharded over ranks",
)
def around_is_fsdp_managed_module(original: Function, module: nn.Module) -> bool:
    """Ranks must continue together with sharded weights, however generate() was called.

    generate() checks the stage in transformers' own config object, which a script with initialize() may not have, or
    whether FSDP shards the model. A rank whose text is complete then takes part in the others' gathers until all are.
    """
    return bool(original(module)) or any(of(parameter) is not None for parameter in module.parameters())


@GENERATION.add(
    "GenerationMixin._sample(self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, "
    "streamer, model_kwargs)",
    without="ranks that hold parts of a model may draw different tokens in generate(), and wait for each other",
    until="transformers draws tokens once for all ranks that hold parts of a model",
)
def around_sample(
    original: Function,
    self: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Before tokens are drawn, compare the random states of ranks that hold parts of the same matrices."""
    if generation_config.do_sample:
        check_random_states(self, input_ids)
    return original(self, input_ids, logits_processor, stopping_criteria, generation_config, *rest, **named)


MASKS = Patches("transformers.masking_utils")


@MASKS.add(
    "find_packed_sequence_indices(position_ids)",
    without="packed documents attend to one another where ranks share sequences",
    until="transformers hands the position ids on to the mask function of an attention implementation",
)
def around_find_packed(original: Function, position_ids: Any) -> Any:
    """A rank's part of a row may not show where documents start; the mask is computed from the whole row."""
    return None if asked_for_documents() else original(position_ids)


TORCHAO = Patches("transformers.quantizers.quantizer_torchao")


@TORCHAO.add(
    "TorchAoHfQuantizer.validate_environment(self, args, kwargs)",
    without="models that torchao is to quantize are refused at stage 3 only after they have been loaded",
    until="transformers asks for stage 3 there",
)
def around_validate_environment(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Raises ValueError under stage 3."""
    if is_stage_3():
        raise ValueError(f"TorchAoConfig at stage 3: {WRAPPED_AT_STAGE_3}.")
    original(self, *args, **kwargs)


FOLDERS = Patches("transformers.trainer_utils")
_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@FOLDERS.add(
    "get_last_checkpoint(folder)",
    without="a checkpoint that was being written when the job died may be taken for the newest",
    until="get_last_checkpoint passes over folders without trainer_state.json",
    importers=("transformers", "transformers.trainer"),
)
def around_get_last_checkpoint(original: Callable[[str], str | None], folder: str) -> str | None:
    """Skip a checkpoint that was being written when the job died: Trainer writes trainer_state.json last, and cannot
    resume without it."""
    newest = original(folder)
    if newest is None or os.path.exists(os.path.join(newest, _STATE)):
        return newest
    names = {int(match[1]): match[0] for match in map(_NAME.fullmatch, os.listdir(folder)) if match}
    complete = [step for step, name in names.items() if os.path.exists(os.path.join(folder, name, _STATE))]
    if not complete:
        return newest  # maybe not written by Trainer
    chosen = os.path.join(folder, names[max(complete)])
    _say_once(newest, chosen)
    return chosen


@functools.cache
def _say_once(newest: str, chosen: str) -> None:
    """Warn once, because scripts query the newest checkpoint and Trainer queries it again."""
    logger.warning("%s is incomplete (no %s: the job ended while saving); resuming from %s", newest, _STATE, chosen)
