"""16-bit weights without fp32 masters: compared with plain PyTorch, between ranks, and through checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.api.engine import ZeroEngine
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.config import ConfigError
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_ranks

ROWS = 4
MASTERS = "bf16_master_weights_and_grads"
KINDS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": ({"lr": 1e-2}, lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, fused=True)),
    "SGD": ({"lr": 1e-2, "momentum": 0.9}, lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9)),
    "Adagrad": ({"lr": 1e-2}, lambda params: torch.optim.Adagrad(params, lr=1e-2)),
}


def new_engine(
    kind: str = "AdamW", stage: int = 0, *, states: bool = False, own: dict[str, Any] | None = None, **sections: Any
) -> ZeroEngine:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, MASTERS: True, "bf16_optimizer_states": states},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 200},
        "optimizer": {"type": kind, "params": KINDS.get(kind, ({"lr": 1e-2}, None))[0]},
        "zero_allow_untested_optimizer": True,
        "hf_zero": own or {},
        **sections,
    }
    return initialize(model=AwkwardMLP(), config=config)[0]


def train(engine: ZeroEngine, steps: range) -> None:
    """The batch is the same on every rank, so that the mean over ranks is exact in bf16."""
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        (batch,) = mlp_batches(1, ROWS, seed=step)
        engine.backward(engine(**{key: value.to(dtype) for key, value in batch.items()}))
        engine.step()


def masters_and_states(engine: ZeroEngine) -> dict[str, Tensor]:
    found = {}
    for index, shard in enumerate(engine.optimizer.sub_groups):
        found[f"master {index}"] = shard.master.clone()
        for name, value in engine.optimizer.state[shard.tensors[0].parameter].items():
            found[f"{name} {index}"] = value.clone()
    return found


def plain_training(kind: str, states: torch.dtype, steps: range) -> dict[str, Tensor]:
    """Every update runs on fp32 copies of weights and states, which are then rounded."""
    model, make = AwkwardMLP().bfloat16(), KINDS[kind][1]
    kept: dict[str, dict[str, Any]] = {}
    for step in steps:
        (batch,) = mlp_batches(1, ROWS, seed=step)
        model.zero_grad()
        model(**{key: value.bfloat16() for key, value in batch.items()}).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            copy = nn.Parameter(parameter.detach().float())
            copy.grad = parameter.grad.float()
            optimizer = make([copy])
            if name in kept:
                optimizer.state[copy] = {k: v if k == "step" else v.float() for k, v in kept[name].items()}
            optimizer.step()
            kept[name] = {k: v if k == "step" else v.to(states) for k, v in optimizer.state[copy].items()}
            parameter.data.copy_(copy.detach())
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        pytest.param(kind, states, marks=[] if number % 2 == states else [pytest.mark.slow])
        for number, kind in enumerate(KINDS)
        for states in (False, True)
    ],
)
def test_as_plain_pytorch(kind: str, states: bool) -> None:
    engine, steps = new_engine(kind, states=states), range(12)
    train(engine, steps)
    expected = plain_training(kind, torch.bfloat16 if states else torch.float32, steps)
    for name, value in engine.module.state_dict().items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value, expected[name], rtol=2**-6, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    for shard in engine.optimizer.sub_groups:
        assert shard.lp_param is None and shard.master.dtype == torch.bfloat16, "no second copy of the weights"
        moments = [v for k, v in engine.optimizer.state[shard.tensors[0].parameter].items() if k != "step"]
        assert moments and all(v.dtype == (torch.bfloat16 if states else torch.float32) for v in moments)


def run_stages(rank: int, folder: str) -> dict[int, dict[str, Tensor]]:
    """Trains at every stage; saves halfway, and resumes bitwise from the file."""
    found = {}
    for stage in range(4):
        engine = new_engine(stage=stage, own={"stochastic_rounding": stage % 2 == 1})
        train(engine, range(3))
        engine.save_checkpoint(f"{folder}/{stage}")
        at_save = {name: value.clone() for name, value in engine.module_state_dict().items()}
        train(engine, range(3, 6))
        resumed = new_engine(stage=stage, own={"stochastic_rounding": stage % 2 == 1})
        resumed.load_checkpoint(f"{folder}/{stage}")
        train(resumed, range(3, 6))
        once, again = masters_and_states(engine), masters_and_states(resumed)
        assert once.keys() <= again.keys(), "states that no gradient has made yet are zeros in a file"
        for name, value in once.items():
            assert value.dtype == again[name].dtype and torch.equal(value, again[name]), (stage, name)
        found[stage] = {name: value.clone() for name, value in engine.module_state_dict().items()}
        other = new_engine(stage=(stage + 1) % 4)
        other.load_checkpoint(f"{folder}/{stage}")
        assert all(torch.equal(value, at_save[name]) for name, value in other.module_state_dict().items()), stage
        if rank == 0:
            whole = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}")
            assert all(torch.equal(value, at_save[name].float()) for name, value in whole.items())
    return found


def test_sharded_as_alone_and_through_checkpoints(tmp_path: Path) -> None:
    alone = new_engine()
    train(alone, range(6))
    first, second = run_ranks(run_stages, 2, str(tmp_path))
    for stage, weights in first.items():
        assert all(torch.equal(value, second[stage][name]) for name, value in weights.items()), "ranks agree"
        if stage % 2 == 0:
            expected = alone.module.state_dict()
            assert all(torch.equal(value, expected[name]) for name, value in weights.items()), stage


def test_states_on_a_drive(tmp_path: Path) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4}
    engines = [
        new_engine(zero_optimization={"stage": 2, "sub_group_size": 100, **offload})
        for offload in ({}, {"offload_optimizer": drive})
    ]
    for engine in engines:
        train(engine, range(4))
    ours, theirs = (engine.module.state_dict() for engine in engines)
    engines[1].destroy()
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, theirs[name]) for name, value in ours.items())


def moved_by(own: dict[str, Any]) -> Tensor:
    """Ones after 64 updates, each of a sixteenth of bf16's spacing; they change only with stochastic rounding."""
    model = nn.Linear(4096, 1, bias=False)
    nn.init.ones_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, MASTERS: True},
        "optimizer": {"type": "SGD", "params": {"lr": 2**-11}},
        "hf_zero": own,
    }
    engine = initialize(model=model, config=config)[0]
    for _ in range(64):
        engine.backward(-engine(torch.ones(1, 4096, dtype=torch.bfloat16)).sum())
        engine.step()
    return model.weight.detach().float() - 1


def test_stochastic_rounding_keeps_small_updates() -> None:
    """An update of a sixteenth of the spacing is lost every time with rounding to nearest."""
    assert not moved_by({}).any()
    moved = moved_by({"stochastic_rounding": True})
    assert moved.mean().item() == pytest.approx(64 * 2**-11, rel=0.05)
    assert moved.unique().numel() > 3


def test_fp16_masters() -> None:
    sections = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "initial_scale_power": 8}, "bf16": {}}
    engine = new_engine(**sections)
    before = engine.module.head.weight.detach().clone()
    train(engine, range(4))
    (shard, *_) = engine.optimizer.sub_groups
    assert shard.lp_param is None and shard.master.dtype == torch.float16
    assert engine.optimizer.state[shard.tensors[0].parameter]["exp_avg"].dtype == torch.float32
    assert engine.skipped_steps == 0 and not torch.equal(before, engine.module.head.weight)


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "RMSprop"])
def test_optimizers_that_would_compute_in_16_bits(kind: str) -> None:
    with pytest.raises(ConfigError, match="computes in the dtype of its masters"):
        new_engine(kind)
