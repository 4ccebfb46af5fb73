"""transformers.generation.utils: generate() under stage 3, however it was started."""

from __future__ import annotations

from torch import nn

from hf_zero.integration.patches import Function, Patches
from hf_zero.params.sharded_parameter import of

PATCHES = Patches("transformers.generation.utils")


@PATCHES.add(
    "is_fsdp_managed_module(module)",
    without="ranks whose texts end at different lengths may wait for each other in generate() at stage 3",
    until="generate() asks the parameters, and not a config object, whether they are sharded over ranks",
)
def around_is_fsdp_managed_module(original: Function, module: nn.Module) -> bool:
    """Ranks must go on together with sharded weights, however generate() was started.

    It asks for the stage in transformers' own config object, which a script on initialize() may not have, or whether
    FSDP shards the model. A rank whose text is complete then takes part in the others' gathers until all are.
    """
    return bool(original(module)) or any(of(parameter) is not None for parameter in module.parameters())
