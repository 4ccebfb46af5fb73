"""`plan --config`: a user's ds.json has its own row, computed like the candidates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from hf_zero.__main__ import main
from hf_zero.config import ConfigError, load_config
from hf_zero.extras.autotuning.measure import measure
from hf_zero.optim.registry import states_per_element
from hf_zero.planning.candidates import Training, training_of
from hf_zero.planning.choose import RankedPlans, given_estimates, plan
from hf_zero.planning.estimate import Estimate, optimizer_size
from hf_zero.planning.machine import CONTEXT_BYTES, FRAGMENTS, hardware
from hf_zero.planning.model import PlannedModel, load_model
from hf_zero.planning.page import as_html
from hf_zero.planning.show import as_dict, reasoning
from tests.planning.material import config_folder, imitate_trials

MACHINE = hardware({"gpu": "h100", "gpus_per_node": 2, "nodes": 2, "host_memory": "1T", "disk": "1T"})
CPU = {"device": "cpu"}
OPEN = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    return load_model(config_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=8))


def with_config(model: PlannedModel, config: dict[str, Any], training: Training) -> RankedPlans:
    given = load_config(config)
    return plan(model, MACHINE, training_of(given, training, MACHINE.ranks), given)


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel": 2}, {"sequence_parallel": 2}])
def test_a_candidates_own_config_takes_what_the_candidate_does(model: PlannedModel, sizes: dict[str, int]) -> None:
    training = Training(length=256, micro_batch=2, accumulation=3, nvme_path="/d", checkpointing=True, **sizes)
    cut = model.cut(training.tensor_parallel)
    for each in plan(cut, MACHINE, training).estimates[::3]:
        given = load_config(each.config)
        assert training_of(given, training, MACHINE.ranks) == training
        [yours] = given_estimates(cut, MACHINE, training, given)
        assert yours.candidate.name == f"yours: {each.candidate.name}"
        assert (yours.memory, yours.traffic, yours.flops) == (each.memory, each.traffic, each.flops)
        assert (yours.seconds, yours.bound) == (pytest.approx(each.seconds), each.bound)


def test_what_it_says_goes_before_what_is_asked_for() -> None:
    asked = Training(micro_batch=8, accumulation=8, precision="bf16")

    def of(**config: Any) -> Training:
        return training_of(load_config(config), asked, 4)

    assert of(**OPEN) == asked
    whole = of(train_batch_size=24, train_micro_batch_size_per_gpu=2, gradient_clipping=0.5)
    assert (whole.micro_batch, whole.accumulation, whole.precision, whole.clip) == (2, 3, "fp32", 0.5)
    some = of(**OPEN, gradient_accumulation_steps=2, optimizer={"type": "Lion"}, tensor_parallel={"autotp_size": 2})
    assert (some.micro_batch, some.accumulation, some.optimizer, some.tensor_parallel) == (8, 2, "Lion", 2)
    with pytest.raises(ConfigError, match="must be 0, 1, 2 or 3"):
        of(**OPEN, zero_optimization={"stage": 4})
    with pytest.raises(ConfigError, match="does not hold: 25"):
        of(train_batch_size=25, train_micro_batch_size_per_gpu=2)


def test_features_that_no_candidate_has(model: PlannedModel) -> None:
    """Tiles make activations smaller, cpu_checkpointing moves them; fewer bits are fewer bytes of communication."""
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}
    plain = with_config(model, OPEN | {"zero_optimization": {"stage": 3}}, Training(length=16384))
    without, with_it = plain.yours
    tiled = OPEN | {"hf_zero": {"tiled_loss": True}, "activation_checkpointing": {"cpu_checkpointing": True}}
    found = with_config(model, tiled | {"zero_optimization": zero}, Training(length=16384))
    assert found.yours[0].memory.device["activations"] < without.memory.device["activations"]
    assert found.yours[1].memory.device["activations"] < with_it.memory.device["activations"] / 2
    assert found.yours[1].memory.host == {"activations": 6 * 16384 * 64 * 2}  # of all but two layers, bf16
    assert found.yours[1].traffic.across < with_it.traffic.across and "ZeRO++" in found.notes[-1]
    assert found.chosen is not None and not found.chosen.candidate.is_given
    assert [line[:6] for line in reasoning(found)[:2]] == ["yours:"] * 2
    assert as_html(found).count('class="row') == len(found.estimates) + 2
    assert [each["name"] for each in as_dict(found)["yours"]] == [each.candidate.name for each in found.yours]


def test_gathers_in_two_hops_keep_the_rows_of_a_host(model: PlannedModel) -> None:
    """`mics_hierarchical_params_gather` is hpZ with the ranks of a host, whose second shards were not counted."""
    ways = ({"mics_shard_size": 4, "mics_hierarchical_params_gather": True}, {"zero_hpz_partition_size": 2}, {})
    released = {"stage": 3, "stage3_param_persistence_threshold": 0}
    in_hops, with_second, plain = (
        with_config(model, OPEN | {"zero_optimization": released | keys}, Training(length=64)).yours[0] for keys in ways
    )
    assert in_hops.memory == with_second.memory and in_hops.traffic == with_second.traffic
    assert in_hops.memory.device["parameters"] > plain.memory.device["parameters"]


def test_updates_on_the_device_are_counted_in_memory_and_in_time(model: PlannedModel) -> None:
    """They were timed as if the CPU ran them all."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    on_cpu, by_both, on_device = (
        with_config(
            model, {**OPEN, "zero_optimization": zero, "hf_zero": {"offload_update": update}}, Training(length=64)
        ).yours[0]
        for update in ("cpu", "both", "device")
    )
    assert on_cpu.memory.device_total < by_both.memory.device_total == on_device.memory.device_total
    assert len({on_cpu.seconds, by_both.seconds, on_device.seconds}) == 3


def test_it_is_measured_too(model: PlannedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = imitate_trials(monkeypatch)
    config = load_config(OPEN | {"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR"}})
    machine = hardware({"gpu": "h100", "gpus_per_node": 2, "host_memory": "1T"})
    training = Training(length=64, checkpointing=False)
    measure(plan(model, machine, training, config), 1, tmp_path)
    assert [each.name for each in asked][0] == "yours_z1" and len(asked) == 2
    assert asked[0].config["train_batch_size"] == 2 and "scheduler" not in asked[0].config


def test_a_ratio_of_auto_is_the_least_that_fits(model: PlannedModel) -> None:
    """The engine chooses it after the first update, so that a plan cannot read it in ds.json."""
    states, training = 8 * model.num_trained, Training(length=64, checkpointing=False)

    def yours(ratio: Any, **machine: Any) -> Estimate:
        given = load_config(OPEN | {"zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "ratio": ratio}}})
        place = hardware({"gpu": "h100", "gpus_per_node": 1, "host_memory": "1T", **machine})
        [estimate] = given_estimates(model, place, training_of(given, training, place.ranks), given)
        return estimate

    everything, nothing = (yours(ratio).memory.device_total for ratio in (0.0, 1.0))
    assert everything - nothing > states
    assert yours("auto").candidate.ratio == 0.0
    assert yours("auto").memory == yours(0.0).memory
    with_half = ((everything + nothing) / 2 + CONTEXT_BYTES) / (1 - FRAGMENTS)
    half = yours("auto", device_memory=f"{with_half:.0f}")
    assert half.fits and half.candidate.ratio in (0.5, 0.55) and half.candidate.name.startswith("yours: stage 2")
    assert half.memory == yours(half.candidate.ratio).memory


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(OPEN | {"zero_optimization": {"stage": 2}}) + " // my own")
    words = ["plan", config_folder(tmp_path), "--gpu", "h100", "--gpus-per-node", "4", "--config", str(mine)]
    assert main(words) == 0
    assert "yours: stage 2: fits" in capsys.readouterr().out
    assert main([*words, "--longest"]) == 2 and "leave out one of the two" in capsys.readouterr().err
    mine.write_text(json.dumps(OPEN | {"tensor_parallel": {"autotp_size": 2}}))
    assert main([*words, "--tensor-parallel", "4"]) == 2
    assert "the script asks for 4 ranks" in capsys.readouterr().err


def test_time_follows_the_limits_of_stage_3_and_who_knows_what_comes_next(model: PlannedModel) -> None:
    """Units that stay gathered are not gathered again, and gathers that ranks have to agree on are not prefetched."""
    slow = hardware({"gpu": "h100", "gpus_per_node": 1, "nodes": 2, "host_memory": "1T", "network": "1e9"})
    training = Training(length=256, micro_batch=8, checkpointing=False)

    def seconds(zero: dict[str, Any], **own: Any) -> float:
        given = load_config({**OPEN, "zero_optimization": {"stage": 3, **zero}, "hf_zero": own})
        [yours] = given_estimates(model, slow, training_of(given, training, slow.ranks), given)
        return yours.seconds

    none_stays = {"stage3_max_live_parameters": 0}
    none_ahead = {**none_stays, "stage3_prefetch_bucket_size": 0}
    negotiated = seconds(none_stays, gather_order="negotiated")
    assert seconds({}) < seconds(none_stays) < seconds(none_ahead) <= negotiated


def test_adafactor_keeps_rows_and_columns_alone() -> None:
    """The plan counted Adam's two states for it, its default for unknown optimizers."""
    assert optimizer_size("Adafactor").num_states == 0
    weight = [torch.nn.Parameter(torch.zeros(2, 2))]
    assert states_per_element(Adafactor(weight, beta1=0.9)) == 1
    assert states_per_element(Adafactor(weight)) == 0
