"""Quantized weights on disk: a folder that transformers loads, or codes with scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.export import init_compression, save_quantized, unpack
from hf_zero.extras.compression.pruning import quantized
from tests.extras.compression.models import bert_batches, ds_config, group, technique, tiny_bert

LINEAR = r"query|key|value|pooler"  # 16 x 16


def _config(**shared: Any) -> dict[str, Any]:
    return ds_config(weight_quantization=technique(group({"target_bits": 8}, LINEAR), **shared))


@pytest.mark.parametrize("num_groups", [1, 16])
def test_compressed_tensors(num_groups: int, tmp_path: Path) -> None:
    model, config = tiny_bert(), _config(quantize_groups=num_groups)
    weight = model.bert.pooler.dense.weight.detach().clone()
    assert save_quantized(model, tmp_path, config) == "compressed-tensors"
    tensors = load_file(tmp_path / "model.safetensors")
    codes, scale = tensors["bert.pooler.dense.weight"], tensors["bert.pooler.dense.weight_scale"]
    assert codes.dtype is torch.int8 and scale.shape == (16, 1)
    torch.testing.assert_close(codes * scale, quantized(weight, 8, num_groups))


def test_transformers_loads_it(tmp_path: Path) -> None:
    """The export was written from the format's description and never loaded, while newer versions choose tensor names
    by a format that each group of layers specifies."""
    pytest.importorskip("compressed_tensors")
    model = tiny_bert().eval()
    init_compression(model, _config(quantize_groups=16))
    batch = bert_batches(1)[0]
    with torch.no_grad():
        masked = model(**batch).logits
    save_quantized(model, tmp_path, _config(quantize_groups=16))
    with torch.no_grad():
        loaded = type(model).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(**batch).logits, masked, rtol=0, atol=1e-5)


def test_codes_with_scales(tmp_path: Path) -> None:
    config = _config(quantize_groups=4, quantization_type="asymmetric")
    model = tiny_bert()
    weight = model.bert.pooler.dense.weight.detach().clone()
    assert save_quantized(model, tmp_path, config) == "safetensors"
    found = unpack(tmp_path)["bert.pooler.dense"].view(16, 16)
    torch.testing.assert_close(found, quantized(weight, 8, 4, symmetric=False), rtol=0, atol=1e-6)


def test_nothing_to_export(tmp_path: Path) -> None:
    config = ds_config(weight_quantization=technique(group({"target_bits": 1}, LINEAR)))
    with pytest.raises(WrongArgument, match="3 to 8 bits"):
        save_quantized(tiny_bert(), tmp_path, config)
