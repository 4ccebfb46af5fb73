"""trl.trainer.utils: digests of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_zero.api.gathered_parameters import GatheredParameters, handles_of
from hf_zero.integration.patches import Patches

PATCHES = Patches("trl.trainer.utils")


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
