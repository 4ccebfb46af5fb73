"""Predicted model states equal those of engines bytewise, and the estimates at the start of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.planning import _groups
from bench.states import state_bytes
from hf_zero import initialize
from hf_zero.api import run_words
from hf_zero.config import resolve
from hf_zero.offload.memory_estimate import StateSizes, estimate_memory
from hf_zero.params.store import of
from hf_zero.planning import memory
from hf_zero.planning.candidates import Candidate, Training, candidates, ds_config, resolved
from hf_zero.planning.memory import STATES, OptimizerSize, Setting, rank_memory, trained_specs
from hf_zero.planning.model import load_model, trace
from hf_zero.planning.packed import PackedBase
from hf_zero.precision import is_packed, tensors_of
from tests.planning.material import config_folder, states_of
from tests.support.packed import EightBitLinear, PackedLinear, eight_bit, quantise
from tests.support.ranks import run_ranks

WAYS = (Candidate(0), Candidate(1), Candidate(2), Candidate(3), Candidate(3, "nvme"), Candidate(3, "nvme", "nvme"))
TRAINING = Training(length=16)


def filled(way: Candidate, drive: str, precision: str) -> dict[str, Any]:
    training = Training(length=16, nvme_path=drive, precision=precision)  # type: ignore[arg-type]
    config = ds_config(way, training) | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    config |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    if precision != "fp32":
        config |= {precision: {"enabled": True}}
    return config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def engines(rank: int, folder: str) -> list[dict[str, int]]:
    found = []
    for precision in ("bf16", "fp32"):
        for way in WAYS:
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
            engine, *_ = initialize(model=model, model_parameters=_groups(model), config=filled(way, folder, precision))
            tokens = torch.zeros(1, 16, dtype=torch.long)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            found.append(state_bytes(engine))
            assert _said_at_start(engine) == found[-1]
            engine.destroy()
    return found


def _said_at_start(engine: Any) -> dict[str, int]:
    sizes = run_words.expected_sizes(engine)
    return {kind: sum(size for (what, _), size in sizes.items() if what == kind) for kind in STATES}


def test_states_are_those_of_engines_to_the_byte(tmp_path: Path) -> None:
    folder = config_folder(tmp_path)
    [measured, _] = run_ranks(engines, 2, folder)
    expected = []
    for precision in ("bf16", "fp32"):
        model = load_model(folder, precision)
        traced = trace(model, micro_batch=1, length=16, checkpointing=False)
        for way in WAYS:
            answers = resolve(filled(way, folder, precision), model=model.view, world_size=2)
            expected.append(states_of(model, Setting(answers, OptimizerSize(), 2, separate=False), traced))
    assert measured == expected


@pytest.mark.parametrize("separate", [True, False])
def test_the_estimate_at_the_start_of_a_run_says_the_same(separate: bool, tmp_path: Path) -> None:
    """Host and disk of `hf_zero.offload.memory_estimate`, which ignores padding and expects a slow drive."""
    model = load_model("40M")
    training = Training(length=16, nvme_path=str(tmp_path))
    traced = trace(model, micro_batch=1, length=16, checkpointing=False)
    for way in candidates(training, ranks=4, separate=separate):
        if way.optimizer is None and way.parameters is None:
            continue
        answers = resolved(ds_config(way, training), training, model, 4)
        setting = Setting(answers, OptimizerSize(), 4, separate)
        found = rank_memory(model, setting, traced)
        sizes = StateSizes(
            num_states=2,
            longest=max(bucket.numel for bucket in memory._layouts(model, setting)[0].buckets),
            precision=setting.policies.precision,
            accumulates=setting.accumulates,
            keeps_gradients=setting.keeps_sums,
        )
        device = torch.device("cuda" if separate else "cpu")
        said = estimate_memory(trained_specs(model.module), answers.zero, setting.sharding, device, sizes)
        assert found.disk_total == pytest.approx(said.disk, rel=0.01, abs=1e4), way
        if separate and "nvme" not in (way.optimizer, way.parameters):
            assert found.host_total == pytest.approx(said.host, rel=0.01), way
        elif separate:
            assert found.host_total <= 1.01 * said.host, way


def test_kinds_at_each_stage() -> None:
    """14 bytes per parameter at stage 0, gradients as in backward; shards at higher stages; offloaded states moved."""
    model = load_model("2b")
    traced = trace(model, micro_batch=1, length=64, checkpointing=True)
    billions = model.num_parameters / 1e9

    def of(way: Candidate) -> tuple[dict[str, float], dict[str, float]]:
        answers = resolved(ds_config(way, TRAINING), TRAINING, model, 8)
        found = rank_memory(model, Setting(answers, OptimizerSize(), 8), traced)
        return tuple(  # type: ignore[return-value]
            {kind: round(size / 1e9 / billions, 2) for kind, size in place.items() if kind in STATES}
            for place in (found.device, found.host)
        )

    # At the peak all gradients exist except the embedding's, which is the last.
    assert of(Candidate(0)) == ({"parameters": 2.0, "gradients": 1.91, "optimizer": 12.0}, {})
    assert of(Candidate(2))[0] == {"parameters": 2.0, "gradients": 0.24, "optimizer": 1.5}
    device, host = of(Candidate(2, "cpu"))
    assert device == {"parameters": 2.0} and host == {"gradients": 0.25, "optimizer": 1.5}
    device, host = of(Candidate(3, "cpu", "cpu"))
    assert device["parameters"] < 0.01 and host == {"parameters": 0.25, "gradients": 0.25, "optimizer": 1.5}


def test_accumulation_at_stage_1_keeps_whole_gradients() -> None:
    model = load_model("40M")
    traced = trace(model, micro_batch=1, length=16, checkpointing=True)
    training = Training(length=16, accumulation=4)
    found = {
        stage: rank_memory(
            model,
            Setting(resolved(ds_config(Candidate(stage), training), training, model, 8), OptimizerSize(), 8),
            traced,
        ).device["gradients"]
        for stage in (1, 2)
    }
    assert found[1] >= 2 * model.num_parameters and found[2] < 0.6 * model.num_parameters


def test_the_ratio_of_offloaded_states() -> None:
    """`plan` put all states on the host with a ratio of 0.5, of which the engine keeps half on the device."""
    model = load_model("40M")
    traced = trace(model, micro_batch=1, length=16, checkpointing=True)
    training = Training(length=16)
    config = ds_config(Candidate(2, "cpu"), training)
    config["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    found = rank_memory(model, Setting(resolved(config, training, model, 4), OptimizerSize(), 4), traced)
    assert found.device["optimizer"] + found.host["optimizer"] == pytest.approx(3 * model.num_parameters, rel=0.01)
    assert 0.5 <= found.host["optimizer"] / (3 * model.num_parameters) < 0.75, "whole buckets"


def engines_on_codes(rank: int, folder: str, base: PackedBase) -> list[tuple[dict[str, int], int]]:
    """By stage: bytes of states, and of scales that are whole on this rank."""
    found = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model = packed_model(LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).bfloat16(), base)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        groups = [{**each, "params": [p for p in each["params"] if p.requires_grad]} for each in _groups(peft)]
        engine, *_ = initialize(model=peft, model_parameters=groups, config=filled(Candidate(stage), folder, "bf16"))
        scales = [each for p in engine.module.parameters() if is_packed(p) for each in tensors_of(p)[1:]]
        whole = [each.nbytes for each in scales if of(each) is None]
        tokens = torch.zeros(1, 16, dtype=torch.long)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        found.append((state_bytes(engine), sum(whole)))
        engine.destroy()
    return found


def packed_model(model: Any, base: PackedBase) -> Any:
    """With all linear layers except the head in 4 or 8 bit."""
    in_4_bit = partial(quantise, double_quant=base.double_quant)
    layer, codes = (PackedLinear, in_4_bit) if base.bits == 4 else (EightBitLinear, eight_bit)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            linear = layer(module.in_features, module.out_features, bias=False)
            linear.weight = codes(module.weight)
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("base", [PackedBase(4), PackedBase(4, double_quant=True), PackedBase(8)])
def test_a_quantized_base_is_that_of_engines_to_the_byte(base: PackedBase, tmp_path: Path) -> None:
    """`plan 70b --lora-rank 16` only knew bases in 16 bit, for which stage 2 needed 140 GB per rank instead of 41."""
    folder = config_folder(tmp_path)
    [measured, _] = run_ranks(engines_on_codes, 2, folder, base)
    model = load_model(folder, "bf16", lora_rank=4, base=base)
    plain = load_model(folder, "bf16", lora_rank=4)
    assert model.whole == plain.whole and model.num_parameters == plain.num_parameters
    traced = trace(model, micro_batch=1, length=16, checkpointing=False)
    assert traced.flops == trace(plain, micro_batch=1, length=16, checkpointing=False).flops
    for stage, (states, scales) in zip((2, 3), measured, strict=True):
        answers = resolve(filled(Candidate(stage), folder, "bf16"), model=model.view, world_size=2)
        assert states == states_of(model, Setting(answers, OptimizerSize(), 2, separate=False), traced)
        planned = (each.buffer_bytes(shards_scales=stage == 3) for each in (model, plain))
        assert scales == next(planned) - next(planned) >= 0
        assert bool(scales) == (stage == 2 or base != PackedBase(4)), "whole: those of 8 bit, and scales of scales"
