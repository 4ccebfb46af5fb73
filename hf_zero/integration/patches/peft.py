"""peft: saving, merging and copying adapters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.gathered_parameters import GatheredParameters, handles_of
from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_set_full_fp32_param
from hf_zero.comm.parts import OF_ADAPTERS, refuse_parts
from hf_zero.integration.patches import Function, Patches
from hf_zero.log import logger
from hf_zero.params.partitioning import unpartition
from hf_zero.params.store import of
from hf_zero.precision import is_packed

# Saving adapters around tensor-parallel matrices, and prompts whose encoder is sharded by stage 3.
MODEL = Patches("peft.peft_model")


@MODEL.add(
    "PeftModel.save_pretrained(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, "
    "is_main_process, path_initial_model_for_weight_conversion, kwargs)",
    without="with tensor parallelism, save_pretrained without a state dict writes the parts that one rank holds, and a "
    "Trainer that saves a prompt at stage 3 hangs",
    until="PEFT asks the library that cut a model for its whole weights, and makes prompts from the state dict it gets",
)
def around_save_pretrained(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Without a state dict, PEFT would write this rank's parts, an adapter that cannot be loaded. Gathering here would
    wait for ranks that do not call.

    For a prompt PEFT writes the output of its encoder, regardless of the state dict, and the encoder would gather its
    shards from ranks that do not call. So the encoder runs with the weights of the state dict, and ranks that got none
    from `get_state_dict` do not run it.
    """
    values: Mapping[str, Tensor] | None = kwargs.get("state_dict")
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if values is None and given.get("is_main_process", True):
        refuse_parts(self, dict(self.named_parameters()), OF_ADAPTERS)
    encoders = getattr(self, "prompt_encoder", None)
    is_apart = "state_dict" in kwargs and encoders is not None and any(map(of, encoders.parameters()))
    if is_apart and values is None:
        return
    with _encoding_with(encoders, values if is_apart and values is not None else {}):
        original(self, *args, **kwargs)


@contextmanager
def _encoding_with(encoders: Any, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which prompts are computed with these weights, by encoders that gather nothing."""
    kept = dict(encoders.items()) if values else {}
    try:
        for name, encoder in kept.items():
            encoders[name] = _twin(encoder, values, f"prompt_encoder.{name}.")
        yield
    finally:
        for name, encoder in kept.items():
            encoders[name] = encoder


def _twin(module: nn.Module, values: Mapping[str, Tensor], prefix: str) -> nn.Module:
    """A copy of the module with other weights and without hooks."""
    twin = copy.copy(module)
    vars(twin).update({name: type(hooks)() for name, hooks in vars(module).items() if name.endswith("_hooks")})
    twin._parameters = {name: nn.Parameter(values[prefix + name], False) for name in module._parameters}
    twin._modules = {
        name: None if child is None else _twin(child, values, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return twin


# Merging at stage 3. A layer is gathered while it is merged, and the result is kept: PEFT writes into the base layer's
# weights, which are otherwise only gathered between an evaluation and the next training step.
TUNERS = Patches("peft.tuners.tuners_utils")
_NO_MERGE = "merging adapters may not work at stage 3"


@TUNERS.add("onload_layer(layer)", without=_NO_MERGE, until="PEFT gathers the layer itself, as it does for copies")
@contextmanager
def around_onload_layer(original: Callable[[Any], AbstractContextManager[Any]], layer: Any) -> Iterator[None]:
    """Gather a layer in `onload_layer`, the context in which PEFT merges and unmerges it. Collective at stage 3."""
    is_tuned = hasattr(layer, "base_layer") or hasattr(layer, "unload_and_optionally_merge_module")
    with original(layer), GatheredParameters(_in_shards(layer) if is_tuned else [], modifier_rank=0):
        yield


def _in_shards(layer: nn.Module) -> list[nn.Parameter]:
    """Sharded parameters not held yet: an outer context (TRL, for a temporary merge) decides about edits itself."""
    handles = ((parameter, of(parameter)) for parameter in layer.parameters())
    return [parameter for parameter, handle in handles if handle is not None and not handle.unshard_count]


@TUNERS.add(
    "BaseTuner.merge_and_unload(self, progressbar, safe_merge, adapter_names)",
    without=_NO_MERGE,
    until="nothing: a model that leaves PEFT has to know what of it stage 3 may keep unsharded",
)
def around_merge_and_unload(original: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Give the merged model plain parameters if stage3_max_live_parameters allows, because it needs no engine."""
    merged = original(self, *args, **options)
    limits = [handle.owner.max_live_numel for handle in map(of, merged.parameters()) if handle and handle.owner]
    if not limits:
        return merged
    numel = sum(parameter.numel() for parameter in merged.parameters())
    if numel <= min(limits):
        unpartition(merged)
    else:
        logger.warning(
            "merge_and_unload: the merged model has %d elements, more than stage3_max_live_parameters (%d) lets "
            "stay whole, and is kept in shards. To save it, on every rank: `with deepspeed.zero.GatheredParameters("
            "list(model.parameters())): model.save_pretrained(folder, is_main_process=...)`",
            numel,
            min(limits),
        )
    return merged


# Modules that are trained whole in addition to adapters.
WRAPPERS = Patches("peft.utils.other")


@WRAPPERS.add(
    "ModulesToSaveWrapper.update(self, adapter_name, tied_module, kwargs)",
    without="modules_to_save may not work at stage 3",
    until="PEFT gathers wherever a parameter has a ds_id, instead of where it has no elements",
)
def around_update(original: Function, self: Any, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> Any:
    """Gather for PEFT's copy of the module: PEFT only gathers weights of size 0, which hf_zero's never have."""
    with GatheredParameters(self.original_module.parameters()):
        return original(self, adapter_name, tied_module, **kwargs)


@WRAPPERS.add(
    "prepare_model_for_kbit_training(model, use_gradient_checkpointing, gradient_checkpointing_kwargs, "
    "auto_clear_cache)",
    without="prepare_model_for_kbit_training fails at stage 3",
    until="PEFT leaves dtypes to the engine at stage 3, or transformers does not shard quantized models",
    older=("model, use_gradient_checkpointing, gradient_checkpointing_kwargs",),
    importers=("peft", "peft.utils"),
)
def around_prepare_kbit(original: Function, model: nn.Module, *args: Any, **options: Any) -> Any:
    """Cast shards to fp32, as PEFT casts parameters that are not quantized by replacing their data."""
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        for handle in handles_of(model.parameters()):
            if handle.owner is None and handle.shard.dtype in _CAST and not is_packed(handle.parameter):
                handle.cast(torch.float32)
    return original(model, *args, **options)


_CAST = (torch.float16, torch.bfloat16)

# Embedding rows that are trained apart.
TOKENS = Patches("peft.tuners.trainable_tokens.layer")


@TOKENS.add(
    "TrainableTokensLayer._collect_token_weights(self, weight, rows, embed_dim)",
    without="trainable tokens at stage 3 only work on NVIDIA GPUs",
    until="PEFT copies the rows on the device of the weight",
)
def around_collect_token_weights(original: Function, self: Any, weight: Tensor, rows: Any, embed_dim: int) -> Tensor:
    """Copy the rows from the gathered weight, on each rank: PEFT broadcasts them through the current NVIDIA GPU."""
    with torch.no_grad(), GatheredParameters([weight]):
        return weight[rows].clone()


# AdaLoRA's ranks.
ADALORA = Patches("peft.tuners.adalora.layer")


@ADALORA.add(
    "RankAllocator.update_and_allocate(self, model, global_step, force_mask)",
    without="AdaLoRA does not work at stage 3",
    until="PEFT gathers the adapters that it reads and masks",
)
def around_update_and_allocate(
    original: Function, self: Any, model: nn.Module, global_step: int, force_mask: bool = False
) -> Any:
    """Gather the adapters: PEFT multiplies them by their gradients, and sets singular values (`lora_E`) to zero. These
    keep the rest of their masters, which have more bits. Collective."""
    values = [parameter for name, parameter in model.named_parameters() if "lora_E" in name]
    others = [parameter for name, parameter in model.named_parameters() if "lora_A" in name or "lora_B" in name]
    masters = [safe_get_full_fp32_param(parameter) for parameter in values]
    with GatheredParameters(others), GatheredParameters(values, modifier_rank=0):
        result = original(self, model, global_step, force_mask)
        masked = [parameter == 0 for parameter in values]
    for parameter, master, mask in zip(values, masters, masked, strict=True):
        if master is not None:
            safe_set_full_fp32_param(parameter, master.masked_fill_(mask, 0.0))
    return result
