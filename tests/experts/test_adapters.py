"""LoRA on packed experts and other layers with expert parallelism: training, saving and resuming as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.experts.training import Trained, batches, engine_of, in_one_process, model_of, train
from tests.support.ranks import run_ranks

TOLERANCE = 1e-5


def adapted(kind: str) -> Any:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=targets)
    model: Any = get_peft_model(model_of(kind), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # initially zero, which hides errors
                parameter.normal_(std=0.05)
    return model


def _trained(rank: int, world: int, kind: str, ways: list[tuple[int, int]], folder: str) -> dict[str, Any]:
    model, data, found = adapted(kind), batches(4 * world), {}
    plain = in_one_process(model, data, together=world)
    for first, then in zip(ways, ways[1:], strict=False):
        engine = engine_of(model, first[0], first[1], rank)
        before = train(engine, data[: 2 * world], rank, world)
        engine.save_checkpoint(folder, "tag")
        engine.destroy()
        engine = engine_of(model, then[0], then[1], rank)
        engine.load_checkpoint(folder, "tag")
        after = train(engine, data[2 * world :], rank, world)
        engine.destroy()
        both = Trained(before.losses + after.losses, before.norms + after.norms, after.weights)
        found[f"{first} to {then}"] = both.differs_from(plain, plain.losses[rank::world])
    return found


def _check(world: int, kind: str, ways: list[tuple[int, int]], folder: Path) -> None:
    for found in run_ranks(_trained, world, world, kind, ways, str(folder), timeout_s=1200):
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}


def test_adapters_train_and_go_on(tmp_path: Path) -> None:
    _check(2, "mixtral", [(2, 2), (3, 2), (1, 1)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3"])
def test_adapters_of_other_kinds(kind: str, tmp_path: Path) -> None:
    _check(4, kind, [(1, 2), (2, 4), (3, 2), (3, 1), (1, 4)], tmp_path)
