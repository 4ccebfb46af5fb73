"""Stage 3: memory over time, and engines that do not train."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from tests.end_to_end.stage3 import (
    arguments,
    auto_config,
    ds_config,
    engine_of,
    rank_batches,
    train_engine,
    trainer_of,
)
from tests.end_to_end.test_stage3_modules import masked_llama
from tests.end_to_end.test_stage3_ranks import PROMPTS, lively_llama
from tests.support.launch import alone_is_not_distributed
from tests.support.memory import kept_bytes, live_bytes, shared_blocks
from tests.support.models import stack, tiny_llama, token_rows
from tests.support.ranks import run_ranks


def run_flat(rank: int) -> tuple[list[int], list[int], list[int]]:
    model = tiny_llama()
    engine = engine_of(model)
    levels, kept, objects = [], [], []
    for number, parts in enumerate(rank_batches(2) * 100, start=1):
        train_engine(engine, [parts[rank]])
        if number % 50 == 0:
            with torch.no_grad():
                engine.eval()(**parts[1 - rank])
            engine.train()
            levels.append(live_bytes(shared_blocks()))
            kept.append(kept_bytes())
            objects.append(len(gc.get_objects()))
    return levels, kept, objects


@pytest.mark.slow  # tests/step tests it for the engine alone
def test_memory_is_flat_over_200_steps() -> None:
    """Memory grew from step to step until the job died, hours later."""
    largest = max(p.numel() for p in tiny_llama().parameters())
    for levels, kept, objects in run_ranks(run_flat, 2):
        assert len(levels) == 4 and len(set(levels[1:])) == 1, levels
        assert max(kept) < 32 * 4 * largest, kept  # of a few units, for any number of steps
        assert objects[-1] - objects[1] < 200, objects


def run_states(rank: int) -> int:
    model = masked_llama("freeze_as_lora_does", layers=12)
    before = live_bytes(shared_blocks())
    engine = engine_of(model)
    train_engine(engine, [parts[rank] for parts in rank_batches(2)])
    return live_bytes(shared_blocks()) - before


def test_frozen_parameters_cost_no_optimizer_state() -> None:
    """Frozen weights also had gradients and moments, so a LoRA run needed the memory of a full one."""
    model = masked_llama("freeze_as_lora_does", layers=12)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    for grown in run_ranks(run_states, 2):
        # Half of the frozen fp32 weights moves to the other rank; gather buffers and the few trained ones take less.
        assert grown < -0.3 * 4 * frozen, f"{grown} bytes for {frozen} frozen elements"


# --- without training --------------------------------------------------------------------------------------------


def run_evaluate_only(rank: int, folder: str, rows: int) -> tuple[dict[str, float], dict[str, float], Any, Any]:
    alone_is_not_distributed()
    trainer = trainer_of(tiny_llama(), arguments(folder, auto_config()), rows=rows)
    first = trainer.evaluate()
    prediction = trainer.predict(trainer.eval_dataset)  # type: ignore[arg-type]
    second = trainer.evaluate()
    state = trainer.model_wrapped.optimizer
    trainer.train()
    return first, second, prediction.predictions, state is None or not hasattr(state, "param_groups")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rows", [16, 19])
def test_a_trainer_that_only_evaluates(world: int, rows: int, tmp_path: Path) -> None:
    """evaluate() without train() crashed without an optimizer; the last batch, shorter than the others, hung."""
    model = tiny_llama().eval()
    with torch.no_grad():
        logits = torch.cat([model(**stack([row])).logits for row in token_rows(rows)])
    for first, second, predicted, optimizerless in run_ranks(
        run_evaluate_only, world, str(tmp_path), rows, init=False, timeout_s=90
    ):
        assert first["eval_loss"] == second["eval_loss"] == pytest.approx(4.9, abs=0.2)
        torch.testing.assert_close(torch.as_tensor(predicted), logits, rtol=1e-5, atol=1e-5)
        assert optimizerless


def run_engine_without_optimizer(rank: int) -> tuple[Tensor, int]:
    model = lively_llama()
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(optimizer=False))
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    logits = engine(input_ids=torch.tensor([PROMPTS[rank]])).logits
    assert not logits.isnan().any()
    return logits.detach(), held


def test_inference_with_sharded_weights() -> None:
    """A reference model without an optimizer stayed whole on every rank, or its forward crashed."""
    model = lively_llama()
    for rank, (logits, held) in enumerate(run_ranks(run_engine_without_optimizer, 2)):
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([PROMPTS[rank]])).logits)
        assert held < 4 * 2000, "whole parameters stay in memory"
