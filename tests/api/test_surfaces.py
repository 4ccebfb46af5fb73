"""DeepSpeed's other attributes of engine and optimizer: views, shortcuts, and helpful errors."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.integration.engine.engine import DeepSpeedEngine
from hf_zero.integration.engine.instead import ENGINE, OPTIMIZER
from hf_zero.integration.engine.optimizer import DeepSpeedOptimizer
from hf_zero.optim.adam import FusedAdam
from hf_zero.step.optimizer import ZeroOptimizer
from tests.support.ranks import run_each, run_ranks

ROOT = Path(__file__).resolve().parents[2]
STAGES = (0, 1, 2, 3)
ON_STAGES = [(stage,) for stage in STAGES]


def new_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_buffer("scale", torch.ones(1))
    return model


def new_engine(stage: int, model: nn.Module | None = None, **sections: Any) -> DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **sections,
    }
    return hf_zero.initialize(model=model or new_model(), config=config)[0]


def one_step(engine: DeepSpeedEngine, *, update: bool = True) -> None:
    rows = torch.ones(2, 6, dtype=torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
    engine.backward(engine(rows).square().mean())
    if update:
        engine.step()


@pytest.mark.parametrize("page", ["api", "deepspeed_names"])
def test_pages_made_from_the_classes_are_up_to_date(page: str) -> None:
    """There was no reference of the API: `help(engine.backward)` needs an engine, which needs ranks."""
    spec = importlib.util.spec_from_file_location(f"{page}_page", ROOT / "docs" / f"{page}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0, f"run: python docs/{page}.py"


def public_names(kind: type) -> set[str]:
    own = {name for base in kind.__mro__ if base.__module__.startswith("hf_zero.integration") for name in vars(base)}
    return {name for name in own if not name.startswith("_")}


def test_only_names_of_deepspeed_are_added_or_explained() -> None:
    table = json.loads((ROOT / "tests/integration/data/deepspeed_surfaces.json").read_text(encoding="utf-8"))
    names = {title: {name for kind in kinds.values() for name in kind} for title, kinds in table.items()}
    of_engine = names.pop("DeepSpeedEngine")
    of_optimizers = set().union(*names.values())
    ours = {"is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "optimizer_class"}
    ours.add("amp_enabled")  # of older versions
    for kind, instead, known in (
        (DeepSpeedEngine, ENGINE, of_engine),
        (DeepSpeedOptimizer, OPTIMIZER, of_optimizers),
    ):
        missing = {name for names in instead for name in names.split()}
        assert (public_names(kind) | missing) - known <= ours
        assert not [name for name in missing if hasattr(kind, name)]


def run_views(rank: int, stage: int) -> dict[str, Any]:
    engine = new_engine(stage)
    optimizer = engine.optimizer
    one_step(engine)
    before = copy.deepcopy(engine.module_state_dict())
    masters = optimizer.fp32_partitioned_groups_flat
    assert all(view.data_ptr() == shard.master.data_ptr() for view, shard in zip(masters, optimizer.sub_groups))
    assert [p.shape for group in optimizer.bit16_groups for p in group] == [p.shape for p in engine.module.parameters()]
    assert optimizer.averaged_gradients == {0: []}
    one_step(engine, update=False)
    gradients = optimizer.averaged_gradients[0]
    assert [gradient.numel() for gradient in gradients] == [master.numel() for master in masters]
    weight = engine.module[0].weight
    assert torch.equal(optimizer.get_full_hp_param(weight).cpu(), before["0.weight"])
    assert optimizer.get_full_hp_param(weight, "exp_avg").shape == (7, 6)
    assert optimizer.get_fp32_grad_for_param(weight).abs().sum() > 0
    optimizer.update_fp32_grad_for_param_vectorized(lambda gradient, _: torch.zeros_like(gradient), [weight])
    assert optimizer.get_fp32_grad_for_param(weight).abs().sum() == 0
    optimizer.set_full_hp_param(torch.full((7, 6), 2.0), weight)
    engine.step()
    after = engine._consolidated_16bit_state_dict() if stage < 3 else engine.module_state_dict()
    if after is not None:
        assert (after["0.weight"] - 2.0).abs().max() < 0.5 and not torch.equal(after["2.bias"], before["2.bias"])
    return {"first": before, "numel": sum(master.numel() for master in masters)}


def test_views_and_shortcuts_show_what_the_engine_trains() -> None:
    parameters = sum(p.numel() for p in new_model().parameters())
    for stage, (first, second) in zip(STAGES, run_each(run_views, 2, ON_STAGES), strict=True):
        assert all(torch.equal(first["first"][name], second["first"][name]) for name in first["first"]), stage
        assert first["numel"] + second["numel"] >= (2 if stage == 0 else 1) * parameters, stage


class Counting(nn.Module):
    """Keeps a state of its own."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"count": 3}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values


def run_state_dicts(rank: int, stage: int) -> None:
    model = new_model()
    model.append(Counting())
    engine = new_engine(stage, model)
    engine.module[0].bias.requires_grad_(False)
    whole = engine.module_state_dict()
    given: dict[str, Any] = {"other": 1}
    state = engine.module_state_dict(given, "inner.", exclude_frozen_parameters=True)
    assert state is given and state.pop("other") == 1
    expected = {f"inner.{name}": value for name, value in whole.items() if name != "0.bias"}
    assert state.pop("inner.3._extra_state") == expected.pop("inner.3._extra_state") == {"count": 3}
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    if stage < 3:
        assert engine.module_state_dict(keep_vars=True)["2.bias"] is engine.module[2].bias
    else:
        with pytest.raises(NotImplementedError, match="leave keep_vars out"):
            engine.module_state_dict(keep_vars=True)
    del whole["2.bias"]
    with pytest.raises(RuntimeError, match=r"missing \['2.bias'\]"):
        engine.load_module_state_dict({"module": whole}, allowed_missing_keys={"0.bias"})
    bias = [engine.module[2].bias]
    engine.load_module_state_dict({"module": whole}, z3_params_to_fetch=bias, allowed_missing_keys={"2.bias"})


def test_state_dicts_take_the_arguments_of_deepspeed() -> None:
    """Three of `module_state_dict` and two of `load_module_state_dict` were a TypeError; at stage 3 states of modules'
    own were left out."""
    run_each(run_state_dicts, 2, ON_STAGES[2:])


def test_compile_takes_the_arguments_of_deepspeed(caplog: pytest.LogCaptureFixture) -> None:
    """`schedule` and `compiled_autograd_enabled` were a TypeError, and then a schedule was ignored without a word."""
    engine = new_engine(2)
    with caplog.at_level("WARNING", logger="hf_zero"):
        engine.compile(backend="eager", schedule=[(0, [])], compiled_autograd_enabled=True)
    for name in ("schedule", "compiled_autograd_enabled"):
        assert f"engine.compile({name}=...) has no effect" in caplog.text
    assert engine.is_compiled
    one_step(engine)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_where_weights_move(mode: str) -> None:
    """At stage 3 `torch_compile_mode="reduce-overhead"` would replay kernels on memory that weights have left."""
    with pytest.raises(ValueError, match="stage 3 gathers weights into other memory"):
        new_engine(3).compile(compile_kwargs={"mode": mode})
    new_engine(2).compile(compile_kwargs={"mode": mode})


def run_weights(rank: int, stage: int) -> list[float]:
    engine = new_engine(stage)
    one_step(engine)
    saved = copy.deepcopy(engine.module_state_dict())
    one_step(engine)
    assert not torch.equal(engine.module_state_dict()["0.weight"], saved["0.weight"])
    engine.load_module_state_dict({"module": saved})
    loaded = engine.module_state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    engine.optimizer.set_lr(0.0)
    assert engine.optimizer.get_lr() == 0.0 == engine.get_lr()[0]
    one_step(engine)  # from masters: if they were stale, the old weights would come back
    again = engine.module_state_dict()
    assert all(torch.equal(again[name], value) for name, value in saved.items())
    with pytest.raises(RuntimeError, match=r"missing \['2.bias'\], unexpected \['3.bias'\]"):
        engine.load_module_state_dict({"module": {("3.bias" if k == "2.bias" else k): v for k, v in saved.items()}})
    with pytest.raises(RuntimeError, match=r"size mismatch for 2.bias: \(99,\) instead of"):
        engine.load_module_state_dict({"module": {"0.bias": torch.ones(7), "2.bias": torch.ones(99)}}, strict=False)
    assert torch.equal(engine.module_state_dict()["0.bias"], saved["0.bias"]), "nothing is written before all fits"
    engine.load_module_state_dict({"module": {"0.bias": torch.zeros(7)}}, strict=False)
    return engine.module_state_dict()["0.bias"].tolist()


def test_whole_weights_can_be_loaded_into_a_live_engine() -> None:
    assert run_each(run_weights, 2, ON_STAGES) == [[[0.0] * 7] * 2] * len(STAGES)


def run_cache(rank: int) -> list[bool]:
    engine = new_engine(3)
    engine(torch.ones(2, 6))  # without a backward units may stay gathered
    weight = engine.module[0].weight
    before = weight.ds_status.name
    engine.empty_partition_cache()
    engine.optimizer.empty_partition_cache()
    return [before, weight.ds_status.name]


def test_the_partition_cache_can_be_emptied() -> None:
    """`engine.empty_partition_cache` did not exist, so that gathered parameters stayed until the next step."""
    assert [found[1] for found in run_ranks(run_cache, 2)] == ["NOT_AVAILABLE"] * 2


def run_offload(rank: int) -> list[float]:
    engine = new_engine(2)
    one_step(engine)
    engine.optimizer.offload_states(include=None, device="cpu", pin_memory=False, non_blocking=False)
    engine.optimizer.reload_states()
    one_step(engine)
    return engine.get_lr()


def test_the_optimizer_sends_its_states_away_too() -> None:
    assert run_ranks(run_offload, 2) == [[0.1]] * 2


def run_files(rank: int, folder: str, stage: int) -> list[bool]:
    engine = new_engine(stage, bf16={"enabled": True})
    one_step(engine)
    engine.save_checkpoint(folder, tag="t")
    paths = engine._get_ckpt_name(folder, "t"), engine._get_zero_ckpt_name(folder, "t")
    return [Path(path).is_file() for path in paths]


def test_tools_find_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    cases = [(str(tmp_path / str(stage)), stage) for stage in (1, 3)]
    assert run_each(run_files, 2, cases) == [[[True, True]] * 2] * 2


def test_an_engine_answers_questions_about_its_config() -> None:
    engine = new_engine(2, gradient_clipping=0.5, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert (engine.zero_reduce_bucket_size(), engine.zero_sub_group_size()) == (64, 1_000_000_000)
    assert (engine.zero_max_live_parameters(), engine.zero_overlap_comm()) == (1_000_000_000, None)
    assert (engine.zero_cpu_offload(), engine.zero_optimization_partition_gradients()) == (False, True)
    assert (engine.optimizer_name(), engine.optimizer_params()) == ("adamw", {"lr": 0.1})
    assert (engine.scheduler_name(), engine.dataloader_drop_last()) == (None, False)
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.bfloat16
    assert engine.get_data_types() == (torch.float32, torch.float32) and engine.initial_dynamic_scale() == 65536
    assert engine._config.zero_config.stage == 2 and engine.optimizer.clip_grad == 0.5
    assert engine.curriculum_learning_enabled() is False is engine.flops_profiler_enabled()
    assert engine.autotp_size() == 0 and engine.sequence_parallel_size == 1 and engine.has_moe_layers is False
    assert engine.optimizer.zero_stage_string == "ZeRO-2" and engine.optimizer.partition_count == [1]


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_an_optimizer_says_whether_its_states_are_offloaded(device: str) -> None:
    """It looked whether they were in memory, and said no for host memory."""
    engine = new_engine(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": device}})
    assert engine.optimizer.cpu_offload is engine.optimizer.offload_optimizer is (device == "cpu")


def test_the_model_unit_can_be_assigned() -> None:
    engine = new_engine(1)
    assert engine.mpu is None and engine.training_dataloader is None
    engine.mpu = "mine"
    assert engine.mpu == "mine"


def test_the_data_loader_is_the_engine_s_too() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 6))
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, _, loader, _ = hf_zero.initialize(model=new_model(), config=config, training_data=data)
    assert engine.training_dataloader is loader and engine.training_data is data
    assert engine.is_map_style_dataset(data) and not engine.is_iterable_style_dataset(data)


def test_the_throughput_timer_counts_updates_once_somebody_wants_it() -> None:
    engine = new_engine(1)
    one_step(engine)
    assert engine.tput_timer.global_step_count == 0
    one_step(engine)
    one_step(engine)
    assert engine.tput_timer.global_step_count == 2 and engine.tput_timer.avg_samples_per_sec() > 0


def test_refused_names_say_what_to_use_instead() -> None:
    engine = new_engine(1)
    assert not hasattr(engine, "allreduce_gradients") and not hasattr(engine.optimizer, "ipg_buckets")
    with pytest.raises(
        AttributeError, match=r"engine.allreduce_gradients is not supported by hf_zero: engine.backward\(\)"
    ):
        engine.allreduce_gradients()
    with pytest.raises(AttributeError, match="optimizer.backward is not supported by hf_zero: engine.backward"):
        engine.optimizer.backward(None)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        engine.no_such_thing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        engine.optimizer.no_such_thing  # noqa: B018


def test_the_model_s_own_attributes_are_still_seen() -> None:
    model = new_model()
    model.generate, model.fwd_duration = "generate", 3  # type: ignore[assignment]
    engine = new_engine(1, model)
    assert (engine.generate, engine.fwd_duration) == ("generate", 3)


def test_at_stage_0_the_optimizer_is_what_callers_gave_or_named() -> None:
    """With plain data parallelism users checked `isinstance(optimizer, AdamW)`, and read attributes of their own class,
    but got a ZeroOptimizer.
    """

    class Mine(torch.optim.AdamW):
        own = "mine"

    model = new_model()
    given = Mine(model.parameters(), lr=0.5)
    given.remark = "kept"
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 0}}
    _, optimizer, _, _ = hf_zero.initialize(model=model, optimizer=given, config=config)
    assert isinstance(optimizer, Mine) and isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, ZeroOptimizer) and optimizer.__class__ is Mine
    assert (optimizer.own, optimizer.remark, optimizer.defaults["lr"]) == ("mine", "kept", 0.5)
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "parameter_offload")
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(new_engine(0).optimizer, FusedAdam)
    assert not isinstance(new_engine(1).optimizer, FusedAdam)
