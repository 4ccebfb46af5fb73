"""Quantized weights on disk: as a compressed-tensors checkpoint if possible, else as safetensors with scales.

compressed-tensors (which transformers loads with the package of that name) stores int8 codes and symmetric scales per
output or per group of inputs of linear layers. If a weight does not fit this format, plain tensors are kept, and the
folder also contains codes, scales and zeros under names of our own, which `unpack` reads:

    NAME.codes   int8 (groups, values)     NAME.scale, NAME.zero   fp32 (groups, 1)     value = code * scale + zero

`init_compression` and `redundancy_clean`: compression for custom training loops, under DeepSpeed's names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_zero.comm import collectives_for, local_device
from hf_zero.config import ConfigError, Problem, load_config, resolve_extra
from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.clean import add_to_config, clean
from hf_zero.extras.compression.compressed_model import CompressedModel, compression_of
from hf_zero.extras.compression.feature import compress, take_over
from hf_zero.extras.compression.pruning import WeightBits, grid_of
from hf_zero.log import logger
from hf_zero.params.partitioning import unpartition


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Start compressing a model in place according to the config's compression_training; returns the same object.

    Call it before creating the optimizer, because it may add trained scores and remove layers. `initialize` does the
    same for a config that has the section, and accepts a model that is already prepared.

    Args:
        deepspeed_config: the whole ds.json, as a dict, path or JSON text.
        teacher_model: for layer_reduction: the model whose layers a smaller student copies; for distillation: the
            teacher. Default: the current model.

    Raises:
        ConfigError: if the section is invalid or does not fit the model.
    """
    _refuse(mpu)
    policy = resolve_extra(load_config(deepspeed_config), "compression")
    if policy is None:
        rule, fix = "enables no compression technique", "set enabled to true in a technique"
        raise ConfigError(Problem("compression_training", None, rule, fix))
    compress(model, policy, teacher_model)
    return model


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Make compression permanent, after training: write masks and quantization into the weights, and remove pruned
    structures together with the corresponding parts of related_modules. Collective at stage 3.

    Returns:
        The model with plain tensors and without hooks; `save_pretrained` writes what `from_pretrained` loads.

    Args:
        model: a model under compression, the engine that trained it, or a new model with trained weights loaded into
            it (l1's masks are then chosen by those weights).
    """
    _refuse(mpu)
    inner = getattr(model, "module", model)
    if inner is not model and callable(getattr(model, "destroy", None)):
        model.destroy()  # type: ignore[operator]
        model = inner
    compressed = _compressed(model, deepspeed_config)
    unpartition(model)
    clean(compressed)
    return model


def _compressed(model: nn.Module, deepspeed_config: Any) -> CompressedModel:
    """The compressed model; starts compression if necessary."""
    if compression_of(model) is None:
        init_compression(model, deepspeed_config)
    compressed = compression_of(model)
    assert compressed is not None
    return compressed


class CompressionScheduler:
    """Advances compression schedules in a loop without an engine: call `step()` after every update."""

    def __init__(self, model: nn.Module, compression_config: Any = None) -> None:
        compressed = compression_of(model)
        if compressed is None:
            raise WrongArgument("compression_scheduler(model): call init_compression(model, config) first")
        self._compressed = compressed

    @property
    def training_steps(self) -> int:
        """Number of updates so far."""
        return self._compressed.updates

    def before_update(self) -> None:
        """Update scores of snip_momentum; call it when gradients are ready, before the optimizer step."""
        self._compressed.follow_gradients(lambda parameter: parameter.grad)

    def step(self, step_zero_check: bool = False) -> None:
        """Count one update; with `step_zero_check`, nothing has been applied yet and nothing is done."""
        if not step_zero_check:
            self._compressed.learn_ranges(collectives_for(local_device()))
            self._compressed.advance(self._compressed.updates + 1)


compression_scheduler = CompressionScheduler


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> nn.Module:
    """Copy the teacher's layers named by layer_reduction into a student with that many layers; returns the student."""
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
        raise NotImplementedError("mpu=...: model parallel layers are not supported; leave it out")


WEIGHTS = "model.safetensors"
CODES = "quantized.safetensors"
# The format of weights that are not packed into wider integers; stated globally and for each group of layers.
_FORMAT = "int-quantized"
_FEWEST, _MOST = 3, 8


def save_quantized(model: Any, folder: str | Path, deepspeed_config: Any) -> str:
    """Clean a model under weight quantization and write its codes; returns "compressed-tensors" or "safetensors".

    Raises:
        WrongArgument: if no weight has 3 to 8 bits.
    """
    inner = getattr(model, "module", model)
    layers = _compressed(inner, deepspeed_config).layers
    bits = [layer.weight_bits for layer in layers if layer.weight_bits is not None]
    fitting = [weight for weight in bits if _FEWEST <= weight.rule.bits <= _MOST]
    if not fitting:
        raise WrongArgument("save_quantized: no weight has 3 to 8 bits in compression_training.weight_quantization")
    original = {weight.layer.name: weight.layer.parameter for weight in fitting}
    for weight in fitting:
        weight.advance(1 << 40)
    with torch.no_grad():
        grids = {weight.layer.name: _codes(weight, original[weight.layer.name]) for weight in fitting}
    cleaned = redundancy_clean(model, deepspeed_config)
    path = Path(folder)
    cleaned.save_pretrained(path)  # type: ignore[operator]
    kept = [weight for weight in fitting if weight.layer.parameter.shape == grids[weight.layer.name].shape]
    if all(_has_place(weight) for weight in kept) and len({weight.rule.bits for weight in kept}) == 1:
        _write_compressed_tensors(path, cleaned, kept, grids)
        return "compressed-tensors"
    _write_codes(path, kept, grids)
    return "safetensors"


class Codes(NamedTuple):
    """A quantized weight: code * scale + zero, group by group."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    shape: torch.Size


def _codes(one: WeightBits, weight: Tensor) -> Codes:
    groups = weight.detach().reshape(one.num_groups, -1).float()
    grid = grid_of(groups, one.rule.bits, symmetric=one.symmetric)
    shift = 0 if one.symmetric else 2 ** (one.rule.bits - 1)
    codes = (grid.codes(groups) - shift).to(torch.int8)
    return Codes(codes, grid.scale, grid.zero + shift * grid.scale, weight.shape)


def _has_place(one: WeightBits) -> bool:
    """Whether compressed-tensors supports the weight: 8 bits, symmetric, groups of whole outputs or of equal parts."""
    rows = one.layer.num_out if isinstance(one.layer.module, nn.Linear) else 0
    fits = rows and (rows % one.num_groups == 0 or one.num_groups % rows == 0)
    return bool(fits) and one.symmetric and one.rule.bits == 8


def _write_compressed_tensors(path: Path, model: nn.Module, kept: list[WeightBits], grids: dict[str, Codes]) -> None:
    tensors = load_file(path / WEIGHTS)
    strategies: dict[tuple[str, int | None], list[str]] = {}
    for weight in kept:
        name, rows, columns = weight.layer.name, weight.layer.num_out, weight.layer.num_in
        grid = grids[name]
        key: tuple[str, int | None] = ("channel", None)
        scale = grid.scale
        if weight.num_groups <= rows:
            scale = scale.repeat_interleave(rows // weight.num_groups, dim=0)
        else:
            per_row = weight.num_groups // rows
            scale, key = scale.view(rows, per_row), ("group", columns // per_row)
        strategies.setdefault(key, []).append(name)
        tensors[f"{name}.weight"] = grid.codes.view(grid.shape)
        tensors[f"{name}.weight_scale"] = scale.contiguous()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    quantized = {name for names in strategies.values() for name in names}
    ignored = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in quantized]
    groups = {
        f"group_{number}": {
            "targets": names,
            "format": _FORMAT,
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": kind, "group_size": size},
        }
        for number, ((kind, size), names) in enumerate(strategies.items())
    }
    section = {"quant_method": "compressed-tensors", "format": _FORMAT, "quantization_status": "compressed"}
    add_to_config(path, {"quantization_config": {**section, "config_groups": groups, "ignore": ignored}})


def _write_codes(path: Path, kept: list[WeightBits], grids: dict[str, Codes]) -> None:
    tensors: dict[str, Tensor] = {}
    shapes = {}
    for weight in kept:
        name, grid = weight.layer.name, grids[weight.layer.name]
        tensors |= {f"{name}.codes": grid.codes, f"{name}.scale": grid.scale, f"{name}.zero": grid.zero}
        shapes[name] = json.dumps([weight.layer.weight, *grid.shape])
    save_file(tensors, path / CODES, metadata=shapes)
    logger.info("%s has codes and scales of %d weights, in addition to the plain weights", path / CODES, len(kept))


def unpack(folder: str | Path) -> dict[str, Tensor]:
    """Dequantize `quantized.safetensors` in a folder: by module name, values of shape (groups, values)."""
    tensors = load_file(Path(folder) / CODES)
    names = [name.removesuffix(".codes") for name in tensors if name.endswith(".codes")]
    return {name: tensors[f"{name}.codes"] * tensors[f"{name}.scale"] + tensors[f"{name}.zero"] for name in names}
