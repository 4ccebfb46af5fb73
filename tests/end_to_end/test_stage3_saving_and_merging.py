"""Stage 3: documented ways to save a trained model, and PEFT's merging, after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hf_zero

hf_zero.install()

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedPlugin  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.end_to_end.stage3 import arguments, assert_same_tensors, auto_config, trainer_of, whole  # noqa: E402
from tests.support.architectures import ARCHITECTURES  # noqa: E402
from tests.support.models import tiny_llama  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.requirements import requires  # noqa: E402

LIMITS = (
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
)
NOTHING_STAYS = dict.fromkeys(LIMITS, 0)
# Parameters that are not persistent stay gathered after an evaluation, as in larger models.
STAYS = {"stage3_param_persistence_threshold": 0}
NAMED = {"zero": NOTHING_STAYS, "stays": STAYS, "defaults": {}}


def diagonal(others: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """(one of `others`, limits): each value occurs by default, and every pair in the slow tests."""
    longest = max(len(others), len(names))
    chosen = {(number % len(others), names[number % len(names)]) for number in range(longest)}
    return [
        pytest.param(
            other,
            NAMED[name],
            id=f"{other}-{name}",
            marks=[] if (number, name) in chosen else [pytest.mark.slow],
        )
        for number, other in enumerate(others)
        for name in names
    ]


def stage_3(limits: dict[str, int]) -> dict[str, Any]:
    return {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **limits}


# --- accelerate ----------------------------------------------------------------------------------------------------


def accelerated(model: Any, limits: dict[str, int]) -> tuple[Accelerator, Any]:
    """An accelerator, and `model` after one update."""
    plugin = DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 2, "zero_optimization": stage_3(limits)})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}
    accelerator.backward(prepared(**batch).loss)
    optimizer.step()
    return accelerator, prepared


def run_saves(rank: int, folder: str, limits: dict[str, int], kind: str) -> dict[str, Tensor]:
    model = tiny_llama(tied=True) if kind == "llama" else ARCHITECTURES[kind].build()
    accelerator, prepared = accelerated(model, limits)
    is_main = accelerator.is_main_process
    unwrapped = accelerator.unwrap_model(prepared)
    unwrapped.save_pretrained(
        f"{folder}/first", is_main_process=is_main, state_dict=accelerator.get_state_dict(prepared)
    )
    state = accelerator.get_state_dict(prepared)
    unwrapped.save_pretrained(
        f"{folder}/second",
        is_main_process=is_main,
        save_function=accelerator.save,
        state_dict=state,
        safe_serialization=True,
        max_shard_size="30KB",
    )
    accelerator.save_model(prepared, f"{folder}/third")
    accelerator.wait_for_everyone()
    return whole(unwrapped)


@pytest.mark.parametrize(("kind", "limits"), diagonal(["llama", "mixtral"], ["zero", "defaults"]))
def test_accelerates_way_to_save_writes_the_files(kind: str, limits: dict[str, int], tmp_path: Path) -> None:
    """`save_pretrained(..., is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model))`
    failed on rank 1, where the state dict is None and so was requested from the model."""
    for trained in run_ranks(run_saves, 2, str(tmp_path), limits, kind, init=False):
        for folder in ("first", "second"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert_same_tensors(dict(model.named_parameters()), trained)
        saved = load_file(tmp_path / "third" / "model.safetensors")
        for name, value in saved.items():
            assert torch.equal(value, trained[name]), name
    assert (tmp_path / "second" / "model.safetensors.index.json").exists()


# --- peft ------------------------------------------------------------------------------------------------------------


def with_adapter(kind: str) -> Any:
    from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

    torch.manual_seed(0)
    if kind == "encoder":
        return get_peft_model(tiny_llama(), PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    if kind == "prompt":
        return get_peft_model(tiny_llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    options: dict[str, Any] = {"modules_to_save": ["lm_head"]} if kind == "lora and head" else {}
    targets = ["q_proj", "down_proj", *(["embed_tokens"] if kind == "lora of embeddings" else [])]
    config = LoraConfig(r=2, target_modules=targets, use_dora=kind == "dora", init_lora_weights=False, **options)
    return get_peft_model(tiny_llama(), config)


def run_saves_adapter(rank: int, folder: str, limits: dict[str, int], kind: str) -> dict[str, Tensor]:
    accelerator, prepared = accelerated(with_adapter(kind), limits)
    unwrapped = accelerator.unwrap_model(prepared)
    state = accelerator.get_state_dict(prepared)
    for number, options in enumerate(({}, {"safe_serialization": False})):
        unwrapped.save_pretrained(
            f"{folder}/{number}", is_main_process=accelerator.is_main_process, state_dict=state, **options
        )
    accelerator.wait_for_everyone()
    return whole(unwrapped)


@requires(modules=("peft",))
@pytest.mark.parametrize(
    ("kind", "limits"), diagonal(["lora and head", "lora of embeddings", "dora", "prompt"], ["zero", "defaults"])
)
def test_accelerates_way_to_save_an_adapter(kind: str, limits: dict[str, int], tmp_path: Path) -> None:
    """The same call on a PEFT model, whose state dict on rank 1 is also None."""
    from peft import PeftModel

    weights = run_ranks(run_saves_adapter, 2, str(tmp_path), limits, kind, init=False)
    for number in range(2):
        loaded = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / str(number)))
        found = {name: value for name, value in loaded.named_parameters() if name in weights[0]}
        assert len(found) >= len(weights[0])
        assert_same_tensors(dict(found), weights[0])


def run_trainer_saves_prompt(rank: int, folder: str, limits: dict[str, int], kind: str) -> dict[str, Tensor]:
    training = arguments(folder, auto_config(**stage_3(limits)), max_steps=2, save_strategy="steps", save_steps=2)
    trainer = trainer_of(with_adapter(kind), training)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    trainer.accelerator.wait_for_everyone()
    return whole(trainer.model)


@requires(modules=("peft",))
@pytest.mark.parametrize(("kind", "limits"), diagonal(["prompt", "encoder"], ["zero", "defaults"]))
def test_a_trainer_saves_a_prompt(kind: str, limits: dict[str, int], tmp_path: Path) -> None:
    """Trainer calls `save_pretrained` on rank 0 only, where PEFT runs the prompt's encoder. Its weights were gathered
    without the other rank, and the first save hung."""
    weights = run_ranks(run_trainer_saves_prompt, 2, str(tmp_path), limits, kind, init=False, timeout_s=100)[0]
    trained = with_adapter(kind)
    trained.load_state_dict(weights, strict=False)
    expected = trained.get_prompt_embedding_to_save("default")
    for folder in ("saved", "checkpoint-2"):
        (saved,) = load_file(tmp_path / folder / "adapter_model.safetensors").values()
        torch.testing.assert_close(saved, expected)


def run_merges(rank: int, folder: str, limits: dict[str, int], kind: str, safely: bool, evaluates: bool) -> Any:
    training = arguments(folder, auto_config(**{**dict.fromkeys(LIMITS, "auto"), **stage_3(limits)}), max_steps=2)
    trainer = trainer_of(with_adapter(kind), training)
    trainer.train()
    if evaluates:
        trainer.evaluate()
    trained = whole(trainer.model)
    logits = trainer.predict(trainer.eval_dataset).predictions
    merged = trainer.model.merge_and_unload(safe_merge=safely)
    parameters = whole(merged)
    said = ""
    try:
        merged.save_pretrained(f"{folder}/merged", is_main_process=rank == 0)
    except RuntimeError as error:  # on rank 0, which writes
        said = str(error)
    if limits == NOTHING_STAYS:
        with hf_zero.gathered(merged):
            merged.save_pretrained(f"{folder}/merged", is_main_process=rank == 0)
    trainer.accelerator.wait_for_everyone()
    return trained, logits, parameters, said


@requires(modules=("peft",))
@pytest.mark.parametrize(("evaluates", "limits"), diagonal([False, True], ["zero", "stays", "defaults"]))
def test_merging_works_after_training(evaluates: bool, limits: dict[str, int], tmp_path: Path) -> None:
    """`merge_and_unload` after `train()` failed with torch's error about "a single memory location"; after
    `evaluate()`, which leaves weights gathered, it worked. If nothing may stay gathered, the merged weights stay
    partitioned, and `save_pretrained` says how to save them."""
    kind, safely = "lora and head", evaluates
    runs = run_ranks(run_merges, 2, str(tmp_path), limits, kind, safely, evaluates, init=False)
    plain = with_adapter(kind)
    plain.load_state_dict(runs[0][0], strict=False)
    expected = plain.merge_and_unload(safe_merge=safely)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same_tensors(dict(saved.named_parameters()), dict(expected.named_parameters()))
    for rank, (_, _, parameters, said) in enumerate(runs):
        assert_same_tensors(parameters, dict(expected.named_parameters()))
        if limits == NOTHING_STAYS and rank == 0:
            assert "cannot be read here" in said and "hf_zero.gathered(model)" in said
        else:
            assert not said
