"""Tensor and sequence parallelism: predictions of `plan` equal what engines do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from bench.planning import _groups
from bench.states import state_bytes
from hf_zero import initialize
from hf_zero.__main__ import main
from hf_zero.comm import ledger
from hf_zero.config import TrainingView, resolve
from hf_zero.extras.autotuning.measure import measure
from hf_zero.planning.candidates import Candidate, Training, ds_config, resolved
from hf_zero.planning.choose import RankedPlans
from hf_zero.planning.memory import OptimizerSize, Setting
from hf_zero.planning.model import PlannedModel, load_model, trace
from hf_zero.planning.page import as_html
from hf_zero.planning.show import as_dict, reasoning, title
from hf_zero.tensor.shard import shard_model
from tests.planning.material import config_folder, imitate_trials, planned, states_of
from tests.planning.test_memory import filled
from tests.support.ranks import run_ranks
from tests.tensor.models import config_of, model_of
from tests.tensor.threads import ThreadCollectives, in_threads

pytestmark = pytest.mark.lengthy

_SIZES = {"vocab_size": 499, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES, intermediate_size=101, num_key_value_heads=2),
    "mixtral": MixtralConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2, num_local_experts=2),
    "gpt2": GPT2Config(vocab_size=499, n_embd=64, n_layer=2, n_head=4, use_cache=False),
}
LENGTH = 16


def written(kind: str, folder: Path) -> str:
    """The folder of a config.json."""
    CONFIGS[kind].save_pretrained(folder)
    return str(folder)


def whole(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[kind]).train()
    return model


@pytest.mark.parametrize(
    ("kind", "size", "checkpointing", "rank"),
    [
        *[("llama", 2, True, 0), ("llama", 4, False, 0), ("mixtral", 2, False, 0), ("gpt2", 2, False, 4)],
        *(pytest.param(kind, size, False, 0, marks=pytest.mark.slow) for kind in CONFIGS for size in (2, 4)),
    ],
)
def test_parts_and_messages_are_those_of_a_model_that_is_cut(
    kind: str, size: int, checkpointing: bool, rank: int, tmp_path: Path
) -> None:
    """Shapes of all parameters of the first rank, and bytes of all its messages in a forward and a backward; with
    adapters if they have a `rank`."""
    model = load_model(written(kind, tmp_path), "bf16", rank, size)
    expected = {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}
    models: list[Any] = [whole(kind) for _ in range(size)]
    if rank:
        models = [get_peft_model(each, LoraConfig(r=rank, target_modules="all-linear")) for each in models]
    models = [each.to(torch.bfloat16) for each in models]
    for each in models if checkpointing else ():
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)

    def body(group: ThreadCollectives) -> dict[str, tuple[int, ...]]:
        shard_model(models[group.rank], group, torch.device("cpu"))
        return {name: tuple(parameter.shape) for name, parameter in models[group.rank].named_parameters()}

    def train(group: ThreadCollectives) -> None:
        models[group.rank](input_ids=tokens, labels=tokens).loss.backward()

    parts = in_threads(body, size)
    assert parts[0] == expected
    assert sum(map(torch.Size.numel, map(torch.Size, expected.values()))) == model.num_parameters
    ledger.reset()
    in_threads(train, size)
    sent: Counter[str] = Counter()
    for (_, operation), tally in ledger.tallies.items():
        sent[operation] += tally.num_bytes // size
    said: Counter[str] = Counter()
    seen = trace(model, micro_batch=2, length=LENGTH, checkpointing=checkpointing)
    for message in seen.messages:
        said[message.operation] += message.payload
    assert said == sent and sent["all_reduce"] > 0 and not seen.note


WAYS = (Candidate(0), Candidate(2), Candidate(3))


def engines_with_parts(rank: int, folder: str) -> list[dict[str, int]]:
    found = []
    for way in WAYS:
        model = whole("llama")
        config = filled(way, folder, "bf16") | {"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}}
        engine, *_ = initialize(model=model, model_parameters=_groups(model), config=config)
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        found.append(state_bytes(engine))
        engine.destroy()
    return found


def test_states_of_parts_are_those_of_engines_to_the_byte(tmp_path: Path) -> None:
    [measured, _] = run_ranks(engines_with_parts, 2, str(tmp_path / "drive"))
    model = load_model(written("llama", tmp_path), tensor_size=2)
    seen = trace(model, micro_batch=1, length=LENGTH, checkpointing=False)
    for way, found in zip(WAYS, measured, strict=True):
        training = Training(length=LENGTH, tensor_parallel=2)
        answers = resolved(ds_config(way, training), training, model, 2)
        setting = Setting(answers, OptimizerSize(), shard_ranks=1, separate=False)
        assert found == states_of(model, setting, seen), way


def messages_of_shared_sequences(rank: int) -> tuple[int, int]:
    model, tokens = whole("llama"), torch.zeros(2, LENGTH // 2, dtype=torch.long)
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "zero_optimization": {"stage": 0}}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    ledger.reset()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    sizes = [tally.num_bytes for (_, operation), tally in ledger.tallies.items() if operation == "all_to_all"]
    backward = ledger.tally("backward", "all_to_all").num_bytes
    return sum(sizes) - backward, backward


def test_messages_of_shared_sequences_are_those_of_an_engine(tmp_path: Path) -> None:
    [found, _] = run_ranks(messages_of_shared_sequences, 2)
    model = load_model(written("llama", tmp_path), "fp32")
    seen = trace(model, micro_batch=2, length=LENGTH, checkpointing=False, sequence_size=2)
    assert [(each.phase, each.operation, each.payload) for each in seen.messages] == [
        ("forward", "all_to_all", found[0]),
        ("backward", "all_to_all", found[1]),
    ]


def messages_of_a_hybrid_model(rank: int) -> list[dict[str, int]]:
    """Bytes by phase, for a model whose heads are exchanged beside attention and one with layers on whole sequences."""
    found = []
    for kind in HYBRID_KINDS:
        model, tokens = model_of(kind), torch.zeros(2, 6, dtype=torch.long)
        config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "zero_optimization": {"stage": 0}}
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
        ledger.reset()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        sums: dict[str, int] = {}
        for (phase, operation), tally in ledger.tallies.items():
            if operation == "all_to_all":
                sums[phase] = sums.get(phase, 0) + tally.num_bytes
        found.append(sums)
        engine.destroy()
    return found


HYBRID_KINDS = ("qwen3_next", "jamba", "minimax")


def test_messages_of_hybrid_models_are_those_of_an_engine(tmp_path: Path) -> None:
    [found, _] = run_ranks(messages_of_a_hybrid_model, 2)
    for kind, sums in zip(HYBRID_KINDS, found, strict=True):
        config_of(kind).save_pretrained(tmp_path / kind)
        seen = trace(
            load_model(str(tmp_path / kind), "fp32"), micro_batch=2, length=12, checkpointing=False, sequence_size=2
        )
        messages = {each.phase: each.payload for each in seen.messages if each.operation == "all_to_all"}
        assert messages == {"forward": sum(sums.values()) - sums["backward"], "backward": sums["backward"]}, kind


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "jamba"])
def test_layers_whose_heads_are_exchanged_take_as_many_times_less(kind: str, tmp_path: Path) -> None:
    config_of(kind).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "fp32")
    one, two, four = (trace(model, micro_batch=1, length=256, checkpointing=True, sequence_size=n) for n in (1, 2, 4))
    assert two.peak == pytest.approx(one.peak / 2, rel=0.01) and four.peak == pytest.approx(one.peak / 4, rel=0.05)
    assert two.flops == pytest.approx(one.flops / 2, rel=0.01)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """A Llama with eight heads and as many key heads."""
    folder = tmp_path_factory.mktemp("model")
    return load_model(config_folder(folder, num_attention_heads=8, num_key_value_heads=8, intermediate_size=256))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sequences_in_parts_take_as_many_times_less(llama: PlannedModel, checkpointing: bool) -> None:
    one, two, eight = (
        trace(llama, micro_batch=1, length=4096, checkpointing=checkpointing, sequence_size=n) for n in (1, 2, 8)
    )
    assert two.peak == pytest.approx(one.peak / 2, rel=0.01) and eight.peak == pytest.approx(one.peak / 8, rel=0.03)
    assert two.flops == pytest.approx(one.flops / 2) and eight.flops == pytest.approx(one.flops / 8)
    assert not one.messages and {each.operation for each in two.messages} == {"all_to_all"}


def test_copied_key_heads_are_counted(tmp_path: Path) -> None:
    """One key head for four ranks: each rank has a copy of it, in every layer that is not recomputed."""
    model = load_model(config_folder(tmp_path, num_key_value_heads=1))
    few = [
        trace(model, micro_batch=1, length=256, checkpointing=ckpt, sequence_size=4).peak
        - trace(model, micro_batch=1, length=64, checkpointing=ckpt).peak
        for ckpt in (False, True)
    ]
    copied = 64 * 3 * 2 * 16 * 2  # tokens, copies, key and value, width of a head, bf16
    assert few == [model.layers * copied, copied]


def test_inside_of_layers_each_rank_has_its_part(llama: PlannedModel) -> None:
    """At most one layer's activations: inside a layer half of them, between layers all of them."""

    def of_a_layer(model: PlannedModel) -> float:
        seen = trace(model, micro_batch=1, length=4096, checkpointing=False)
        inside = [each.peak for each in seen.segments if each.event == "forward" and each.name.startswith("model.lay")]
        return (max(inside) - min(inside)) / 2

    one, two, four = (of_a_layer(model) for model in (llama, llama.cut(2), llama.cut(4)))
    between = 2 * two - one  # one = between + inside, two = between + inside / 2
    assert 0 < between < one and four == pytest.approx(between + (one - between) / 4, rel=0.02)


MACHINE = {"gpu": "h100", "gpus_per_node": 4, "nodes": 2}


def plan_with(model: PlannedModel, **sizes: int) -> RankedPlans:
    cut = model.cut(sizes["tensor_parallel"]) if "tensor_parallel" in sizes else model
    return planned("", Training(length=256, checkpointing=False, **sizes), cut, **MACHINE)


def test_parts_of_matrices_in_a_plan(llama: PlannedModel) -> None:
    plain, cut, across = plan_with(llama), plan_with(llama, tensor_parallel=2), plan_with(llama, tensor_parallel=8)
    grouped = [each.candidate for each in cut.estimates if each.candidate.copy_per_host]
    assert grouped and {each.candidate.second_shard for each in cut.estimates} == {1, 2}, (
        "two with the same parts a host"
    )
    assert not any(each.candidate.copy_per_host or each.candidate.second_shard > 1 for each in across.estimates)
    for found, size in ((cut, 2), (across, 8)):
        for each in found.estimates:
            assert each.config["tensor_parallel"] == {"autotp_size": size}
            answers = resolve(each.config, found.training.view(), world_size=8)
            assert answers.samples_per_update == 8 // size and answers.tensor_size == size
        assert as_dict(found)["training"]["data_ranks"] == 8 // size
        assert f"in {size} parts" in title(found) and f"per tensor group of {size} ranks" in title(found)
    named = {each.candidate.name: each for each in cut.estimates}
    before = {each.candidate.name: each for each in plain.estimates}
    zero, three = named["stage 0"], named["stage 3"]
    assert zero.memory.states == pytest.approx(before["stage 0"].memory.states / 2, rel=0.02)  # except norms
    assert three.memory.device["optimizer"] == pytest.approx(before["stage 3"].memory.device["optimizer"], rel=0.05)
    assert zero.traffic.within > before["stage 0"].traffic.within, "activations are exchanged beside gradients"
    assert across.estimates[0].traffic.across > cut.estimates[0].traffic.across, "parts lie on both hosts"
    assert [each.candidate.stage for each in across.estimates if each.candidate.optimizer is None][:2] == [0, 3]
    assert across.estimates[0].bound == "exchange"
    assert as_dict(cut)["needs"] == []


def test_parts_of_sequences_in_a_plan(llama: PlannedModel) -> None:
    plain, shared = plan_with(llama), plan_with(llama, sequence_parallel=2)
    for each, alone in zip(shared.estimates, plain.estimates, strict=True):
        assert each.candidate == alone.candidate
        assert resolve(each.config, shared.training.view(), world_size=8).batch.train_batch_size == 4
        assert each.memory.states == alone.memory.states, "sharded over all ranks, as ever"
        assert each.traffic.total > alone.traffic.total and each.flops == pytest.approx(alone.flops / 2)
        rates = each.tokens_per_s * each.seconds, alone.tokens_per_s
        assert rates[0] == pytest.approx(rates[1] * alone.seconds / 2)
    assert "ParallelismConfig(sp_size=2, dp_shard_size=4" in as_html(shared)
    assert "per sequence group of 2 ranks" in title(shared)


def test_refusals_have_their_equation(llama: PlannedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opt = OPTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=99)
    opt.save_pretrained(tmp_path / "opt")
    folder = config_folder(tmp_path)
    for source, flags, message in (
        (folder, "--tensor-parallel 3", "world size = data ranks x ranks per tensor group does not hold: 8 != n x 3"),
        (folder, "--sequence-parallel 3", "world size = data ranks x ranks per sequence does not hold: 8 != n x 3"),
        (folder, "--tensor-parallel 8", "attention heads >= ranks per tensor group does not hold: 4 < 8"),
        (folder, "--sequence-parallel 8", "attention heads = ranks per sequence x heads per rank does not hold: 4 !="),
        (folder, "--tensor-parallel 4 --sequence-parallel 4", "x ranks per tensor group does not hold: 8 != n x 4 x 4"),
        (folder, "--tensor-parallel 0", "must be at least 1"),
        (str(tmp_path / "opt"), "--tensor-parallel 2", "OPTForCausalLM (opt) has no tensor-parallel plan"),
    ):
        assert main(["plan", source, "--gpu", "h100", "--gpus-per-node", "8", *flags.split()]) == 2, flags
        assert message in capsys.readouterr().err, flags


def test_the_command_writes_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config_folder(tmp_path), "--gpu", "h100", "--gpus-per-node", "4", "--seq-length", "64"]
    for flags, key, value in (
        (["--tensor-parallel", "2"], "tensor_parallel", {"autotp_size": 2}),
        (["--sequence-parallel", "2"], "sequence_parallel_size", 2),
    ):
        assert main([*words, *flags, "--write", str(tmp_path / "ds.json")]) == 0
        assert json.loads((tmp_path / "ds.json").read_text())[key] == value
        assert resolve(json.loads((tmp_path / "ds.json").read_text()), TrainingView(bf16=True), world_size=4)
    said = capsys.readouterr().out
    assert "and pass ParallelismConfig(sp_size=2, dp_shard_size=2" in said


@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"sequence_parallel": 4}])
def test_trials_have_the_sizes(
    llama: PlannedModel, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = imitate_trials(monkeypatch)
    cut = llama.cut(sizes.get("tensor_parallel", 1))
    found = planned("", Training(length=64, checkpointing=False, **sizes), cut)
    assert [each.tokens_per_s for each in measure(found, 1, tmp_path)] == [128.0]
    (size,) = sizes.values()
    assert resolve(dict(asked[0].config), world_size=8).samples_per_update == 8 // size


def test_what_other_ranks_would_help(tmp_path: Path) -> None:
    """As few ranks per sequence as necessary; tensor parallelism if heads are not divisible, or nothing else helps."""
    machine = {"gpu": "abacus", "gpus_per_node": 4, "host_memory": "1T"}

    def last(memory: str, heads: int) -> str:
        changes = {"hidden_size": 960, "intermediate_size": 16384, "num_key_value_heads": heads, "num_hidden_layers": 1}
        model = load_model(config_folder(tmp_path, num_attention_heads=heads, **changes))
        found = planned("", Training(length=2048, checkpointing=True), model, device_memory=memory, **machine)
        *_, remedy, verdict = reasoning(found)[-1].split("; ")
        assert found.chosen is None and verdict == "which fits"
        return remedy

    assert last("1.92G", 8).startswith("with sequence_parallel_size 4: ")
    assert last("1.86G", 8).startswith("with tensor_parallel.autotp_size 4, instead of sequence_parallel_size 4: ")
    assert last("2G", 5).startswith("with tensor_parallel.autotp_size 2: ")
