"""`deepspeed.checkpointing`: recomputes activations in backward, like torch.utils.checkpoint.

`configure` sets where the inputs of a checkpointed call are kept until then; `hf_zero.activations` keeps them.

`CudaRNGStatesTracker` has named random states, with which tensor-parallel ranks draw different or equal numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_zero.activations.kept import CONFIGURED, CheckpointedCalls
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.torch_backend import NativeCollectives
from hf_zero.config.objects import section_of
from hf_zero.config.read import load_config
from hf_zero.config.schema.long_sequences import ActivationCheckpointing
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import runtime_of
from hf_zero.integration.compat.utils import warning_once

_MODEL_PARALLEL = "model-parallel-rng"


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
            Exception: if the name or seed already exists (the type is DeepSpeed's).
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
        """Context that draws from the state `name` and restores the previous state at the end."""
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
    """Seed the device equally on all ranks of a tensor-parallel group, and the tracker's state differently per rank."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + 2718 + CONFIGURED.tensor_rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed only the tracker's state."""
    with _tracker.fork():
        torch.manual_seed(seed + 2718 + CONFIGURED.tensor_rank)


def with_named_states(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that repeated calls draw the same numbers from the named states as the first call."""
    first: list[dict[str, torch.Tensor]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        now = _tracker.get_states()
        if not first:
            first.append(now)
            return function(*args, **kwargs)
        _tracker.set_states(dict(first[0]))
        try:
            return function(*args, **kwargs)
        finally:
            _tracker.set_states(now)

    return call if _tracker.states_ else function


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


_UNCONFIGURED = CheckpointedCalls(ActivationCheckpointing())


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
    """Set where `checkpoint` keeps inputs for backward, for the whole process.

    Args:
        mpu_: gives the ranks with the same activations (get_tensor_model_parallel_* or get_model_parallel_*), or None.
        deepspeed_config: path or dict, whose section activation_checkpointing applies if an argument is None.
        partition_activations: each rank of that group keeps a part; gathered again in backward.
        contiguous_checkpointing: keep inputs in one buffer for `num_checkpoints` calls.
        checkpoint_in_cpu: keep inputs in host memory, copied asynchronously.
        synchronize: wait for the device before and after each call.
        profile: log the duration of the calls of a forward and of its backward.

    Raises:
        ConfigError: for invalid values in the section.
        ValueError: for one buffer with an unknown number of calls.
    """
    given: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    config = {} if deepspeed_config is None else load_config(deepspeed_config)
    policy = section_of(ActivationCheckpointing, config, "activation_checkpointing")
    policy = policy.model_copy(update={name: value for name, value in given.items() if value is not None})
    if policy.contiguous_memory_optimization and not policy.number_checkpoints:
        raise ValueError(
            "contiguous_checkpointing (contiguous_memory_optimization) is on, and it is unknown how many calls its "
            "buffer has to hold: set num_checkpoints (number_checkpoints) to the number of calls of a forward"
        )
    group, why = _tensor_group(mpu_)
    if policy.partition_activations and group is None:
        warning_once(f"deepspeed.checkpointing.configure: partition_activations has no effect, {why}")
    CONFIGURED.tensor_rank = 0 if group is None else group.rank
    _use(CheckpointedCalls(policy, group=group))


def is_configured() -> bool:
    return CONFIGURED.calls is not None


def reset() -> None:
    """Free unused memory; called between iterations without backward."""
    if CONFIGURED.calls is not None:
        CONFIGURED.calls.release()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without saving its activations; backward recomputes it with the same random numbers.

    Arguments and results may be tensors, and anything that contains some: torch's reentrant checkpoint, which DeepSpeed
    resembles, gives no gradients to tensors in a dict, list or object.
    """
    return _calls().run(torch_checkpoint, with_named_states(function), *args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args)


class CheckpointFunction:
    """`checkpoint` as `CheckpointFunction.apply(function, all_outputs, *args)`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        outputs = checkpoint(run_function, *args)
        all_outputs += outputs if isinstance(outputs, tuple) else [outputs]
        return outputs


def set_num_layers(nlayers: int) -> None:
    """Set the number of calls in the buffer of contiguous_checkpointing."""
    _change(number_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `configure`'s partition_activations."""
    if partition_activation and _calls().group is None:
        warning_once(
            "partition_activations_in_checkpoint(True) has no effect: deepspeed.checkpointing.configure has been given "
            "no mpu whose ranks have the same activations"
        )
    _change(partition_activations=partition_activation)


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """Detach each tensor, move it to `device`, and keep requires_grad.

    Raises:
        RuntimeError: if `inputs` is not a tuple.
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"detach_variable takes a tuple, not {type(inputs).__name__}")
    return tuple(_detached(value, device) if isinstance(value, Tensor) else value for value in inputs)


def _detached(tensor: Tensor, device: Any) -> Tensor:
    moved = tensor if device is None else tensor.to(device=device)
    return moved.detach().requires_grad_(tensor.requires_grad)


def _calls() -> CheckpointedCalls:
    return CONFIGURED.calls or _UNCONFIGURED


def _change(**changes: Any) -> None:
    """Change the settings of later calls; inputs of earlier calls stay where they are."""
    if CONFIGURED.calls is not None:
        _use(CheckpointedCalls(CONFIGURED.calls.policy.model_copy(update=changes), group=CONFIGURED.calls.group))


def _use(calls: CheckpointedCalls) -> None:
    if CONFIGURED.calls is not None:
        CONFIGURED.calls.close()
    CONFIGURED.calls = calls


def _tensor_group(mpu: Any) -> tuple[Collectives | None, str]:
    """The ranks with the same activations, or the reason why there are none."""
    if mpu is None:
        return None, "there is no mpu that says which ranks have the same activations"
    kind = "tensor_model" if hasattr(mpu, "get_tensor_model_parallel_world_size") else "model"
    size = int(getattr(mpu, f"get_{kind}_parallel_world_size")())
    if size == 1:
        return None, "the tensor-parallel group of its mpu has one rank"
    if hasattr(mpu, "get_sequence_parallel_world_size") and kind == "model":
        # The mpu of Ulysses calls its sequence group a model-parallel group.
        return None, "ranks of a sequence-parallel group have different activations"
    return NativeCollectives(getattr(mpu, f"get_{kind}_parallel_group")()), ""
