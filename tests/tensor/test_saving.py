"""Whole weights from tensor-parallel parts, resumable checkpoints, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

from hf_zero.comm.parts import whole_value
from hf_zero.config import ConfigError
from hf_zero.zero_to_fp32 import main as zero_to_fp32
from tests.support.one_process import (
    RATE,
    assert_small,
    batches,
    difference_of_weights,
    engine_of,
    in_one_process,
    sgd,
    train,
)
from tests.support.ranks import run_ranks
from tests.tensor.models import config_of, model_of
from tests.tensor.training import config_with


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=RATE / 10)


def _engine(kind: str, config: dict[str, Any]) -> Any:
    return engine_of(model_of(kind), config, make_optimizer=_adam)


def _saves_for_transformers(model: Any, whole: dict[str, Any] | None, folder: Path) -> None:
    """Programs save like this, with the full state dict on the first rank and none on the others. These raised an error
    that they hold parts, although they were not to write anything."""
    model.save_pretrained(folder, is_main_process=whole is not None, state_dict=whole)
    if whole is not None:
        read = LlamaForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(read[name], value.to(read[name])) for name, value in whole.items())


def _saves_and_resumes(rank: int, folder: str, stages: tuple[int, ...]) -> dict[str, float]:
    found = {}
    for stage in stages:
        data, root = batches(4), Path(folder) / str(stage)
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        first = _engine("uneven", config_with(stage, 2, zero_optimization=zero))
        train(first, data[:2])
        first.save_checkpoint(str(root))
        assert first.save_16bit_model(str(root), "whole.bin")
        consolidated = first._consolidated_16bit_state_dict()
        assert (consolidated is None) == (rank > 0)
        with pytest.raises(ValueError, match=r"would write this rank's part of model\."):
            first.module.save_pretrained(str(root / "parts"))
        _saves_for_transformers(first.module, consolidated, root / "transformers")
        weights = first.module_state_dict()
        assert {n: tuple(p.shape) for n, p in weights.items()} == {
            name: tuple(p.shape) for name, p in model_of("uneven").state_dict().items()
        }
        whole = torch.load(root / "whole.bin")
        found[f"whole, stage {stage}"] = difference_of_weights(whole, weights)
        went_on = train(first, data[2:]).losses
        second = _engine("uneven", config_with(stage, 2))
        with torch.no_grad():
            assert second.load_checkpoint(str(root))[0]
        resumed = train(second, data[2:]).losses
        found[f"resumed, stage {stage}"] = max(abs(a - b) for a, b in zip(went_on, resumed, strict=True))
    return found


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 2), marks=pytest.mark.slow)])
def test_checkpoints(tmp_path: Path, stages: tuple[int, ...]) -> None:
    assert_small(run_ranks(_saves_and_resumes, 2, str(tmp_path), stages), 1e-6)


SIZES = ((2, 3, "uneven"), (2, 1, "gpt2"), (1, 2, "mixtral"), (4, 0, "uneven"))  # ranks per tensor group, stage, model


def _states(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments of whole parameters, by name and kind."""
    module = engine.module
    found = {}
    for name, parameter in module.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            values = deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)
            found[f"{name} {kind}"] = whole_value(parameter, values.view(parameter.shape))
        values = deepspeed.utils.safe_get_full_fp32_param(parameter)
        found[name] = whole_value(parameter, values.view(parameter.shape))
    return found


def _resumes_at_other_sizes(rank: int, folder: str, saves: tuple[int, int, str], loads: list[int]) -> None:
    size, stage, kind = saves
    data, root = batches(8), Path(folder)
    first = _engine(kind, config_with(stage, size))
    train(first, data[: 2 * 4 // size])  # two updates
    first.save_checkpoint(str(root))
    expected = _states(first)
    for other in loads:
        engine = _engine(kind, config_with(3 if other == 4 else 1, other))
        engine.load_checkpoint(str(root))
        found = _states(engine)
        assert {name: values for name, values in found.items() if not torch.equal(values, expected[name])} == {}
        assert engine.global_steps == 2
        train(engine, data[: 4 // other])
    if rank == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(root))
        weights.pop("lm_head.weight" if kind == "gpt2" else "", None)  # the embedding again
        assert {name for name, values in weights.items() if not torch.equal(values, expected[name])} == set()
        assert zero_to_fp32([str(root), str(root / "whole.safetensors")]) == 0
        loaded = load_file(root / "whole.safetensors")
        assert {name for name, values in weights.items() if not torch.equal(values, loaded[name])} == set()


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (SIZES[0], [1, 4]),
        *(pytest.param(saves, [1, 2, 4], marks=pytest.mark.slow) for saves in SIZES[1:]),
        pytest.param((2, 3, "phi3"), [4, 1], marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_on_with_other_parts(tmp_path: Path, saves: tuple[int, int, str], loads: list[int]) -> None:
    """Masters and both moments are bitwise equal, at any stage and number of data ranks; files give full weights."""
    run_ranks(_resumes_at_other_sizes, 4, str(tmp_path), saves, loads)


def _gathers(rank: int, folder: str) -> tuple[float, float, bool]:
    """Two data ranks of two parts at stage 3: reads and writes of `GatheredParameters`, and a resumed checkpoint."""
    data = batches(6)
    engine = _engine("uneven", config_with(3, 2))
    train(engine, data[:2])
    weight = engine.module.model.layers[0].mlp.down_proj.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        shown = tuple(weight.shape)
        weight.data.fill_(rank + 1.0)  # every rank of the first tensor-parallel group its own part
    whole = engine.module_state_dict()["model.layers.0.mlp.down_proj.weight"]
    engine.save_checkpoint(folder)
    went_on = train(engine, data[2:]).losses
    second = _engine("uneven", config_with(3, 2))
    second.load_checkpoint(folder)
    resumed = train(second, data[2:]).losses
    kept = max((whole[:, :25] - 1).abs().max().item(), (whole[:, 25:] - 2).abs().max().item())
    return kept, max(abs(a - b) for a, b in zip(went_on, resumed, strict=True)), shown == (24, 25)


def test_parameters_that_are_gathered_are_parts(tmp_path: Path) -> None:
    assert run_ranks(_gathers, 4, str(tmp_path)) == [(0.0, 0.0, True)] * 4


def _refusals(rank: int) -> None:
    with pytest.raises(ConfigError, match="world size = data ranks x ranks per tensor group does not hold: 2 != n x 4"):
        _engine("llama", config_with(1, 4))
    with torch.device("meta"):
        empty = LlamaForCausalLM(config_of("llama"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is on the meta device"):
        deepspeed.initialize(model=empty, config=config_with(1, 2) | {"optimizer": {"type": "SGD"}})
    with pytest.raises(ValueError, match="has no tensor-parallel plan"):
        deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config_with(0, 2) | {"optimizer": {"type": "SGD"}})
    with pytest.raises(ConfigError, match=r"x 2 \(world size\)"):
        _engine("llama", config_with(1, 2, train_batch_size=3))
    engine = _engine("llama", config_with(1, 2))
    with pytest.raises(ValueError, match="must get the same batches, but theirs differ"):
        engine(**batches(2)[rank])


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    run_ranks(_refusals, 2)


class Megatron:
    """Megatron's API for its groups."""

    def __init__(self, group: Any) -> None:
        self.get_tensor_model_parallel_group = lambda: group
        self.get_tensor_model_parallel_world_size = lambda: group.size()


def _who_asks(rank: int) -> list[float]:
    """`tp_model_init` and an mpu, without config keys; ranks that hold parts need not be neighbours."""
    data, losses = batches(2), []
    plain = in_one_process(model_of("llama"), data)
    for way in ("tp_model_init", "mpu"):
        model, mpu = model_of("llama"), None
        if way == "tp_model_init":
            assert deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32) is model
        else:
            mpu = Megatron(torch.distributed.group.WORLD)
        engine = deepspeed.initialize(model=model, optimizer=sgd(model), config=config_with(1, 0), mpu=mpu)[0]
        assert engine.autotp_size() == 2 and engine.mpu.get_tensor_model_parallel_rank() == rank
        losses.append(max(abs(a - b) for a, b in zip(train(engine, data).losses, plain.losses, strict=True)))
    return losses


def test_who_asks_for_it() -> None:
    assert max(max(found) for found in run_ranks(_who_asks, 2)) < 1e-5
