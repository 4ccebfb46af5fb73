"""DeepSpeed's memory estimators, with its names, signatures, formulas and printed tables.

They estimate DeepSpeed's memory: 18 bytes per parameter for 16-bit training with Adam, no activations, no buffers
(`deepspeed.runtime.zero.stage_1_and_2` and `stage3`, 0.19.8). Use `python -m hf_zero plan` for hf_zero's own memory.
P: parameters, Y: those of the largest layer, g: GPUs per node, N: nodes, G = gN, f: the buffer factor:

| stage, offload         | GPU bytes  | CPU bytes                                          |
|------------------------|------------|----------------------------------------------------|
| 2, optimizer           | 2P         | P max(4G, 16) f                                    |
| 2, none                | 2P + 18P/G | 4P g f                                             |
| 3, parameters and both | 4Y         | 18P/N f, or P max(4g, 18/N) f without zero.Init    |
| 3, optimizer           | 4Y + 2P/G  | 16P/N f, or P max(4g, 16/N) f                      |
| 3, none                | 4Y + 18P/G | 4Y g f, or 4P g f                                  |

Two bugs of DeepSpeed's output are not reproduced: devices are printed as `cpu ` with every Python (DeepSpeed prints
`OffloadDeviceEnum.cpu` since 3.11), and models on the meta device or sharded at stage 3 are counted in full.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from torch import nn

from hf_zero.params.store import of

_GIB = 2**30
_PURPOSE = "Estimated memory needed for params, optim states and gradients for a:"
_COLUMNS = "  per CPU  |  per GPU |   Options"


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(CPU bytes per node, GPU bytes per GPU) at stage 2."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        on_gpu = 2 * total_params
        on_cpu = total_params * max(4 * gpus, 16) * additional_buffer_factor
    else:
        on_gpu = 2 * total_params + int(18 * total_params / gpus)
        on_cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(on_cpu), int(on_gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(CPU, GPU, largest layer) bytes at stage 3. Parameters are only offloaded together with the optimizer.

    Args:
        largest_layer_params: own parameters of the largest single module.
        zero_init: whether the model is built in shards, so that no rank ever holds the full model.
    """
    gpus, node_share = num_nodes * num_gpus_per_node, 1 / num_nodes
    gathered = 4 * largest_layer_params
    if not cpu_offload:
        on_gpu = gathered + int(18 * total_params / gpus)
        whole = largest_layer_params if zero_init else total_params
        on_cpu = whole * 4 * num_gpus_per_node * additional_buffer_factor
        return int(on_cpu), int(on_gpu), int(gathered)
    per_parameter = 18 if cpu_offload_params else 16
    on_gpu = gathered if cpu_offload_params else gathered + int(2 * total_params / gpus)
    if zero_init:
        on_cpu = total_params * per_parameter * node_share * additional_buffer_factor
    else:
        on_cpu = total_params * max(4 * num_gpus_per_node, per_parameter * node_share) * additional_buffer_factor
    return int(on_cpu), int(on_gpu), int(gathered)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a model."""
    total, _ = count_parameters(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a number of parameters."""
    lines = [*_heading(num_nodes, num_gpus_per_node, f"{int(total_params / 1e6)}M total params.")]
    for offload in (True, False):
        on_cpu, on_gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        lines.append(_row(on_cpu, on_gpu, f"offload_optimizer={_device(offload)}"))
    _print(lines)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 3 for a model."""
    total, largest = count_parameters(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for numbers of parameters."""
    model = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params."
    lines = [*_heading(num_nodes, num_gpus_per_node, model)]
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            on_cpu, on_gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                zero_init,
                additional_buffer_factor,
            )
            devices = f"offload_param={_device(offload_params)}, offload_optimizer={_device(offload)}"
            lines.append(_row(on_cpu, on_gpu, f"{devices}, zero_init={int(zero_init)}"))
    _print(lines)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all parameters, the most parameters that a single module owns). Shared memory counts once; parameters sharded at
    stage 3 count in full."""
    total = sum({_memory(parameter): _numel(parameter) for parameter in model.parameters()}.values())
    own = (sum(map(_numel, module.parameters(recurse=False))) for module in model.modules())
    return total, max(own, default=0)


def _numel(parameter: nn.Parameter) -> int:
    handle = of(parameter)
    return parameter.numel() if handle is None else math.prod(handle.shape)


def _memory(parameter: nn.Parameter) -> tuple[str, int]:
    """A key that identifies the memory of a parameter."""
    if of(parameter) is not None or parameter.is_meta or parameter.data_ptr() == 0:
        return "object", id(parameter)
    return "address", parameter.data_ptr()


def _heading(num_nodes: int, num_gpus: int, model: str) -> Iterator[str]:
    yield _PURPOSE
    nodes, gpus = (f"{count} {word}{'s' * (count > 1)}" for count, word in ((num_nodes, "node"), (num_gpus, "GPU")))
    yield f"HW: Setup with {nodes}, {gpus} per node."
    yield f"SW: Model with {model}"
    yield _COLUMNS


def _row(on_cpu: int, on_gpu: int, options: str) -> str:
    return f" {on_cpu / _GIB:7.2f}GB | {on_gpu / _GIB:6.2f}GB | {options}"


def _device(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
