"""transformers.core_model_loading: how the tensors of a checkpoint become parameters of a quantized model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_zero.api.zero_init import ShardAsLoaded
from hf_zero.integration.patches import Function, Patches
from hf_zero.integration.patches.transformers import is_stage_3
from hf_zero.precision import is_packed, mark_packed, prepare_packed

PATCHES = Patches("transformers.core_model_loading")
_WITHOUT = "every rank loads a quantized model whole before stage 3 shards it"
_UNTIL = "from_pretrained shards quantized weights as it loads them"
_SHARD = "_hf_zero_shard_as_loaded"
"""Attribute of a model that is being loaded."""
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


@PATCHES.add(
    "convert_and_load_state_dict_in_model(model, state_dict, load_config, disk_offload_index)",
    without=_WITHOUT,
    until=_UNTIL,
    older=("model, state_dict, load_config, tp_plan, disk_offload_index",),
    since="transformers 5.17 or earlier",
    importers=("transformers.modeling_layers", "transformers.modeling_utils"),
)
def around_convert_and_load(
    original: Function, model: Any, state_dict: Any, load_config: Any, *rest: Any, **named: Any
) -> Any:
    """At stage 3, shard a quantized model as it is loaded.

    transformers builds it on the meta device, outside of `zero.Init`. Then every rank reads the files and quantizes one
    tensor after the other, so that nothing has to be sent. What is quantized already is read ahead in threads,
    which would bring all of them to the device before the first one is in shards.
    """
    from transformers.integrations.deepspeed import deepspeed_config

    if load_config.hf_quantizer is None or not is_stage_3():
        return original(model, state_dict, load_config, *rest, **named)
    shard = ShardAsLoaded(deepspeed_config())
    vars(model)[_SHARD] = shard
    try:
        with _without_threads():
            loaded = original(model, state_dict, load_config, *rest, **named)
    finally:
        del vars(model)[_SHARD]
    shard.end()
    return loaded


@contextmanager
def _without_threads() -> Iterator[None]:
    """Upstream has no other switch."""
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before


@PATCHES.add(
    "set_param_for_module(model, target_name, param_value, loading_info, hf_quantizer)",
    without=_WITHOUT,
    until=_UNTIL,
    older=("model, target_name, param_value, loading_info, distributed_operation, hf_quantizer",),
    since="transformers 5.17 or earlier",
)
def around_set_param(original: Function, model: Any, target_name: str, *rest: Any, **named: Any) -> None:
    """Shard what has just been loaded: plain parameters, and weights with their scales beside them. Tensors of a class
    of their own stay whole."""
    original(model, target_name, *rest, **named)
    shard = vars(model).get(_SHARD)
    if shard is not None:
        name, _, own = target_name.rpartition(".")
        module = model.get_submodule(name)
        mark_packed(module)
        prepare_packed(module)
        parameter = module._parameters.get(own)
        if type(parameter) is nn.Parameter or (parameter is not None and is_packed(parameter)):
            shard(parameter)
