"""accelerate.state: the choice of device and back-end. With our engine, ranks on CPUs are ranks, joined by gloo."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from hf_zero.integration.patches import Function, Patches
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import set_rank_environment

PATCHES = Patches("accelerate.state")
_USE_CPU = "ACCELERATE_USE_CPU"
_PORT = 29500


@PATCHES.add(
    "PartialState._prepare_backend(self, cpu, sagemaker_dp, backend)",
    without="ranks on CPUs may each believe themselves alone",
    until="accelerate takes gloo for DeepSpeed where there is no accelerator, and reads MPI's and Slurm's variables",
)
def around_prepare_backend(
    original: Function, self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> Any:
    """Where there is no accelerator, upstream finds no back-end for DeepSpeed: every rank believes itself alone.

    It is also the moment before anybody asks which rank this is: what mpirun or srun have said is put into torchrun's
    variables, and gloo's interface is set where it would choose one without a route.
    """
    if _engine_is_wanted():
        set_rank_environment(os.environ, _PORT)
    name_gloo_interface()  # Trainer does not say before that it wants DeepSpeed on CPUs
    chosen, kind = original(self, cpu, sagemaker_dp, backend)
    if kind == "NO" and _engine_is_wanted() and int(os.environ.get("LOCAL_RANK", -1)) >= 0:
        return original(self, True, sagemaker_dp, backend)
    return chosen, kind


@PATCHES.add(
    "AcceleratorState.__init__(self, mixed_precision, cpu, dynamo_plugin, deepspeed_plugin, fsdp_plugin, "
    "torch_tp_plugin, megatron_lm_plugin, parallelism_config, _from_accelerator, kwargs)",
    without="ranks that are told to use the CPU train with DDP, and not with ds.json",
    until="accelerate keeps to DeepSpeed under `cpu=True`",
)
def around_state(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Upstream ignores DeepSpeed when the CPU is asked for, and trains with DDP."""
    if type(self)._shared_state or not _engine_is_wanted():
        return original(self, *args, **kwargs)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if not (bound.arguments.get("cpu") or _is_on(_USE_CPU)):
        return original(self, *args, **kwargs)
    _state_of_cpu_ranks(bound.arguments.get("kwargs", {}))
    bound.arguments["cpu"] = False
    use_cpu = os.environ.pop(_USE_CPU, None)
    try:
        original(*bound.args, **bound.kwargs)
    finally:
        if use_cpu is not None:
            os.environ[_USE_CPU] = use_cpu


def _state_of_cpu_ranks(options: dict[str, Any]) -> None:
    """The part of the state that knows of ranks and device; `options` are those of the process group."""
    from accelerate.state import PartialState

    if not PartialState._shared_state:
        PartialState(True, **options)


def _engine_is_wanted() -> bool:
    return _is_on("ACCELERATE_USE_DEEPSPEED")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")
