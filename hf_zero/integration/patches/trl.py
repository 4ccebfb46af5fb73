"""trl.trainer.utils: digests of models. trl.generation.vllm_generation: weights with adapters for vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hf_zero.api.gathered_parameters import (
    GatheredParameters,
    adapted_layers,
    gathered_weights,
    handles_of,
    names_without_adapters,
)
from hf_zero.integration.patches import Patches

PATCHES = Patches("trl.trainer.utils")
GENERATION = Patches("trl.generation.vllm_generation")


@PATCHES.add(
    "hash_module(module)",
    without="DPOTrainer and KTOTrainer cannot compute log-probabilities of the reference beforehand at stage 3",
    until="TRL gathers the weights from which it makes the key of what it has computed",
)
def around_hash_module(original: Callable[[Any], str], module: nn.Module) -> str:
    """The digest of whole weights, which are gathered one by one, because the model may not fit."""
    return original(_Whole(module) if handles_of(module.parameters()) else module)


class _Whole:
    """A view of a module with sharded parameters for digests."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        entries = self._module.state_dict(keep_vars=True).items()
        return {name: _Sharded(value) if handles_of([value]) else value.detach() for name, value in entries}


class _Sharded:
    """A parameter whose values are gathered on first access from the host. Collective then."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def cpu(self) -> Tensor:
        with GatheredParameters([self._parameter]):
            return self._parameter.detach().cpu().clone()  # on a CPU, cpu() does not copy


@GENERATION.add(
    "VLLMGeneration._iter_named_params(self)",
    without="the whole model is gathered to send weights with adapters to vLLM, and the last of them arrive without "
    "adapters",
    until="TRL merges the adapters of one weight after the other, into new tensors",
)
def around_iter_named_params(original: Callable[[Any], Any], self: Any) -> Iterator[tuple[str, Tensor]]:
    """Merge adapters into each weight as it is gathered. Upstream gathers the whole model and merges in place; when
    the iteration ends it unmerges, although vLLM's sender has not sent what it collected last."""
    if self.accelerator.distributed_type != "DEEPSPEED" or not hasattr(self.model, "peft_config"):
        return original(self)  # type: ignore[no-any-return]
    try:
        adapted_layers(self.model)
    except ValueError:  # DoRA and quantized weights are not sums
        return original(self)  # type: ignore[no-any-return]
    return _merged(self)


def _merged(generation: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield merged weights under the names that vLLM expects, tied ones once. Collective."""
    first_names = {names[0] for names in names_without_adapters(generation.model).values()}
    for name, values in gathered_weights(generation.model):
        if name in first_names:
            yield generation._fix_param_name_to_vllm(name), values
