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

from tests.end_to_end.stage3 import (  # noqa: E402
    arguments,
    assert_same_tensors,
    auto_config,
    trainer_of,
    whole,
)
from tests.support.architectures import ARCHITECTURES  # noqa: E402
from tests.support.launch import alone_is_not_distributed  # noqa: E402
from tests.support.limits import NOTHING_STAYS  # noqa: E402
from tests.support.models import VOCABULARY, tiny_llama  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.requirements import requires  # noqa: E402

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
    config = auto_config(**{**dict.fromkeys(NOTHING_STAYS, "auto"), **stage_3(limits)})
    training = arguments(folder, config, max_steps=2)
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


def run_saves_frozen(rank: int, folder: str, kind: str) -> dict[str, Tensor]:
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    if kind == "resized":
        model.resize_token_embeddings(VOCABULARY + 6, mean_resizing=False)
    target = ["q_proj", "embed_tokens"] if kind == "targeted" else ["q_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=target))
    if kind == "resized":
        model.config.name_or_path = adapted.peft_config["default"].base_model_name_or_path = f"{folder}/base"
    if kind == "factor":
        for name, parameter in adapted.named_parameters():
            parameter.requires_grad_("lora_B" in name)
    trainer = trainer_of(adapted, arguments(folder, auto_config(), max_steps=1))
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    return whole(trainer.model)


@requires(modules=("peft",))
@pytest.mark.parametrize("kind", ["resized", "targeted", "factor"])
def test_an_adapters_file_has_its_frozen_weights(kind: str, tmp_path: Path) -> None:
    """Trainer saves PEFT models at stage 3 without frozen parameters, some of which belong to the adapter: embeddings
    that were resized (PEFT stores them, since their new rows are nowhere else) or are targeted, and LoRA-FA's frozen
    factor. The file lacked them, without an error, and the reloaded model was another one."""
    tiny_llama().save_pretrained(tmp_path / "base")
    weights = run_ranks(run_saves_frozen, 2, str(tmp_path), kind, init=False)[0]
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    frozen = {"resized": ("embed_tokens.weight", "lm_head.weight"), "targeted": ("embed_tokens.base_layer.weight",)}
    for end in frozen.get(kind, ("q_proj.lora_A.weight",)):
        names = [name for name in saved if name.endswith(end)]
        assert names, f"{end} is not among {sorted(saved)}"
        for name in names:
            torch.testing.assert_close(saved[name], weights[name.replace("lora_A.weight", "lora_A.default.weight")])


MATRICES = {"target_modules": ["q_proj", "v_proj"]}
# Kinds of adapters: the arguments of PEFT's config.
ADAPTERS: dict[str, dict[str, Any]] = {
    "AdaLora": {**MATRICES, "target_r": 2, "init_r": 4, "total_step": 8, "tinit": 1, "tfinal": 2, "deltaT": 1},
    "TrainableTokens": {"token_indices": [3, 5, 8], "target_modules": ["embed_tokens"]},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
    "BOFT": {**MATRICES, "boft_block_size": 4},
    "C3A": {"target_modules": ["q_proj"], "block_size": 6},
    "FourierFT": {**MATRICES, "n_frequency": 50},
    "HRA": {**MATRICES, "r": 4},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": {**MATRICES, "r": 4},
    "LoKr": {**MATRICES, "r": 4},
    "Miss": {**MATRICES, "r": 4},
    "OFT": {"target_modules": ["q_proj"], "r": 0, "oft_block_size": 6},
    "PrefixTuning": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
    "RandLora": {**MATRICES, "r": 8},
    "Road": {"target_modules": ["q_proj"], "group_size": 6},
    "Shira": {**MATRICES, "r": 4, "random_seed": 3},
    "Vera": {**MATRICES, "r": 8},
    "WaveFT": {**MATRICES, "n_frequency": 50},
}


def run_adapter(rank: int, folder: str, kind: str, stage: int | None, precision: str = "fp32") -> list[float]:
    import peft
    from transformers import TrainerCallback

    class Allocates(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            getattr(model, "module", model).base_model.update_and_allocate(state.global_step)

    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_llama(), getattr(peft, f"{kind}Config")(**ADAPTERS[kind]))
    alone_is_not_distributed()
    zero = {"stage": 3, **NOTHING_STAYS} if stage == 3 else {"stage": stage}
    engine = None if stage is None else {**auto_config(), "bf16": {"enabled": "auto"}, "zero_optimization": zero}
    options = {"max_steps": 6, "max_grad_norm": 1e-3, "learning_rate": 1e-2, "bf16": precision == "bf16"}
    size = {"per_device_train_batch_size": 8 if stage is None else 4}
    trainer = trainer_of(model, arguments(folder, engine, **options, **size), rows=48)
    if kind == "AdaLora":
        trainer.add_callback(Allocates())
    trainer.train()
    trainer.save_model(f"{folder}/saved-{stage}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapter_of(folder: Path, kind: str, stage: int | None, precision: str = "fp32") -> tuple[Any, dict[str, Tensor]]:
    """The losses of a training, and the adapter that it saved."""
    ranks = 1 if stage is None else 2
    losses = run_ranks(run_adapter, ranks, str(folder), kind, stage, precision, init=False)[0]
    return losses, load_file(folder / f"saved-{stage}" / "adapter_model.safetensors")


@requires(modules=("peft",))
@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("AdaLora", (2, 3)),
        ("TrainableTokens", (3,)),
        *(pytest.param(kind, (0, 1, 2, 3), marks=pytest.mark.slow) for kind in ADAPTERS),
    ],
)
def test_every_kind_of_adapter_trains_as_without_an_engine(kind: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    """AdaLoRA's `update_and_allocate`, called from a callback as PEFT's documentation shows, failed: the engine had
    freed the gradients that it reads, and released the weights. Trainable tokens needed CUDA at stage 3."""
    losses, tensors = adapter_of(tmp_path, kind, None)
    for stage in stages:
        seen, saved = adapter_of(tmp_path, kind, stage)
        assert seen == pytest.approx(losses, rel=1e-6), f"stage {stage}"
        assert_same_tensors(saved, tensors)


@requires(modules=("peft",))
def test_adaloras_masks_reach_the_masters(tmp_path: Path) -> None:
    """Singular values that AdaLoRA had set to zero came back with the next update, from masters in fp32; at stage 3 all
    masters of the adapters lost their low bits."""
    (losses, tensors), (seen, saved) = (adapter_of(tmp_path, "AdaLora", stage, "bf16") for stage in (2, 3))
    assert seen == losses
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], tensors[name]) for name in saved)


def run_skips(rank: int) -> tuple[bool, list[bool]]:
    import peft

    model = peft.get_peft_model(tiny_llama(), peft.AdaLoraConfig(**ADAPTERS["AdaLora"]))
    fp16 = {"enabled": True, "initial_scale_power": 40}
    plugin = DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 2, "fp16": fp16, "zero_optimization": {"stage": 2}})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}
    accelerator.backward(prepared(**batch).loss)
    optimizer.step()
    prepared.module.base_model.update_and_allocate(1)
    importance = prepared.module.base_model.rankallocator.exp_avg_ipt
    return prepared.skipped_steps == 1, [bool(value.isfinite().all()) for value in importance.values()]


@requires(modules=("peft",))
def test_a_skipped_update_leaves_adaloras_importance_finite() -> None:
    """The infinite gradients of an update that fp16 had skipped would have made all later averages NaN."""
    ((is_skipped, finite),) = run_ranks(run_skips, 1, init=False)
    assert is_skipped and finite and all(finite)
