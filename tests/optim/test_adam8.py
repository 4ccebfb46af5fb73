"""AdamW8bit and Adam8bit alone: close to torch's, small states, saved and restored bitwise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.config import ConfigError, resolve
from hf_zero.optim.adam import FusedAdam
from hf_zero.optim.adam8 import Adam8bit, AdamW8bit
from hf_zero.optim.registry import states_per_element, stored_bytes_per_element
from hf_zero.optim.stager import StateForm
from tests.optim.shards import run_sharded

ROOT = Path(__file__).resolve().parents[2]


def losses_with(kind: Any, **options: Any) -> list[float]:
    """A small regression."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 20, generator=generator)
    y = torch.sin(x @ torch.randn(20, 3, generator=generator))
    optimizer, losses = kind(model.parameters(), **options), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (AdamW8bit, torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
        (Adam8bit, torch.optim.Adam, {"lr": 3e-3, "weight_decay": 1e-4}),
        (AdamW8bit, torch.optim.AdamW, {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0}),
    ],
)
def test_it_learns_as_with_states_of_32_bits(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    found, expected = losses_with(ours, **options), losses_with(theirs, **options)
    assert found == pytest.approx(expected, rel=0.05) and found != expected
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_of_its_states(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(300, 1001, dtype=dtype))
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert sum(value.nbytes for value in state.values()) <= 2.1 * parameter.numel()
    assert stored_bytes_per_element(optimizer) == 2 * 260 / 256 and states_per_element(optimizer) == 0
    assert stored_bytes_per_element(FusedAdam([parameter])) == 0 and states_per_element(FusedAdam([parameter])) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_state_can_be_restored(dtype: torch.dtype) -> None:
    """load_state_dict of torch casts every tensor of a state to the parameter's dtype."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(700).to(dtype))
    optimizer = AdamW8bit([parameter], lr=0.1)
    parameter.grad = torch.randn(700).to(dtype)
    optimizer.step()
    other = nn.Parameter(parameter.detach().clone())
    restored = AdamW8bit([other], lr=0.1)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, value in optimizer.state[parameter].items():
        assert torch.equal(restored.state[other][name], value) and restored.state[other][name].dtype == value.dtype
    gradient = torch.randn(700).to(dtype)
    for candidate, runner in ((parameter, optimizer), (other, restored)):
        candidate.grad = gradient.clone()
        runner.step()
    assert torch.equal(parameter, other)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_on_shards_closely_as_alone(world: int) -> None:
    """Blocks are aligned differently for every number of ranks: codes differ, but training has the same result."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=generator) for shape in ((30, 20), (50,), (1,))]
    steps = [[torch.randn(weight.shape, generator=generator) + 0.3 for weight in weights] for _ in range(50)]
    options = {"lr": 0.01, "weight_decay": 0.1}
    found = run_sharded(AdamW8bit, options, weights, steps, world)
    exact = run_sharded(FusedAdam, options, weights, steps, world)
    moved = torch.cat([(one - weight).reshape(-1) for one, weight in zip(exact, weights, strict=True)])
    apart = torch.cat([(one - other).reshape(-1) for one, other in zip(found, exact, strict=True)])
    assert float(apart.norm() / moved.norm()) < 0.03


def test_blocks_have_256_elements() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="AdamW8bit needs blocks of 256 elements, got block_size=64"):
        AdamW8bit(parameters, block_size=64)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW8bit", "params": {"block_size": 2048}}}
    with pytest.raises(ConfigError, match=r"(?s)optimizer\.params\.block_size = 2048.*is always 256 here"):
        resolve(config, world_size=1)
    with pytest.raises(ConfigError, match=r"optimizer\.params\.min_8bit_size"):
        config["optimizer"] = {"type": "Adam8bit", "params": {"min_8bit_size": 4096}}
        resolve(config, world_size=1)


class Halves(StateForm):
    """Another form, as a future family may have it: fp16 in one tensor."""

    dtype = torch.float16

    def stored_numel(self, numel: int) -> int:
        return numel + 1

    def values(self, stored: torch.Tensor, numel: int) -> torch.Tensor:
        return stored[:numel].float()

    def store(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values.half(), torch.zeros(1, dtype=torch.float16)])


def test_zeros_of_a_form() -> None:
    zeros = Halves().zeros(5, torch.device("cpu"))
    assert zeros.dtype == torch.float16 and torch.equal(Halves().values(zeros, 5), torch.zeros(5))


def held_out_loss(kind: str, steps: int) -> float:
    """The demo's model, text and learning rate on one rank in fp32, with four rows per step."""
    from demo import DATA, MODEL
    from train_clm import DataArguments, ModelArguments, load_blocks, load_text, load_tokenizer, new_model

    model_args, data_args = ModelArguments(**MODEL), DataArguments(**DATA)
    documents = load_text(data_args)
    tokenizer = load_tokenizer(model_args, data_args, documents["train"])
    blocks = load_blocks(data_args, documents, tokenizer).with_format("torch")
    torch.manual_seed(0)
    schedule = {"warmup_max_lr": 1.5e-3, "warmup_num_steps": max(1, steps // 8), "total_num_steps": steps}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": kind, "params": {"lr": 1.5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**schedule, "warmup_type": "linear"}},
    }
    model = new_model(model_args, tokenizer, data_args.block_size)
    engine = initialize(model=model, config=config)[0]
    order = torch.randperm(len(blocks["train"]), generator=torch.Generator().manual_seed(1))
    for rows in order[: steps * 4].split(4):
        ids = torch.stack([blocks["train"][int(row)]["input_ids"] for row in rows])
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        held = torch.stack([row["input_ids"] for row in blocks["validation"]]).split(8)
        return float(sum(engine(input_ids=ids, labels=ids).loss for ids in held) / len(held))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_held_out_loss_of_the_demos_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 steps; docs/offload.md has the figures of 800."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    assert held_out_loss("AdamW8bit", 60) == pytest.approx(held_out_loss("AdamW", 60), rel=0.01)
