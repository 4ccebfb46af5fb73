"""peft.utils.other: modules that are trained whole beside adapters."""

from __future__ import annotations

from typing import Any

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.integration.patches import Function, Patches

PATCHES = Patches("peft.utils.other")


@PATCHES.add(
    "ModulesToSaveWrapper.update(self, adapter_name, tied_module, kwargs)",
    without="modules_to_save may not work at stage 3",
    until="PEFT gathers wherever a parameter has a ds_id, instead of where it has no elements",
)
def around_update(original: Function, self: Any, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> Any:
    """PEFT copies the module, and gathers for it where a sharded weight says that it has no elements; ours never do."""
    with GatheredParameters(self.original_module.parameters()):
        return original(self, adapter_name, tied_module, **kwargs)
