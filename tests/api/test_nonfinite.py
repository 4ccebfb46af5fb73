"""A NaN on one rank makes the reduced gradient NaN on all; the engine reports that rank and the origin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.device.runtime import Runtime
from tests.checkpoint.training import new_engine, train
from tests.support.late import use
from tests.support.messages import heard
from tests.support.ranks import run_ranks


def run_with_nan(rank: int, stage: int, kind: str) -> tuple[list[str], int]:
    """Rank 1 produces NaN from the second update on; returns its messages and the number of remaining hooks."""
    engine = new_engine(stage, 2, bf16={"enabled": True})
    is_ill = False
    middle = next(module for module in engine.module.modules() if isinstance(module, torch.nn.Linear))

    def spoil(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
        if not is_ill:
            return result
        if kind == "loss":
            return result * float("nan")
        result.register_hook(lambda gradient: gradient * float("nan"))
        return result

    middle.register_forward_hook(spoil)
    with heard() as said:
        train(engine, rank, 2, range(1))
        is_ill = rank == 1
        train(engine, rank, 2, range(1, 4))
        is_ill = False
        train(engine, rank, 2, range(4, 20))
    assert engine.gradients.watch is not None
    num_hooks = len(engine.gradients.watch._hooks)
    engine.destroy()
    return said, num_hooks


SKIPPED = "step 2 skipped on all ranks: the gradient norm is nan; the first gradients in backward that are not finite"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_rank_and_its_first_parameter_are_named(stage: int) -> None:
    (healthy, rest), (ill, none) = run_ranks(run_with_nan, 2, stage, "gradient")
    assert not [text for text in healthy if text.startswith("rank ")] and (rest, none) == (0, 0)
    own = [text for text in ill if text.startswith("rank ")]
    assert "rank 1: its own gradient of " in own[0] and "first one in the order of backward" in own[0]
    module = own[0].partition("gradient of ")[2].rpartition(".")[0]
    said = [text for text in (*healthy, *ill) if text.startswith("step 2 ")]
    assert any(text.startswith(f"{SKIPPED} are of {module}.") for text in said), "no word about the update itself"


def test_the_rank_whose_loss_it_is_is_named() -> None:
    (healthy, _), (ill, _) = run_ranks(run_with_nan, 2, 2, "loss")
    assert not [text for text in healthy if text.startswith("rank ")]
    assert "rank 1: its own loss is nan, of update 2 or after it" in ill


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_says_as_much(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    """One rank trained on NaN without a word about their origin: only several ranks looked for it."""
    with use(Runtime()):  # an accelerator has dropped the gradients when the host learns of them
        engine = new_engine(stage, 1)
        names = [name for name, module in engine.module.named_modules() if isinstance(module, torch.nn.Linear)]
        engine.module.get_parameter(f"{names[0]}.weight").register_hook(lambda gradient: gradient * float("inf"))
        train(engine, 0, 1, range(1))
    assert f"the first gradients in backward that are not finite are of {names[0]}.weight" in caplog.text
