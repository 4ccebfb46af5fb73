"""`init_compression` and `redundancy_clean`: compression for loops of one's own, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_zero.comm import collectives_for, local_device
from hf_zero.config import ConfigError, Problem, load_config, resolve_extra
from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.clean import clean
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.feature import compress
from hf_zero.extras.compression.layer_reduction import take_over
from hf_zero.params.partitioning import unpartition


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Begin to compress a model, in place, as the config's compression_training says; returns the same object.

    Call it before the optimizer is made: it may add scores to be trained, and take layers away. `initialize` does the
    same by itself for a config that has the section, and accepts a model that this has prepared.

    Args:
        deepspeed_config: the whole ds.json, as a dict, path or JSON text.
        teacher_model: for layer_reduction: whose layers a student with fewer of them takes over; for distillation: the
            teacher. Without one it is the model as it is now.

    Raises:
        ConfigError: the section is wrong, or does not fit the model.
    """
    _refuse(mpu)
    policy = resolve_extra(load_config(deepspeed_config), "compression")
    if policy is None:
        rule, fix = "asks for no compression: no technique is enabled", "set enabled to true in a technique"
        raise ConfigError(Problem("compression_training", None, rule, fix))
    compress(model, policy, teacher_model)
    return model


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make compression permanent: masks and bits go into the weights, and what masks drop leaves the model, together
    with the modules that related_modules name. Training is over then. Collective at stage 3.

    Returns:
        The model, with plain tensors and without hooks; `save_pretrained` writes what `from_pretrained` loads.

    Args:
        model: one under compression, the engine that trained it, or a fresh model with trained weights loaded into it
            (l1's masks are then chosen by those weights).
    """
    _refuse(mpu)
    inner = getattr(model, "module", model)
    if inner is not model and callable(getattr(model, "destroy", None)):
        model.destroy()  # type: ignore[operator]
        model = inner
    compressed = compression_of(model)
    if compressed is None:
        init_compression(model, deepspeed_config)
        compressed = compression_of(model)
    assert compressed is not None
    unpartition(model)
    clean(compressed)
    return model


class CompressionScheduler:
    """Moves compression on in a loop that has no engine: `step()` after every update. An engine does it by itself."""

    def __init__(self, model: nn.Module, compression_config: Any = None) -> None:
        compressed = compression_of(model)
        if compressed is None:
            raise WrongArgument("compression_scheduler(model): call init_compression(model, config) first")
        self._compressed = compressed

    @property
    def training_steps(self) -> int:
        """Updates so far."""
        return self._compressed.updates

    def before_update(self) -> None:
        """For snip_momentum: gradients are there, and are about to be applied."""
        self._compressed.follow_gradients(lambda parameter: parameter.grad)

    def step(self, step_zero_check: bool = False) -> None:
        """An update is over; with `step_zero_check` nothing has been applied yet."""
        if not step_zero_check:
            self._compressed.learn_ranges(collectives_for(local_device()))
            self._compressed.advance(self._compressed.updates + 1)


compression_scheduler = CompressionScheduler


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Copy the teacher's layers that layer_reduction names into a student that was built with as many; returns it."""
    policy = resolve_extra(load_config(deepspeed_config), "compression")
    if policy is None or policy.layers is None:
        rule, fix = "is not enabled", "set compression_training.layer_reduction.enabled to true"
        raise ConfigError(Problem("compression_training.layer_reduction", None, rule, fix))
    take_over(student_model, teacher_model, policy.layers)
    return student_model


@torch.no_grad()
def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace transformers' Conv1D by nn.Linear with transposed weights, in place. Compression does not need it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, convert_type):
                weight: Any = child.weight
                linear = nn.Linear(weight.shape[0], weight.shape[1], device=weight.device, dtype=weight.dtype)
                linear.weight.copy_(weight.t())
                linear.bias.copy_(child.bias)  # type: ignore[arg-type]
                setattr(module, name, linear)
    return model


def _refuse(mpu: Any) -> None:
    if mpu is not None:
        raise NotImplementedError("mpu=...: model parallel layers are not built; leave it out")
