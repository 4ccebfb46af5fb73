"""The wrapped model seen through an engine: where it is, how it is compiled, and its whole weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.engine_settings import EngineSettings
from hf_zero.checkpoint.whole_weights import save_whole_weights
from hf_zero.comm import collectives_for, get_rank
from hf_zero.log import logger
from hf_zero.params.consolidation import WHOLE_WEIGHTS_ARE_OFF, consolidated_state_dict
from hf_zero.params.store import ParameterStore


class EngineModule(EngineSettings):
    """What an engine offers of the model it wraps. Names are DeepSpeed's and torch's."""

    module: nn.Module
    device: torch.device
    _store: ParameterStore | None

    def to(self, *args: Any, **kwargs: Any) -> EngineModule:
        """Accepts what is already true. Moving or casting weights that live in flat buffers raises RuntimeError."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if self._store is None:
            self.module.to(*args, **kwargs)
            return self
        current = {parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point()}
        moves = device is not None and (device.type, device.index or 0) != (self.device.type, self.device.index or 0)
        if moves or (dtype is not None and current != {dtype}):
            raise RuntimeError(
                f"engine.to({device or ''}{' ' if device and dtype else ''}{dtype or ''}) would cut the weights off "
                "from the optimizer that trains them. Set bf16 in the config, choose the device before initialize(), "
                "or call engine.destroy() first when training is over."
            )
        return self

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the wrapped model in place with torch.compile."""
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's state dict with whole weights, on every rank. Collective at stage 3."""
        if self._resolved.zero.stage < 3:
            frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
            dropped = frozen if exclude_frozen_parameters else set()
            return {name: value for name, value in self.module.state_dict().items() if name not in dropped}
        return consolidated_state_dict(self.module, exclude_frozen=exclude_frozen_parameters, everywhere=True)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights in host memory of rank 0; None on the others. Collective. The name is accelerate's.

        Raises:
            ValueError: when stage3_gather_16bit_weights_on_model_save is false.
        """
        if not self.zero_gather_16bit_weights_on_model_save():
            raise ValueError(WHOLE_WEIGHTS_ARE_OFF)
        found = consolidated_state_dict(self.module, exclude_frozen=exclude_frozen_parameters)
        return found if get_rank() == 0 else None

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights in the model's dtype as one torch file; False when gathering is off. Collective."""
        if self._resolved.zero.stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning("save_16bit_model wrote nothing: %s", WHOLE_WEIGHTS_ARE_OFF)
            return False
        path, collectives = Path(save_dir) / save_filename, collectives_for(self.device)
        save_whole_weights(self.module, path, collectives, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model
