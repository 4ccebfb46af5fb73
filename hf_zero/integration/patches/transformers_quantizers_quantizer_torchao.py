"""transformers.quantizers.quantizer_torchao: what stage 3 cannot shard is refused before weights are read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hf_zero.integration.patches import Patches
from hf_zero.precision import WRAPPED_AT_STAGE_3

PATCHES = Patches("transformers.quantizers.quantizer_torchao")


@PATCHES.add(
    "TorchAoHfQuantizer.validate_environment(self, args, kwargs)",
    without="models that torchao is to quantise are refused at stage 3 only after they have been loaded",
    until="transformers asks for stage 3 there",
)
def around_validate_environment(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Raises ValueError under stage 3."""
    if sys.modules["transformers.integrations.deepspeed"].is_deepspeed_zero3_enabled():
        raise ValueError(f"TorchAoConfig at stage 3: {WRAPPED_AT_STAGE_3}.")
    original(self, *args, **kwargs)
