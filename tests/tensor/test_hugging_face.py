"""`tensor_parallel.autotp_size` with an unmodified Trainer and Accelerator, on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ParallelismConfig
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero
from tests.integration.flows import clean
from tests.mesh.hugging_face import by_accelerator, by_trainer
from tests.sequence.training import packed
from tests.support.models import Batch
from tests.support.one_process import (
    Difference,
    Trained,
    assert_small,
    batches,
    difference_of_weights,
    differences,
    in_one_process,
)
from tests.support.ranks import run_ranks
from tests.tensor.lora import adapted, around, lora
from tests.tensor.models import model_of
from tests.tensor.training import padded

Found = dict[str, Difference]


def _two_ranks(rank: int, folder: str) -> Found:
    rows, root = batches(4), Path(folder)
    found: Found = {}
    plain = in_one_process(model_of("llama"), rows)
    found["Trainer"] = differences(by_trainer(rows, root, stage=2, tensor=2), plain)
    clean()
    saved = dict(AutoModelForCausalLM.from_pretrained(root / "saved").named_parameters())
    found["saved"] = difference_of_weights(saved, plain.weights)
    resumed = by_trainer(rows, root, stage=2, tensor=2, resume=root / "checkpoint-2")
    found["resumed"] = differences(resumed, plain)
    clean()
    found["Accelerator"] = differences(by_accelerator(rows, stage=1, tensor=2), plain)
    clean()
    # With a tp_size accelerate prepares loaders and optimizers before the engine, as for DTensors.
    also_told = {"parallelism_config": ParallelismConfig(tp_size=2)}
    knowing = by_accelerator(rows, stage=1, tensor=2, **also_told)
    found["Accelerator that knows the size"] = differences(knowing, plain)
    clean()
    found["padded"] = against_one_process(padded(6), root / "padded", accumulated=3)
    clean()
    found["packed"] = against_one_process([packed(row) for row in batches(2)], root / "packed")
    return found


def against_one_process(
    rows: list[Batch], folder: Path, *, data_ranks: int = 1, accumulated: int = 1, stage: int = 2, kind: str = "llama"
) -> Difference:
    model = model_of(kind)
    plain = in_one_process(model, rows, data_ranks=data_ranks, accumulated=accumulated, by_tokens=True)
    options: dict[str, Any] = {"tensor": 2, "accumulated": accumulated, "model": model, "save_strategy": "no"}
    return differences(by_trainer(rows, folder, stage=stage, **options), plain)


LOADED = ("llama", "mixtral")  # whose experts are stored one by one


def _loaded(rank: int, folder: str) -> Found:
    found: Found = {}
    root, rows = Path(folder), padded(3)
    options: dict[str, Any] = {"stage": 3, "tensor": 2, "save_strategy": "no"}
    for kind in LOADED:

        def load(folder: Path = root / kind) -> nn.Module:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
            return model.train()

        plain = in_one_process(model_of(kind), rows, by_tokens=True)
        found[kind] = differences(by_trainer(rows, root / kind, model=load, **options), plain)
        clean()
    plain = in_one_process(adapted("mixtral"), rows, by_tokens=True)
    trained = by_trainer(rows, root, model=lambda: around(load(), lora("mixtral")), **options)
    found["LoRA"] = differences(trained, plain)
    return found


def test_models_that_are_loaded_after_the_arguments(tmp_path: Path) -> None:
    """A script parsed TrainingArguments with stage 3 and `autotp_size` before `from_pretrained`, as transformers' own
    scripts do: transformers refused to convert weights, and hf_zero to cut what `zero.Init` had sharded."""
    for kind in LOADED:
        model_of(kind).save_pretrained(tmp_path / kind)
    assert_small(run_ranks(_loaded, 2, str(tmp_path), init=False))


def test_two_ranks(tmp_path: Path) -> None:
    assert_small(run_ranks(_two_ranks, 2, str(tmp_path), init=False))


def _four_ranks(rank: int, folder: str) -> Found:
    rows, root = batches(8), Path(folder)
    plain = in_one_process(model_of("llama"), rows, data_ranks=2)
    mean = [(one + other) / 2 for one, other in zip(plain.losses[::2], plain.losses[1::2], strict=True)]
    plain = Trained(mean, plain.norms, plain.weights)
    found: Found = {"2 x 2": differences(by_trainer(rows, root, stage=2, tensor=2), plain)}
    ways = {"4 parts": (4, 3, 2), "whole": (1, 1, 1)}
    for name, (tensor, stage, accumulated) in ways.items():
        clean()
        sizes = {"tensor": tensor, "accumulated": accumulated} | ({"per_device": 1} if tensor == 1 else {})
        resumed = by_trainer(rows, root / name, stage=stage, resume=root / "checkpoint-2", **sizes)
        found[f"resumed as {name}"] = differences(resumed, plain)
    return found


@pytest.mark.slow
def test_two_data_ranks_of_two_parts_under_trainer(tmp_path: Path) -> None:
    """Trainer gives them different batches, and counts the tokens of all ranks; it also resumes with other parts."""
    assert_small(run_ranks(_four_ranks, 4, str(tmp_path), init=False))


def _for_long(rank: int, folder: str, data_ranks: int, updates: int) -> Found:
    found: Found = {}
    for accumulated, stage in ((1, 2), (3, 2), (3, 3)):
        name, sizes = f"{accumulated} at stage {stage}", {"data_ranks": data_ranks, "accumulated": accumulated}
        for kind, rows in rows_of(updates * data_ranks * accumulated).items():
            found[f"{kind}, {name}"] = against_one_process(rows, Path(folder) / kind / name, stage=stage, **sizes)
            clean()
    return found


def _another_model(rank: int, folder: str, kind: str) -> Found:
    found: Found = {}
    root = Path(folder)
    for stage in (1, 3):
        way: dict[str, Any] = {"stage": stage, "kind": kind, "accumulated": 3}
        found[f"stage {stage}"] = against_one_process(padded(6), root / str(stage), **way)
        clean()
        # Trainer counts the first token of a GPT-2, which has no loss: here it is masked.
        rows, plain = padded(4), in_one_process(model_of(kind), padded(4), by_tokens=True)
        for resume in (None, root / "whole" / str(stage) / "checkpoint-2"):
            folder_of = root / ("whole" if resume is None else "resumed") / str(stage)
            trained = by_trainer(rows, folder_of, stage=stage, tensor=2, resume=resume, model=model_of(kind))
            found[f"stage {stage}, resume={resume is not None}"] = differences(trained, plain)
            clean()
        saved = dict(AutoModelForCausalLM.from_pretrained(folder_of / "saved").named_parameters())
        found[f"saved at stage {stage}"] = difference_of_weights(saved, plain.weights)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_other_models_under_trainer(tmp_path: Path, kind: str) -> None:
    """Norms over heads, one key head and tied embeddings; fused queries, keys and values without a plan."""
    assert_small(run_ranks(_another_model, 2, str(tmp_path), kind, init=False, timeout_s=240))


def rows_of(number: int) -> dict[str, list[Batch]]:
    return {"padded": padded(number), "packed": [packed(row) for row in batches(number)]}


@pytest.mark.slow
@pytest.mark.parametrize("data_ranks", [1, 2])
def test_padding_packing_and_accumulation_under_trainer(tmp_path: Path, data_ranks: int) -> None:
    """20 updates; `gradient_accumulation_steps` 1 and 3."""
    assert_small(run_ranks(_for_long, 2 * data_ranks, str(tmp_path), data_ranks, 20, init=False, timeout_s=400))


def _draws(rank: int) -> tuple[list[int], list[int], str]:
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = hf_zero.initialize(model=model_of("llama").eval(), config=config)
    ids, found = batches(1, size=1)[0]["input_ids"], []
    for options in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(rank if options["do_sample"] is False else 5)
        found.append(engine.module.generate(ids, max_new_tokens=6, **options).tolist()[0])
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="must draw the same tokens, but their random states differ") as refused:
        engine.module.generate(ids, max_new_tokens=6, do_sample=True)
    return found[0], found[1], str(refused.value)


def test_ranks_of_a_tensor_group_draw_the_same_tokens() -> None:
    """GRPOTrainer seeds every rank differently: ranks continued different texts, and one whose text had ended left the
    others waiting in generate() until the timeout."""
    torch.manual_seed(5)
    ids = batches(1, size=1)[0]["input_ids"]
    model: Any = model_of("llama").eval()
    expected = []
    for options in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(5)
        expected.append(model.generate(ids, max_new_tokens=6, **options).tolist()[0])
    for greedy, drawn, refused in run_ranks(_draws, 2):
        assert [greedy, drawn] == expected
        assert "GRPO" in refused and "set_seed(n)" in refused
