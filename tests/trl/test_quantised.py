"""QLoRA at every stage: runs end like those without an engine, and docs/trl.md documents them.

Stage 3 used to leave 4-bit weights whole on every rank if they were stored as integers, which is bitsandbytes' default.
Stored as floating-point numbers, they were cast to the model's dtype if it differed, which corrupts the codes.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.end_to_end.stage3 import arguments, auto_config
from tests.support.memory import most_allocated, profiled_memory
from tests.support.ranks import run_ranks
from tests.support.requirements import requires
from tests.trl.quantised import BASES, CASES, STAGES, WRAPPED, cell, rows_of_page, rows_to_train, write_model


@requires(modules=("bitsandbytes", "peft"))
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("base", "adapter"), CASES)
def test_runs_end_as_the_page_says(base: str, adapter: str) -> None:
    assert rows_of_page()[base, adapter] == [cell(base, adapter, stage) for stage in STAGES]


def test_the_page_promises_no_more_than_its_table() -> None:
    rows = rows_of_page()
    assert list(rows) == CASES
    for (base, _), cells in rows.items():
        assert all(each.startswith("same") for each in cells[:3])
        assert cells[3] == "refused" if base in WRAPPED else cells[3].startswith("same")


def _load(folder: str, base: str, form: str, dtype: str = "float32") -> Any:
    from transformers import AutoModelForCausalLM

    own = {"quantization_config": BASES[base]()} if form == "model" else {}
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{form}", dtype=dtype, **own)


def _tensors(model: Any) -> dict[str, Tensor]:
    """Weights and the tensors of their quantization."""
    from hf_zero.api.gathered_parameters import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        found = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            if type(parameter).__name__ == "Int8Params":
                found[f"{name}.SCB"] = parameter.SCB
            if type(parameter).__name__ == "Params4bit":
                found |= {f"{name}.{key}": value for key, value in parameter.quant_state.as_dict(packed=True).items()}
        return {name: value.detach().clone() for name, value in found.items()}


def _run_load(rank: int, folder: str, base: str, form: str) -> Any:
    from hf_zero.params.store import of
    from hf_zero.precision import with_scales

    alive = arguments(f"{folder}/out", auto_config())
    model = _load(folder, base, form)
    del alive
    return all(map(of, with_scales(model.parameters()))), _tensors(model)


@requires(modules=("bitsandbytes",))
@pytest.mark.slow
@pytest.mark.parametrize("form", ["model", "quantised"])
@pytest.mark.parametrize("base", [base for base in BASES if base not in WRAPPED])
def test_a_base_is_loaded_in_shards_with_the_bits_of_a_whole_one(base: str, form: str, tmp_path: Path) -> None:
    """Every rank loaded the whole base, quantized on the way or on disk, before stage 3 sharded it."""
    write_model(tmp_path)
    expected = _load(str(tmp_path), base, "model")
    expected.save_pretrained(tmp_path / "quantised")
    for in_shards, found in run_ranks(_run_load, 2, str(tmp_path), base, form, init=False):
        assert in_shards and found.keys() == _tensors(expected).keys()
        for name, value in _tensors(expected).items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


def _run_allocations(rank: int, folder: str, base: str) -> tuple[int, int, int, int]:
    from hf_zero.planning.packed import num_weights
    from hf_zero.precision import is_packed, tensors_of, with_scales

    alive = arguments(f"{folder}/out", auto_config())
    with profiled_memory() as profiled:
        model = _load(folder, base, "model")
    del alive
    packed = [p for p in model.parameters() if is_packed(p)]
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    everything += sum(tensor.nbytes for p in packed for tensor in tensors_of(p)[1:])
    sharded = sum(p.numel() * p.element_size() for p in with_scales(model.parameters()))
    return most_allocated(profiled), sharded, everything - sharded, max(map(num_weights, packed)) * 4


@requires(modules=("bitsandbytes",))
@pytest.mark.slow
@pytest.mark.parametrize("base", ["bitsandbytes nf4", "bitsandbytes nf4, scales quantized too", "bitsandbytes 8-bit"])
def test_a_rank_allocates_its_share_of_the_base_and_one_weight(base: str, tmp_path: Path) -> None:
    """By torch's allocator, which also counts mapped files; bitsandbytes needs copies of a weight to quantize it. The
    scales, an eighth of the codes, were whole on every rank."""
    write_model(tmp_path, hidden_size=256, intermediate_size=704, num_hidden_layers=24)
    mapped = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    for most, sharded, whole, largest in run_ranks(_run_allocations, 2, str(tmp_path), base, init=False):
        allowed = sharded / 2 + whole + 4 * largest
        assert sharded / 2 <= most - mapped <= allowed < sharded + whole, (most - mapped, sharded, whole, largest)
        assert whole < 0.02 * sharded


def _run_merge(rank: int, folder: str, base: str, is_loaded_whole: bool) -> Any:
    """A script that prepares the base, trains, and merges the adapter into it."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import Trainer, modeling_utils

    from hf_zero.api.gathered_parameters import GatheredParameters
    from hf_zero.integration.patches import MARK
    from hf_zero.params.store import of

    if is_loaded_whole:  # and sharded by initialize()
        name = "convert_and_load_state_dict_in_model"
        setattr(modeling_utils, name, getattr(getattr(modeling_utils, name), MARK))
    config = auto_config(stage3_gather_16bit_weights_on_model_save=True)
    training = arguments(f"{folder}/out", config, bf16=True, learning_rate=1e-2)
    model = _load(folder, base, "model", "bfloat16")
    assert any(map(of, model.parameters())) != is_loaded_whole
    model = prepare_model_for_kbit_training(model)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    trainer = Trainer(model, training, train_dataset=rows_to_train())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    saved = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    merged = trainer.model.merge_and_unload()
    with GatheredParameters(list(merged.parameters())):
        tensors = {**dict(merged.named_parameters()), **merged.state_dict()}  # with the scales
        return losses, {**(saved or {}), **{f"merged {name}": each.detach().clone() for name, each in tensors.items()}}


@requires(modules=("bitsandbytes", "peft"))
@pytest.mark.slow
@pytest.mark.parametrize("base", ["bitsandbytes nf4, scales quantized too", "bitsandbytes fp4", "bitsandbytes 8-bit"])
def test_training_and_merging_do_not_depend_on_how_a_base_was_loaded(base: str, tmp_path: Path) -> None:
    """Bit for bit: losses, the state dict, and the merged model."""
    write_model(tmp_path)
    ours, theirs = (run_ranks(_run_merge, 2, str(tmp_path), base, whole, init=False)[0] for whole in (False, True))
    assert ours[0] == theirs[0] and ours[1].keys() == theirs[1].keys() and len(ours[0]) == 3
    for name, value in theirs[1].items():
        ours_in_bytes, in_bytes = (each.contiguous().reshape(-1).view(torch.uint8) for each in (ours[1][name], value))
        assert torch.equal(ours_in_bytes, in_bytes), name


def _peft(model: Any, adapter: str = "") -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # as engines do
    if adapter:
        return PeftModel.from_pretrained(model, adapter)
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=4, **options))


_TOKENS = torch.arange(8)[None]


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=_TOKENS).logits.clone()  # type: ignore[no-any-return]


def _used(model: Any, adapted: Any) -> dict[str, Any]:
    """What a trained model gives."""
    found: dict[str, Any] = {"logits": _logits(model)}
    found["tokens"] = adapted.generate(input_ids=_TOKENS, max_new_tokens=6, do_sample=False)
    adapted.merge_adapter()
    found["merged"] = _logits(model)
    adapted.unmerge_adapter()
    return {**found, "unmerged": _logits(model)}


def _run_use(rank: int, folder: str, base: str) -> Any:
    from transformers import Trainer

    import hf_zero

    config = auto_config(stage3_gather_16bit_weights_on_model_save=True)
    training = arguments(f"{folder}/out", config, learning_rate=1e-2, max_steps=2)
    trainer = Trainer(_peft(_load(folder, base, "model")), training, train_dataset=rows_to_train())
    trainer.train()
    engine = trainer.model_wrapped
    with hf_zero.gathered(engine) as whole:
        copied = copy.deepcopy(whole)
    found = {"copied": _logits(copied), "pickled": _logits(pickle.loads(pickle.dumps(copied)))}
    trainer.save_model(f"{folder}/adapter")
    saved = trainer.accelerator.get_state_dict(engine) or {}
    return {**found, **_used(engine, trainer.model)}, saved


@requires(modules=("bitsandbytes", "peft"))
@pytest.mark.slow
@pytest.mark.parametrize("base", ["bitsandbytes nf4", "bitsandbytes nf4, scales quantized too"])
def test_a_trained_model_is_used_as_in_one_process(base: str, tmp_path: Path) -> None:
    """Evaluated, generated with, copied, merged and saved, with its scales. A copy could not be pickled: bitsandbytes'
    copied weights refer to the layer of the original."""
    write_model(tmp_path)
    (ours, saved), (others, _) = run_ranks(_run_use, 2, str(tmp_path), base, init=False)
    alone = _load(str(tmp_path), base, "model")
    for name, value in alone.state_dict().items():
        of_adapter = "base_model.model." + name
        for layer in ("q_proj", "down_proj"):
            of_adapter = of_adapter.replace(f".{layer}.", f".{layer}.base_layer.")
        assert torch.equal(saved[of_adapter].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name
    adapted = _peft(alone, f"{tmp_path}/adapter")
    expected = _used(adapted, adapted)
    expected["copied"] = expected["pickled"] = expected["logits"]
    for found in (ours, others):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
