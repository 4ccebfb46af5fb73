"""`deepspeed.checkpointing`: recomputation of activations in backward, as torch.utils.checkpoint does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_zero.config.reading.load import load_config
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.integration.compat.logs import warning_once

_MODEL_PARALLEL = "model-parallel-rng"
# What DeepSpeed does with saved activations, by argument and by key of the section activation_checkpointing.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


@dataclass
class _Settings:
    is_configured: bool = False


_settings = _Settings()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how activations are kept: they are recomputed from each call's inputs, which stay where they are.

    What would partition, move or merge the inputs has no effect, on results neither: a warning names it.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    section = load_config(deepspeed_config).get("activation_checkpointing") if deepspeed_config is not None else None
    from_file = section if isinstance(section, dict) else {}
    idle = [name for name, value in given.items() if (from_file.get(_KEYS[name]) if value is None else value)]
    if idle:
        warning_once(
            f"deepspeed.checkpointing.configure: no effect of {', '.join(idle)}: inputs of checkpointed calls stay "
            "whole and on their device"
        )
    _settings.is_configured = True


def is_configured() -> bool:
    return _settings.is_configured


def reset() -> None:
    """Nothing is kept between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without saving what is inside; backward runs it again, with the same random numbers."""
    return torch_checkpoint(function, *args, use_reentrant=not kwargs, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


class CheckpointFunction:
    """The call as others apply it: `CheckpointFunction.apply(function, all_outputs, *args)`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        outputs = torch_checkpoint(run_function, *args, use_reentrant=True)
        all_outputs += outputs if isinstance(outputs, tuple) else [outputs]
        return outputs


class CudaRNGStatesTracker:
    """Random states by name, for code whose ranks must draw different numbers; on the default device's generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """
        Raises:
            Exception: for a name or a seed that is there already (the type is DeepSpeed's).
        """
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        with _kept_state():
            torch.manual_seed(seed)
            self.states_[name] = _state()

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state `name` inside, and go on with the old one after."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        with _kept_state():
            _set_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = _state()


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and the tracker's state as the only rank of a model-parallel group does."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + 2718)


def set_num_layers(nlayers: int) -> None:
    """Accepted: nothing is planned by the number of layers."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    if partition_activation:
        warning_once("partition_activations_in_checkpoint(True): no effect, inputs of checkpointed calls stay whole")


def _state() -> torch.Tensor:
    return runtime_of(current_device()).random_state()


def _set_state(state: torch.Tensor) -> None:
    runtime_of(current_device()).set_random_state(state)


@contextlib.contextmanager
def _kept_state() -> Iterator[None]:
    kept, host = _state(), torch.get_rng_state()
    try:
        yield
    finally:
        _set_state(kept)
        torch.set_rng_state(host)
