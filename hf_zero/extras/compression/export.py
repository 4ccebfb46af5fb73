"""Quantised weights on disk: as a compressed-tensors checkpoint where one fits, else as safetensors with scales.

compressed-tensors (which transformers loads with the package of that name) has int8 codes and scales per output or per
group of inputs, symmetric, for linear layers. Where a weight does not fit into that, plain tensors stay, and the folder
also has codes, scales and zeros under names of our own, which `unpack` reads:

    NAME.codes   int8 (groups, values)     NAME.scale, NAME.zero   fp32 (groups, 1)     value = code * scale + zero
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.bits import WeightBits, grid_of
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.entry import init_compression, redundancy_clean
from hf_zero.log import logger

WEIGHTS = "model.safetensors"
CODES = "quantized.safetensors"
# Of weights that are not packed into wider integers; said once for all, and once for each group of layers.
_FORMAT = "int-quantized"
_FEWEST, _MOST = 3, 8


def save_quantized(model: Any, folder: str | Path, deepspeed_config: Any) -> str:
    """Clean a model under weight quantisation and write its codes; returns "compressed-tensors" or "safetensors".

    Raises:
        WrongArgument: no weight is quantised.
    """
    inner = getattr(model, "module", model)
    if compression_of(inner) is None:
        init_compression(inner, deepspeed_config)
    compressed = compression_of(inner)
    assert compressed is not None
    bits = [layer.weight_bits for layer in compressed.layers if layer.weight_bits is not None]
    fitting = [one for one in bits if _FEWEST <= one.rule.bits <= _MOST]
    if not fitting:
        raise WrongArgument("save_quantized: no weight has 3 to 8 bits in compression_training.weight_quantization")
    original = {one.layer.name: one.layer.parameter for one in fitting}
    for one in fitting:
        one.advance(1 << 40)
    with torch.no_grad():
        grids = {one.layer.name: _codes(one, original[one.layer.name]) for one in fitting}
    cleaned = redundancy_clean(model, deepspeed_config)
    path = Path(folder)
    cleaned.save_pretrained(path)  # type: ignore[operator]
    kept = [one for one in fitting if one.layer.parameter.shape == grids[one.layer.name].shape]
    if all(_has_place(one) for one in kept) and len({one.rule.bits for one in kept}) == 1:
        _write_compressed_tensors(path, cleaned, kept, grids)
        return "compressed-tensors"
    _write_codes(path, kept, grids)
    return "safetensors"


class Codes:
    """A quantised weight: code * scale + zero, group by group."""

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, shape: torch.Size) -> None:
        self.codes, self.scale, self.zero, self.shape = codes, scale, zero, shape


def _codes(one: WeightBits, weight: Tensor) -> Codes:
    groups = weight.detach().reshape(one.num_groups, -1).float()
    grid = grid_of(groups, one.rule.bits, symmetric=one.policy.symmetric)
    shift = 0 if one.policy.symmetric else 2 ** (one.rule.bits - 1)
    codes = (grid.codes(groups) - shift).to(torch.int8)
    return Codes(codes, grid.scale, grid.zero + shift * grid.scale, weight.shape)


def _has_place(one: WeightBits) -> bool:
    """Whether compressed-tensors can say it: 8 bits, symmetric, whole outputs or equal parts of them."""
    rows = one.layer.num_out if isinstance(one.layer.module, nn.Linear) else 0
    fits = rows and (rows % one.num_groups == 0 or one.num_groups % rows == 0)
    return bool(fits) and one.policy.symmetric and one.rule.bits == 8


def _write_compressed_tensors(path: Path, model: nn.Module, kept: list[WeightBits], grids: dict[str, Codes]) -> None:
    tensors = load_file(path / WEIGHTS)
    strategies: dict[tuple[str, int | None], list[str]] = {}
    for one in kept:
        name, rows, columns = one.layer.name, one.layer.num_out, one.layer.num_in
        found = grids[name]
        key: tuple[str, int | None] = ("channel", None)
        scale = found.scale
        if one.num_groups <= rows:
            scale = scale.repeat_interleave(rows // one.num_groups, dim=0)
        else:
            per_row = one.num_groups // rows
            scale, key = scale.view(rows, per_row), ("group", columns // per_row)
        strategies.setdefault(key, []).append(name)
        tensors[f"{name}.weight"] = found.codes.view(found.shape)
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
    _add_to_config(path, {**section, "config_groups": groups, "ignore": ignored})


def _write_codes(path: Path, kept: list[WeightBits], grids: dict[str, Codes]) -> None:
    tensors: dict[str, Tensor] = {}
    shapes = {}
    for one in kept:
        name, found = one.layer.name, grids[one.layer.name]
        tensors |= {f"{name}.codes": found.codes, f"{name}.scale": found.scale, f"{name}.zero": found.zero}
        shapes[name] = json.dumps([one.layer.weight, *found.shape])
    save_file(tensors, path / CODES, metadata=shapes)
    logger.info("%s has codes and scales of %d weights beside the plain ones", path / CODES, len(kept))


def unpack(folder: str | Path) -> dict[str, Tensor]:
    """The values of `quantized.safetensors` in a folder, by parameter name without the weight's own, 2-D groups."""
    tensors = load_file(Path(folder) / CODES)
    names = [name.removesuffix(".codes") for name in tensors if name.endswith(".codes")]
    return {name: tensors[f"{name}.codes"] * tensors[f"{name}.scale"] + tensors[f"{name}.zero"] for name in names}


def _add_to_config(path: Path, section: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = section
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
