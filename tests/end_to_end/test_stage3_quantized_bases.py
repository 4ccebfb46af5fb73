"""Stage 3 shards a quantized base while it is loaded: no rank ever holds it whole, and nothing else differs.

transformers builds quantized models outside of `zero.Init`, so that every rank loaded the whole base in 4 bit before
the engine sharded it: 35 GB for 70B parameters, whatever the number of ranks. The quantizer here is a stand-in for
bitsandbytes; with that package `tests/trl/test_quantised.py` compares complete runs.
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)
from transformers.modeling_utils import caching_allocator_warmup

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.params.store import of
from hf_zero.precision import is_packed, mark_packed, named_with_scales, tensors_of, with_scales
from tests.end_to_end.stage3 import arguments, auto_config, whole
from tests.support.memory import anonymous_memory, most_allocated, profiled_memory, still_allocated
from tests.support.packed import PackedConfig
from tests.support.ranks import run_ranks

WORLD = 2
MIB = 1 << 20
ON_THE_WAY, ON_DISK = "quantized on the way", "quantized on disk"
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def config(**more: Any) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaConfig(**{"vocab_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": False, **sizes, **more})


def save(folder: Path, shape: LlamaConfig, storage: str = "uint8") -> None:
    """The same model in bf16, and quantized."""
    torch.manual_seed(0)
    LlamaForCausalLM(shape).bfloat16().save_pretrained(folder / ON_THE_WAY, max_shard_size="50MB")
    load(folder, ON_THE_WAY, storage).save_pretrained(folder / ON_DISK)


def load(folder: Path | str, form: str, storage: str = "uint8") -> Any:
    own = {"quantization_config": PackedConfig(storage)} if form == ON_THE_WAY else {}
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{form}", dtype="bfloat16", **own)


def bits(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous().view(torch.uint8) for name, value in values.items()}


def scales_of(model: Any) -> list[Tensor]:
    """Collective at stage 3."""
    with GatheredParameters(model.parameters()):
        return [tensors_of(p)[1].detach().clone() for p in model.parameters() if is_packed(p)]


# --- values ------------------------------------------------------------------------------------------------------


def run_load(rank: int, folder: str, form: str, storage: str, offload: dict[str, Any]) -> Any:
    alive = arguments(f"{folder}/out", auto_config(**offload), bf16=True)
    with patch(
        "transformers.core_model_loading.ThreadPoolExecutor", side_effect=AssertionError("files are read ahead")
    ):
        model = load(folder, form, storage)
    in_shards = {name: of(parameter) is not None for name, parameter in named_with_scales(model)}
    del alive
    return in_shards, bits(whole(model)), scales_of(model)


@pytest.mark.parametrize(
    ("form", "storage", "offload"),
    [
        (ON_THE_WAY, "uint8", {}),
        (ON_DISK, "uint8", {}),
        (ON_THE_WAY, "int8", {}),
        (ON_DISK, "int8", {}),
        pytest.param(ON_THE_WAY, "float16", {}, marks=pytest.mark.slow),
        pytest.param(ON_THE_WAY, "uint8", {"offload_param": {"device": "nvme"}}, marks=pytest.mark.slow),
    ],
)
def test_loaded_weights_are_in_shards_and_keep_their_bits(
    form: str, storage: str, offload: dict[str, Any], tmp_path: Path
) -> None:
    """Codes must not be cast: with half precision as their storage, bf16 would round them. And threads must not read
    files ahead, which on a GPU would bring all weights there before the first one is in shards."""
    save(tmp_path, config(), storage)
    if offload:
        offload = {"offload_param": {**offload["offload_param"], "nvme_path": str(tmp_path)}}
    expected = load(tmp_path, ON_THE_WAY, storage)
    mark_packed(expected)
    for in_shards, values, scales in run_ranks(run_load, WORLD, str(tmp_path), form, storage, offload, init=False):
        assert all(in_shards.values()) and len(in_shards) == 21 + 14 * (storage != "int8"), in_shards
        assert {name: value.tolist() for name, value in values.items()} == {
            name: value.tolist() for name, value in bits(dict(expected.named_parameters())).items()
        }
        assert len(scales) == 14 and all(map(torch.equal, scales, scales_of(expected)))


def run_train(rank: int, folder: str, stage: int, upcast: bool, storage: str) -> Any:
    """An unmodified script."""
    section = auto_config() if stage == 3 else {**auto_config(), "zero_optimization": {"stage": stage}}
    training = arguments(f"{folder}/out-{stage}", section, bf16=not upcast, learning_rate=1e-2, max_steps=3)
    model = load(folder, ON_THE_WAY, storage)
    if upcast:
        model = prepare_model_for_kbit_training(model)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(**LORA))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if "lora" not in name}
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(24 * 8).view(24, 8) % 96]
    trainer = Trainer(model, training, train_dataset=rows)
    trainer.floating_point_ops = lambda inputs: 0  # counts the elements of a model in 4 bit by bitsandbytes' classes
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], dtypes


@pytest.mark.parametrize(
    ("upcast", "storage"),
    [
        (False, "uint8"),
        (False, "int8"),
        *(pytest.param(True, each, marks=pytest.mark.slow) for each in ("uint8", "int8")),
    ],
)
def test_training_ends_as_at_stage_2(upcast: bool, storage: str, tmp_path: Path) -> None:
    """With `prepare_model_for_kbit_training`, which replaces the data of parameters that are not quantized by fp32
    values. At stage 3 it would have failed on the first one in shards."""
    save(tmp_path, config())
    ours = run_ranks(run_train, WORLD, str(tmp_path), 3, upcast, storage, init=False)
    theirs = run_ranks(run_train, WORLD, str(tmp_path), 2, upcast, storage, init=False)
    assert ours[0][1] == theirs[0][1]
    tolerance = 1e-5 if upcast else 1e-2
    assert len(ours[0][0]) == 3 and ours[0][0] == pytest.approx(theirs[0][0], rel=tolerance)
    saved, expected = (load_file(tmp_path / f"out-{stage}" / "adapter_model.safetensors") for stage in (3, 2))
    for name, value in expected.items():
        assert (saved[name] - value).norm() <= tolerance * value.norm(), name


# --- quantized on disk, dequantized on the way -------------------------------------------------------------------


def quantise_files(folder: Path, model: Any, method: dict[str, Any], convert: Callable[[str, Tensor], Any]) -> None:
    """Saves `model`, with each weight replaced by the tensors that `convert` gives for its name."""
    model.bfloat16().save_pretrained(folder)
    values = load_file(folder / "model.safetensors")
    entries = [entry for name, value in values.items() for entry in convert(name, value)]
    save_file({name: value.contiguous() for name, value in entries}, folder / "model.safetensors", {"format": "pt"})
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "quantization_config": method}))


def in_fp8(name: str, value: Tensor) -> Any:
    """One scale per 64 x 64 weights."""
    if not name.endswith("_proj.weight"):
        return [(name, value)]
    rows, columns = value.shape
    blocks = value.float().view(rows // 64, 64, columns // 64, 64)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return [(name, codes), (f"{name}_scale_inv", scales)]


def in_mxfp4(name: str, value: Tensor) -> Any:
    """Random experts, 32 weights to a scale."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return [(name, value)]
    experts, inputs, outputs = value.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return [
        (f"{name}_blocks", blocks),
        (f"{name}_scales", torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)),
    ]


def write_fp8(folder: Path) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [64, 64], "dequantize": True}
    quantise_files(folder, LlamaForCausalLM(config()), method, in_fp8)


def write_mxfp4(folder: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    method = {"quant_method": "mxfp4", "modules_to_not_convert": [], "dequantize": True}
    quantise_files(folder, GptOssForCausalLM(GptOssConfig(**sizes, **heads)), method, in_mxfp4)


def run_load_dequantized(rank: int, folder: str) -> Any:
    alive = arguments(f"{folder}/out", auto_config(), bf16=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    in_shards = [name for name, parameter in model.named_parameters() if of(parameter) is not None]
    del alive
    return in_shards, bits(whole(model))


@pytest.mark.parametrize("write", [write_fp8, write_mxfp4])
def test_weights_that_are_dequantized_are_sharded_at_once(write: Callable[[Path], None], tmp_path: Path) -> None:
    """To fine-tune a model whose files are in fp8 or MXFP4, transformers dequantizes it while it loads. It counts as
    quantized there, so that every rank held it whole in 16 bit: 240 GB for 120B parameters."""
    torch.manual_seed(0)
    write(tmp_path)
    expected = bits(dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters()))
    for in_shards, values in run_ranks(run_load_dequantized, WORLD, str(tmp_path), init=False):
        assert set(in_shards) == set(expected) == set(values)
        assert all(torch.equal(value, expected[name]) for name, value in values.items())


# --- memory ------------------------------------------------------------------------------------------------------


def sizes_of(model: Any) -> tuple[int, int, int]:
    """(bytes of all that is sharded, bytes of scales that are not, bytes of the largest weight before it is
    quantized)."""
    parameters = [(p.numel() * p.element_size(), is_packed(p)) for p in model.parameters()]
    largest = max(size * 4 if quantized else size for size, quantized in parameters)
    sharded = sum(p.numel() * p.element_size() for p in with_scales(model.parameters()))
    scales = sum(each.nbytes for each in scales_of(model))
    return sharded, scales - (sharded - sum(size for size, _ in parameters)), largest


def run_allocations(rank: int, folder: str, form: str, storage: str) -> tuple[int, int, tuple[int, int, int]]:
    alive = arguments(f"{folder}/out", auto_config(), bf16=True)
    with profiled_memory() as profiled:
        model = load(folder, form, storage)
        gc.collect()
    del alive
    return most_allocated(profiled), still_allocated(profiled), sizes_of(model)


@pytest.mark.parametrize(
    ("form", "storage"),
    [
        (ON_THE_WAY, "uint8"),
        (ON_DISK, "uint8"),
        pytest.param(ON_THE_WAY, "int8", marks=pytest.mark.slow),
    ],
)
def test_a_rank_allocates_its_share_and_one_weight(form: str, storage: str, tmp_path: Path) -> None:
    """Counted to the byte by torch's allocator, which also counts mapped files. The stand-in needs copies of the weight
    for its operations."""
    save(tmp_path, config(num_hidden_layers=24), storage)
    mapped = sum(file.stat().st_size for file in (tmp_path / form).glob("*.safetensors"))
    ranks = run_ranks(run_allocations, WORLD, str(tmp_path), form, storage, init=False)
    for most, kept, (model, scales, largest) in ranks:
        assert kept <= 1.02 * (model / WORLD + scales), (kept, model, scales)
        share, grown = model / WORLD, most - mapped
        allowed = share + scales + 4 * largest
        assert share <= grown <= allowed < 0.75 * (model + scales), (grown, share, scales, largest)


def run_memory(rank: int, folder: str, form: str) -> tuple[int, tuple[int, int, int]]:
    alive = arguments(f"{folder}/out", auto_config(), bf16=True)
    load(f"{folder}/small", form)
    with anonymous_memory() as memory:
        model = load(folder, form)
    del alive
    return memory.grown, sizes_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", [ON_THE_WAY, ON_DISK])
def test_no_rank_ever_holds_the_base(form: str, tmp_path: Path) -> None:
    """As the system counts it, with what the C library keeps."""
    save(tmp_path / "small", config())
    save(tmp_path, config(hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, vocab_size=256))
    for grown, (model, scales, largest) in run_ranks(run_memory, WORLD, str(tmp_path), form, init=False):
        allowed = 1.1 * (model / WORLD + scales + 4 * largest)
        print(f"{grown / MIB:.0f} MiB, allowed {allowed / MIB:.0f}, model {model / MIB:.0f} + {scales / MIB:.0f}")
        assert model > 140 * MIB and grown <= allowed < model + scales


# --- between loading and training --------------------------------------------------------------------------------


def run_between(rank: int, folder: str) -> Any:
    alive = arguments(f"{folder}/out", auto_config(), bf16=True)
    model = load(folder, ON_THE_WAY)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    caching_allocator_warmup(model, {"model.embed_tokens.weight": "cuda:0"}, model.hf_quantizer)
    weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(RuntimeError, match="holds it in shards"):
        copy.deepcopy(weight)
    model.resize_token_embeddings(104)
    rows = whole(model)["model.embed_tokens.weight"]
    is_quantized = model.hf_quantizer is not None and is_packed(weight)
    del alive
    return tied, rows, is_quantized


def test_embeddings_are_tied_and_resized_as_without_shards(tmp_path: Path) -> None:
    """A checkpoint with a tied weight under both of its names: whether they are equal was read from shards, also of
    models that are not quantized. transformers gathers nothing of a quantized model, so that resizing failed; and on a
    GPU it reserved memory for the whole model."""
    save(tmp_path, config())
    folder = tmp_path / ON_THE_WAY
    values = load_file(folder / "model.safetensors")
    save_file(
        {**values, "lm_head.weight": values["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "tie_word_embeddings": True}))
    alone = load(tmp_path, ON_THE_WAY)
    expected = alone.lm_head.weight is alone.model.embed_tokens.weight  # transformers 5.3 does not compare
    for tied, rows, is_quantized in run_ranks(run_between, WORLD, str(tmp_path), init=False):
        assert tied == expected and is_quantized and rows.shape == (104, 64)
        assert torch.equal(rows[:96], values["model.embed_tokens.weight"])
