"""Every name that well-known programs import from deepspeed exists, and behaves according to its verdict."""

from __future__ import annotations

import importlib
import logging
import math
import re
import runpy
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ConfigError
from tests.integration.names_table import MODULES, rows

REFUSED = re.compile(r"deepspeed\.\S+ is not supported by hf_zero(: .+)?\. docs/features\.md", re.DOTALL)


def load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"deepspeed.{module}".rstrip(".")), name)


@pytest.mark.parametrize(("verdict", "module", "name"), rows())
def test_every_name_is_there_and_those_not_built_say_so_on_use(verdict: str, module: str, name: str) -> None:
    found = load(module, name)
    if verdict not in ("E", "L"):
        assert "is not supported by hf_zero" not in (found.__doc__ or "")
        return
    if name.endswith("Builder"):
        assert found.NAME and found().is_compatible() is False
        found = found().load
    assert isinstance(found, type) or callable(found)
    with pytest.raises(NotImplementedError) as caught:
        found()
    assert REFUSED.match(str(caught.value)), str(caught.value)


def test_the_table_is_as_long_as_the_list_that_was_made_of_programs() -> None:
    assert len({(module, name) for _, module, name in rows()}) + len(MODULES) >= 176


@pytest.mark.parametrize("module", MODULES)
def test_modules_without_a_name_of_their_own_import(module: str) -> None:
    assert importlib.import_module(f"deepspeed.{module}").__doc__


def test_a_refused_class_can_be_subclassed_and_asked_about() -> None:
    """Programs subclass PipelineModule (`class GPTModelPipe(PipelineModule, Base)`) at import, and use isinstance."""
    pipeline = load("pipe", "PipelineModule")
    kind = type("Model", (pipeline, nn.Module), {})
    assert not isinstance(nn.Linear(1, 1), pipeline)
    with pytest.raises(NotImplementedError, match="no pipeline parallelism"):
        kind(layers=[])


def test_an_unknown_name_stays_unknown() -> None:
    module = importlib.import_module("deepspeed.runtime.pipe")
    assert not hasattr(module, "NoSuchModule") and not hasattr(importlib.import_module("deepspeed"), "NoSuchModule")


def test_errors_of_deepspeed_can_be_caught() -> None:
    error = load("runtime.zero.utils", "ZeRORuntimeException")
    assert issubclass(error, Exception) and issubclass(ConfigError, load("", "DeepSpeedConfigError"))
    with pytest.raises(load("runtime.config", "DeepSpeedConfigError")):
        load("", "DeepSpeedConfig")({"train_batch_size": "many"})


def test_versions_are_numbers_and_say_who_answers() -> None:
    deepspeed = importlib.import_module("deepspeed")
    numbers = deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__
    assert ".".join(map(str, numbers)) == deepspeed.__version__.partition("+")[0]
    assert deepspeed.version == deepspeed.git_version_info.version == deepspeed.__version__ >= "0.16.4"
    assert deepspeed.__git_hash__ == deepspeed.git_hash and deepspeed.__git_branch__
    operators = deepspeed.git_version_info.installed_ops
    assert operators.keys() == deepspeed.ops.__compatible_ops__.keys() and not any(operators.values())
    assert operators[load("ops.op_builder", "AsyncIOBuilder").NAME] is False
    assert load("runtime.utils", "required_torch_version")(min_version=2.0)
    assert not load("runtime.utils", "required_torch_version")(max_version=1.13)


def test_the_same_object_under_two_paths() -> None:
    deepspeed = importlib.import_module("deepspeed")
    assert deepspeed.zero is importlib.import_module("deepspeed.runtime.zero")
    assert deepspeed.checkpointing is deepspeed.runtime.activation_checkpointing.checkpointing
    assert deepspeed.comm.comm.all_reduce is deepspeed.comm.all_reduce is deepspeed.dist.all_reduce
    assert load("ops.adam.cpu_adam", "DeepSpeedCPUAdam") is load("ops.adam", "DeepSpeedCPUAdam")


def test_constants_are_keys_of_the_config() -> None:
    constants = importlib.import_module("deepspeed.runtime.constants")
    assert (constants.TRAIN_BATCH_SIZE, constants.GRADIENT_CLIPPING_DEFAULT) == ("train_batch_size", 1.0)


def config(**more: object) -> dict[str, object]:
    return {"train_batch_size": 8, "gradient_accumulation_steps": 2, **more}


def test_the_config_object_has_what_was_resolved() -> None:
    given = config(
        optimizer={"type": "AdamW", "params": {"lr": 0.1}},
        zero_optimization={"stage": 3, "stage3_max_live_parameters": 7, "offload_optimizer": {"device": "cpu"}},
        fp16={"enabled": True, "initial_scale_power": 4},
    )
    found = load("", "DeepSpeedConfig")(given)
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (8, 4)
    assert found.gradient_accumulation_steps == 2
    assert (found.zero_enabled, found.zero_optimization_stage, found.zero_config.stage) == (True, 3, 3)
    assert found.zero_config.max_live_parameters == found.zero_config.stage3_max_live_parameters == 7
    assert found.zero_config.offload_optimizer.device == "cpu"
    assert (found.optimizer_name, found.optimizer_params, found.scheduler_name) == ("adamw", {"lr": 0.1}, None)
    assert found.float16_config.enabled and found.float16_config.initial_dynamic_scale() == 16
    assert not found.bfloat16_config.enabled and found.gradient_clipping == 1.0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_sections_can_be_read_alone() -> None:
    assert load("runtime.precision_config", "get_bfloat16_config")({"bfloat16": {"enabled": True}}).enabled
    assert load("runtime.zero.config", "DeepSpeedZeroConfig")(stage=2).reduce_bucket_size == 500_000_000
    with pytest.raises(ConfigError, match="fp16.loss_scale"):
        load("runtime.precision_config", "get_float16_config")({"fp16": {"loss_scale": "much"}})


def test_the_zero_section_takes_the_spellings_of_a_file() -> None:
    """A library made `DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True)`, as ds.json has it: an error.

    It also read `leaf_module.classes` of a config without leaf modules, which was None.
    """
    kind = load("runtime.zero.config", "DeepSpeedZeroConfig")
    with pytest.warns(FutureWarning, match="old name, read as zero_optimization") as warned:
        found = kind(stage=3, stage3_gather_fp16_weights_on_model_save=True, cpu_offload=True, max_live_parameters=7)
    assert found.stage3_gather_16bit_weights_on_model_save and found.offload_optimizer.device == "cpu"
    assert found.stage3_max_live_parameters == 7 and found.leaf_module.classes == []
    assert len(warned) == 2  # not for max_live_parameters, which is the field's name in DeepSpeed
    assert load("", "DeepSpeedConfig")({"train_batch_size": 8}).zero_config.leaf_module.names == []
    with pytest.raises(ValueError, match="keep only offload_optimizer"):
        kind(cpu_offload=True, offload_optimizer={"device": "cpu"})


def test_the_sections_of_precision_take_the_spellings_of_a_file() -> None:
    """A library passed the section of a ds.json with "auto" to `DeepSpeedFP16Config(**section)`: "must be true or
    false". DeepSpeed's config classes leave such values out."""
    for name in ("DeepSpeedFP16Config", "DeepSpeedBF16Config"):
        kind = load("runtime.precision_config", name)
        assert kind(enabled="auto") == kind() and kind(enabled="true").enabled
    found = load("runtime.precision_config", "DeepSpeedFP16Config")(enabled=True, loss_scale="auto", hysteresis="3")
    assert (found.enabled, found.loss_scale, found.hysteresis) == (True, 0.0, 3)
    with pytest.raises(ValueError, match="hysteresiss"):
        load("runtime.precision_config", "DeepSpeedFP16Config")(hysteresiss=3)


def test_constants_that_deepspeed_computes_are_there() -> None:
    """`MIN_AIO_BYTES = 1024**2`: only literals were read, so that the package's own name for it was missing."""
    assert load("runtime.swap_tensor", "MIN_SWAPPABLE_BYTES") == load("runtime.swap_tensor.utils", "MIN_AIO_BYTES")


def test_optimizers_are_of_the_kinds_that_callers_ask_for() -> None:
    """Lightning checks whether engine.optimizer is a ZeROOptimizer, and of which stage."""
    kinds = {
        "deepspeed": load("runtime.base_optimizer", "DeepSpeedOptimizer"),
        "zero": load("runtime.base_optimizer", "ZeROOptimizer"),
        "12": load("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
        "3": load("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
        "bf16": load("runtime.bf16_optimizer", "BF16_Optimizer"),
        "fp16": load("runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    }
    expected = {
        (0, None): {"deepspeed"},
        (0, "bf16"): {"deepspeed", "zero", "bf16"},
        (0, "fp16"): {"deepspeed", "fp16"},
        (1, None): {"deepspeed", "zero", "12"},
        (2, "bf16"): {"deepspeed", "zero", "12"},
        (3, None): {"deepspeed", "zero", "3"},
    }
    for (stage, dtype), names in expected.items():
        precision = {dtype: {"enabled": True}} if dtype else {}
        model = nn.Linear(3, 3)
        given = config(zero_optimization={"stage": stage}, **precision)
        engine, optimizer, _, _ = hf_zero.initialize(
            model=model, config=given, optimizer=torch.optim.AdamW(model.parameters())
        )
        assert {name for name, kind in kinds.items() if isinstance(optimizer, kind)} == names, (stage, dtype)
        assert issubclass(type(optimizer), kinds["deepspeed"]) and isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(engine, load("", "DeepSpeedEngine"))
        assert not isinstance(engine, load("runtime.hybrid_engine", "DeepSpeedHybridEngine"))
        engine.destroy()
    assert issubclass(kinds["3"], kinds["zero"]) and issubclass(kinds["zero"], kinds["deepspeed"])
    assert not isinstance(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]), kinds["deepspeed"])
    with pytest.raises(NotImplementedError, match="deepspeed.initialize"):
        kinds["12"](nn.Linear(1, 1))


def test_the_accelerator_answers_all_that_deepspeed_s_abstract_one_asks() -> None:
    accelerator = load("accelerator", "get_accelerator")()
    assert isinstance(accelerator, load("accelerator.abstract_accelerator", "DeepSpeedAccelerator"))
    table = Path(__file__).with_name("data") / "accelerator_methods.txt"
    missing = [name for name in table.read_text(encoding="utf-8").split() if not hasattr(accelerator, name)]
    assert not missing


def test_the_accelerator_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`supported_dtypes` was missing, memory of a CPU was 0, and LOCAL_SIZE was ignored."""
    accelerator = load("accelerator.cpu_accelerator", "CPU_Accelerator")()
    assert {torch.float32, torch.bfloat16} <= set(accelerator.supported_dtypes())
    before = accelerator.memory_allocated()
    assert 0 < before <= accelerator.max_memory_allocated() <= accelerator.total_memory()
    accelerator.reset_peak_memory_stats()
    assert accelerator.memory_stats()["allocated_bytes.all.peak"] == accelerator.max_memory_reserved()
    assert 0 < accelerator.available_memory() < accelerator.total_memory()
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert accelerator.device_count() == 1
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert accelerator.device_count() == 4
    assert accelerator.HalfTensor([1.0]).dtype == torch.float16 and accelerator.LongTensor().numel() == 0
    with accelerator.stream(accelerator.current_stream()):
        accelerator.synchronize()
    state = accelerator.get_rng_state()
    drawn = torch.rand(2)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(2), drawn)
    assert accelerator.pin_memory(drawn) is drawn and accelerator.is_pinned(drawn) is False


def test_another_accelerator_can_be_set() -> None:
    base, current = load("accelerator", "DeepSpeedAccelerator"), load("accelerator", "get_accelerator")()
    other = type("Other", (base,), {})()
    try:
        load("accelerator", "set_accelerator")(other)
        assert load("accelerator", "get_accelerator")() is other
    finally:
        load("accelerator", "set_accelerator")(current)
    with pytest.raises(TypeError, match="not a DeepSpeedAccelerator"):
        load("accelerator", "set_accelerator")("cuda")


def test_groups_are_the_world() -> None:
    groups = importlib.import_module("deepspeed.utils.groups")
    assert groups._get_data_parallel_world_size() == 1 and groups._get_data_parallel_rank() == 0
    assert groups._get_sequence_parallel_world_size() == groups._get_expert_parallel_world_size("ep_size_1") == 1
    with pytest.raises(KeyError, match="No sequence parallel group found"):
        groups._get_sequence_parallel_group()
    with pytest.raises(AssertionError, match="group is not initialized"):
        groups.get_tensor_model_parallel_group()
    with pytest.raises(NotImplementedError, match="expert_parallel_size=2"):
        groups._create_expert_and_data_parallel(2)
    unit = type("Unit", (), {"get_data_parallel_world_size": lambda self: 3})()
    groups.mpu = unit
    try:
        assert groups._get_data_parallel_world_size() == 3
    finally:
        groups.mpu = None


def test_recomputation_gives_the_same_gradients() -> None:
    checkpointing = importlib.import_module("deepspeed").checkpointing
    checkpointing.configure(None, partition_activations=False)
    assert checkpointing.is_configured()
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    gradients = []
    for run in (layer, lambda x: checkpointing.checkpoint(layer, x)):
        torch.manual_seed(0)
        x = torch.ones(2, 4, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    checkpointing.reset()


def test_named_random_states_are_their_own(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing = importlib.import_module("deepspeed").checkpointing
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    outside = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(1)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork():
        assert not torch.equal(torch.rand(1), first)
    with pytest.raises(Exception, match="already exists"):
        tracker.add("model-parallel-rng", 1)


def test_helpers_of_runtime_utils() -> None:
    moved = load("runtime.utils", "move_to_device")({"a": [torch.ones(1), 3]}, "meta")
    assert moved["a"][0].device.type == "meta" and moved["a"][1] == 3
    norm = load("runtime.utils", "get_global_norm")
    assert norm([3.0, 4.0]) == 5.0 and math.isinf(norm([1.0, math.nan])) and math.isinf(norm([1.0, -1.0]))
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert load("runtime.utils", "clip_grad_norm_")([parameter], 1.0) == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    load("runtime.utils", "set_random_seed")(3)
    first = torch.rand(1)
    load("runtime.utils", "set_random_seed")(3)
    assert torch.equal(torch.rand(1), first)
    assert load("runtime.utils", "partition_uniform")(7, 3) == [0, 3, 5, 7]


def test_timers_add_up() -> None:
    timers = load("utils.timer", "SynchronizedWallClockTimer")()
    for _ in range(3):
        timers("fwd").start()
        timers("fwd").stop()
    assert timers.get_timers()["fwd"] is timers("fwd") and timers("fwd").mean() > 0
    assert list(timers.get_mean(["fwd", "absent"], reset=False)) == ["fwd"]
    assert timers("fwd").elapsed() > 0 and timers("fwd").elapsed() == 0.0
    with pytest.raises(AssertionError, match="not started"):
        timers("fwd").stop()
    said: list[str] = []
    settings = type("Settings", (), {"enabled": True})()
    rate = load("utils.timer", "ThroughputTimer")(settings, 4, start_step=1, steps_per_output=1, logging_fn=said.append)
    assert not rate.initialized  # callers ask whether it has been started
    for _ in range(3):
        rate.start()
        rate.stop(global_step=True)
    assert rate.initialized and not rate.started
    assert rate.avg_samples_per_sec() > 0 and len(said) == 2 and "RunningAvgSamplesPerSec" in said[0]


def test_files_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_10_mp_rank_00_optim_states.pt", "zero_pp_rank_2_mp_rank_00_optim_states.pt"):
        (tmp_path / name).touch()
    found = load("utils.zero_to_fp32", "get_optim_files")(tmp_path)
    assert [Path(path).name[13:15] for path in found] == ["2_", "10"]
    with pytest.raises(FileNotFoundError, match="can't find model states file"):
        load("utils.zero_to_fp32", "get_model_state_file")(tmp_path, 3)
    engine = load("runtime.checkpoint_engine", "TorchCheckpointEngine")()
    engine.save({"a": torch.ones(2)}, tmp_path / "one.pt")
    assert torch.equal(engine.load(tmp_path / "one.pt", map_location="cpu")["a"], torch.ones(2)) and engine.commit("t")


def test_experts_get_groups_of_their_own() -> None:
    shared, expert = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    expert.allreduce, expert.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    split = load("moe.utils", "split_params_into_different_moe_groups_for_optimizer")
    groups = split({"params": [shared, expert], "lr": 0.1, "name": "all"})
    assert [group["params"] for group in groups] == [[shared], [expert]]
    assert (groups[1]["moe"], groups[1]["name"], groups[1]["lr"]) == (True, "ep_size_2", 0.1)


def test_the_launcher_s_helpers(tmp_path: Path) -> None:
    runner = importlib.import_module("deepspeed.launcher.runner")
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=4\n", encoding="utf-8")
    pool = runner.fetch_hostfile(tmp_path / "hosts")
    assert pool == OrderedDict(one=2, two=4) and runner.fetch_hostfile(tmp_path / "absent") is None
    assert runner.parse_inclusion_exclusion(pool, "two:1,3", "") == {"two": [1, 3]}
    assert runner.parse_inclusion_exclusion(pool, "", "one") == {"two": [0, 1, 2, 3]}
    with pytest.raises(ValueError, match="mutually exclusive"):
        runner.parse_inclusion_exclusion(pool, "one", "two")
    options = runner.parse_args(["--num_gpus", "2", "train.py", "--lr", "1"])
    assert (options.num_gpus, options.user_script, options.user_args) == (2, "train.py", ["--lr", "1"])
    with pytest.raises(SystemExit):
        runner.main(["--include", "a", "--exclude", "b", "train.py"])


def test_what_programs_append_to_the_exported_variables_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.launch.job import inherited

    runner = importlib.import_module("deepspeed.launcher.runner")
    monkeypatch.setattr(runner, "EXPORT_ENVS", runner.EXPORT_ENVS)
    runner.EXPORT_ENVS.append("MINE")
    try:
        assert inherited({"MINE_A": "1", "THEIRS": "2"}) == {"MINE_A": "1"}
    finally:
        runner.EXPORT_ENVS.remove("MINE")


def test_logging_helpers(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    logs = importlib.import_module("deepspeed.utils.logging")
    logs.logger.propagate = True
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        for _ in range(2):
            logs.warning_once("said but once, in test_names")
        logs.log_dist("for rank 0", ranks=[0])
    assert [record.message for record in caplog.records] == ["said but once, in test_names", "[Rank 0] for rank 0"]
    logs.print_dist("out", ranks=[0])
    logs.print_dist("not here", ranks=[5])
    assert capsys.readouterr().out == "[Rank 0] out\n"
    with pytest.raises(ValueError, match="not one of the log levels"):
        logs.set_log_level_from_string("loud")


@pytest.mark.processes
def test_the_report_names_what_an_issue_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python -m deepspeed.env_report` runs it."""
    monkeypatch.setattr(sys, "argv", ["env_report"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("deepspeed.env_report", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    printed = capsys.readouterr().out
    for line in ("hf_zero ....", "torch ....", "transformers ....", "device ....", "shared memory ...."):
        assert line in printed, printed
