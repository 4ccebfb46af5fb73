"""What an engine answers about its settings: batch sizes, precision, rates, ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.api.inputs import data_loader
from hf_zero.api.offload_states import OffloadStates
from hf_zero.comm import get_local_rank, get_rank, get_world_size
from hf_zero.config import Resolved
from hf_zero.step.assemble import Assembly


class EngineSettings(nn.Module):
    """The questions that scripts ask an engine, and the batch sizes that they may change. Names are DeepSpeed's."""

    def __init__(self, resolved: Resolved, assembly: Assembly | None) -> None:
        super().__init__()
        self._resolved = resolved
        self._assembly = assembly
        self._accumulation_steps = resolved.batch.accumulation_steps
        self._micro_batch_size = resolved.batch.micro_batch_size
        self._offload_states: OffloadStates | None = None

    def train_batch_size(self) -> int:
        return self._micro_batch_size * self._accumulation_steps * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Reach `train_batch_size` samples per update by changing the number of accumulation steps."""
        per_micro_step = self._micro_batch_size * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % per_micro_step:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a positive multiple of "
                f"micro batch {self._micro_batch_size} x world size {self.dp_world_size} = {per_micro_step}"
            )
        self._accumulation_steps = train_batch_size // per_micro_step

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward; the train batch size changes with it."""
        if micro_batch_size <= 0:
            raise ValueError(f"micro batch size must be positive, got {micro_batch_size}")
        self._micro_batch_size = micro_batch_size

    def gradient_clipping(self) -> float:
        return self._resolved.gradients.clip_norm

    def zero_optimization(self) -> bool:
        return self._resolved.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        return self._resolved.zero.stage

    def fp16_enabled(self) -> bool:
        return self._resolved.precision.model == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._resolved.precision.model == "bf16"

    def loss_scale(self) -> float:
        """The scale that the next backward uses; 1.0 where none is needed."""
        return float(self._training_parts("loss_scale").optimizer.loss_scale)

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return bool(self._training_parts("dynamic_loss_scale").optimizer.loss_scaler.dynamic)

    def amp_enabled(self) -> bool:
        """Whether forward runs under torch.autocast because the config asks for it."""
        return self._resolved.precision.autocast is not None

    def steps_per_print(self) -> int | None:
        return self._resolved.logging.steps_per_print

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether saving the model at stage 3 writes whole weights; below it every rank has them anyway."""
        return self._resolved.zero.stage == 3 and self._resolved.zero.gather.whole_on_save

    def get_lr(self) -> list[float | None]:
        """Current learning rate of every param group; None where the optimizer makes its own (Adafactor's relative)."""
        rates = [group["lr"] for group in self._training_parts("get_lr").optimizer.param_groups]
        return [None if rate is None else float(rate) for rate in rates]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of every param group."""
        groups = self._training_parts("get_mom").optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        return self._assembly.optimizer.optimizer if self._assembly is not None else None

    @property
    def local_rank(self) -> int:
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        return get_rank()

    @property
    def world_size(self) -> int:
        return get_world_size()

    @property
    def dp_world_size(self) -> int:
        return get_world_size()

    @property
    def mp_world_size(self) -> int:
        return 1

    def deepspeed_io(self, dataset: Any, collate_fn: Any = None) -> Any:
        """A DataLoader over this rank's part of `dataset`, in micro-batches."""
        drop_last = self._resolved.batch.drop_last
        return data_loader(dataset, self._micro_batch_size, collate_fn=collate_fn, drop_last=drop_last)

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Send to host memory what forward does not need, to make room for generation; the next step brings it back.

        Args:
            include: members of `OffloadStateTypeEnum`; default: all but the weights of the model.
            non_blocking: accepted; the copies are complete when this returns.
        """
        if str(getattr(device, "value", device)) != "cpu":
            raise ValueError(f"offload_states(device={device!r}): only host memory (cpu) serves")
        if self._offload_states is None:
            parts = self._training_parts("offload_states")
            self._offload_states = OffloadStates(parts.optimizer, parts.reducer)
        self._offload_states.send(include, pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has sent away; nothing if there is nothing."""
        if self._offload_states is not None:
            self._offload_states.bring_back()

    def _training_parts(self, caller: str) -> Assembly:
        if self._assembly is None:
            raise RuntimeError(
                f"engine.{caller}() needs an optimizer: give initialize() an optimizer, or an `optimizer` section in "
                "the config (or the engine has been destroyed)"
            )
        return self._assembly
