"""Graphs that outlive an update: their backward needs weights that are gone, and raises an error at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.api.parameter_access import safe_set_full_fp32_param
from tests.support.beside_plain import Layers, batch, engine_of, plain_weights, weights_of
from tests.support.ranks import run_each


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def run_outlived(rank: int, stage: int, bf16: bool) -> None:
    engine = engine_of(sgd, stage, 2, bf16=bf16)
    module: Any = engine.module
    for _ in range(2):  # two backward passes of one graph before the update are right
        loss = engine(batch(0))
        engine.backward(loss, retain_graph=True)
        engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|before the last update"):
        engine.backward(loss)
    engine.zero_grad()
    # An engine's own writes are no edits of the program's, and the next update is right.
    safe_set_full_fp32_param(module.out.weight, torch.zeros(6, 10))
    before = weights_of(engine)
    engine.backward(engine(batch(1)))
    engine.step()
    after = weights_of(engine)
    assert not before["out.weight"].any() and after["out.weight"].any()


def test_a_graph_that_outlives_an_update_raises_an_error() -> None:
    """A loss from before `engine.step()` was differentiated again after it. In plain PyTorch that is an error, since
    the optimizer changes weights in place; the engine writes into flat buffers that autograd does not know, so so
    the gradient was silently a mixture of old values and new weights."""
    run_each(run_outlived, 2, [(stage, bf16) for stage in range(4) for bf16 in (False, True)])


def run_unused(rank: int, stage: int) -> None:
    engine = engine_of(sgd, stage, 2)
    module: Any = engine.module
    kept = module.out(torch.ones(2, 10)).square().mean() if stage < 3 else None
    loss = module.into(batch(0)).square().mean()
    engine.backward(loss)
    engine.step()
    if kept is not None:  # `out` had no gradient, so it is as it was
        engine.backward(kept)
        engine.step()
        model = Layers()
        model.out(torch.ones(2, 10)).square().mean().backward()
        sgd(model).step()
        found, expected = weights_of(engine)["out.weight"], plain_weights(model)["out.weight"]
        torch.testing.assert_close(found, expected)


def test_a_graph_of_weights_that_were_not_updated_is_still_right() -> None:
    """Two losses of disjoint parts of a model, with an update between their backward passes."""
    run_each(run_unused, 2, [(0,), (1,), (2,)])
