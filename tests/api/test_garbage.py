"""`disable_python_gc`: automatic collection is off while an engine exists that asked for it.

DeepSpeed 0.19.8 has the key, because a collection stops a rank while the others wait for it. It was refused.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "disable_python_gc": True,
}


@pytest.fixture(autouse=True)
def _collects() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def engine_with(**more: Any) -> Any:
    return deepspeed.initialize(model=nn.Linear(4, 4), config={**CONFIG, **more})[0]


def test_collection_is_off_until_the_last_engine_is_destroyed() -> None:
    first, second = engine_with(), engine_with()
    assert not gc.isenabled()
    loss = first(torch.ones(2, 4)).sum()
    first.backward(loss)
    first.step()
    first.destroy()
    first.destroy()  # once more has no effect
    assert not gc.isenabled()
    second.destroy()
    assert gc.isenabled()


def test_other_engines_leave_it_on() -> None:
    engine_with(disable_python_gc=False).destroy()
    assert gc.isenabled()


def test_a_program_that_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    engine_with().destroy()
    assert not gc.isenabled()


def test_garbage_is_collected_when_the_program_asks() -> None:
    engine = engine_with()
    engine.collect_python_gc()
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert engine.collect_python_gc() >= 1 and not gc.isenabled()
    engine.destroy()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers_collect() -> None:
    """A data loader's workers are forked, and live as long as the training."""
    engine = engine_with()
    if not (child := os.fork()):
        was_on = gc.isenabled()
        engine.destroy()  # the child's copy was never counted there
        os._exit(0 if was_on and gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0 and not gc.isenabled()
    engine.destroy()
