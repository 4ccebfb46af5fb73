"""The wrapped model seen through an engine: where it is, and its whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import ParallelGroups
from hf_zero.config import ZeroPolicy
from hf_zero.log import logger
from hf_zero.params.store import ParameterStore

WHOLE_WEIGHTS_ARE_OFF = (
    "at stage 3 whole weights are gathered only if zero_optimization.stage3_gather_16bit_weights_on_model_save is "
    "true: set it, or save a checkpoint and run `python -m hf_zero.zero_to_fp32 CHECKPOINT_DIR OUTPUT`"
)


class ModuleView:
    """What an engine offers of the model it wraps. Names are DeepSpeed's and torch's.

    Attributes:
        store: where the weights are; None where the model is as it came, or again its owner's (after `destroy`).
    """

    def __init__(
        self,
        module: nn.Module,
        store: ParameterStore | None,
        device: torch.device,
        zero: ZeroPolicy,
        groups: ParallelGroups,
    ) -> None:
        self.store = store
        self._world = groups.world
        self._is_cut = groups.holds_parts
        self._module = module
        self._device = device
        self._zero = zero

    def to(self, *args: Any, **kwargs: Any) -> None:
        """As torch's method where that is possible; accepts what is already true.

        Raises:
            RuntimeError: for what would move or cast weights that live in flat buffers.
        """
        if self.store is None:
            self._module.to(*args, **kwargs)
            return
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        current = {parameter.dtype for parameter in self._module.parameters() if parameter.is_floating_point()}
        here = self._device.type, self._device.index or 0
        moves = device is not None and (device.type, device.index or 0) != here
        if moves or (dtype is not None and current != {dtype}):
            raise RuntimeError(
                f"engine.to({device or ''}{' ' if device and dtype else ''}{dtype or ''}) would cut the weights off "
                "from the optimizer that trains them. Set bf16 in the config, choose the device before initialize(), "
                "or call engine.destroy() first when training is over."
            )

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether saving the model writes whole weights where no rank has them: at stage 3 if the config says so, and
        always where ranks hold parts of matrices; elsewhere every rank has them anyway."""
        if self._zero.stage == 3:
            return self._zero.keys.stage3_gather_16bit_weights_on_model_save
        return self._is_cut

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's state dict with whole weights, on every rank. Collective at stage 3, and among ranks that hold
        parts of matrices."""
        if self._zero.stage < 3 and not self._is_cut:
            frozen = {name for name, p in self._module.named_parameters() if not p.requires_grad}
            dropped = frozen if exclude_frozen_parameters else set()
            return {name: value for name, value in self._module.state_dict().items() if name not in dropped}
        return self._consolidated(keeps=True, exclude_frozen=exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """As `consolidated`: who calls it by this name asked stage3_gather_16bit_weights_on_model_save (accelerate)
        or wants the weights whatever it says (Trainer with adapters, OpenRLHF)."""
        return self.consolidated(exclude_frozen_parameters)

    def consolidated(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights in host memory of rank 0; None on the others. Collective."""
        keeps = self._world.rank == 0
        found = self._consolidated(keeps=keeps, exclude_frozen=exclude_frozen_parameters)
        return found if keeps else None

    def _consolidated(self, *, keeps: bool, exclude_frozen: bool) -> dict[str, Tensor]:
        from hf_zero.params.consolidation import consolidated_state_dict  # what no step needs

        return consolidated_state_dict(self._module, keeps=keeps, exclude_frozen=exclude_frozen)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights in the model's dtype as one torch file; False when gathering is off. Collective."""
        if self._zero.stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning("save_16bit_model wrote nothing: %s", WHOLE_WEIGHTS_ARE_OFF)
            return False
        from hf_zero.checkpoint.consolidate import save_whole_weights

        path = Path(save_dir) / save_filename
        save_whole_weights(self._module, path, self._world, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model
