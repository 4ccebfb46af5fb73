"""Expert parallelism: predictions of `plan` equal what engines store and send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from bench.planning import _groups
from bench.states import state_bytes
from hf_zero import initialize
from hf_zero.__main__ import main
from hf_zero.comm import ledger
from hf_zero.config import ConfigDict
from hf_zero.planning.candidates import Candidate, Training, ds_config, resolved, training_of
from hf_zero.planning.choose import RankedPlans
from hf_zero.planning.memory import OptimizerSize, Setting
from hf_zero.planning.model import load_model, trace
from hf_zero.planning.show import as_dict, title
from tests.experts.training import bytes_per_token
from tests.planning.material import planned, states_of
from tests.planning.test_memory import filled
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.lengthy

LENGTH, HIDDEN, LAYERS, EXPERTS, TOP_K = 16, 64, 2, 8, 2
CONFIG = MixtralConfig(
    vocab_size=499, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, use_cache=False,
    architectures=["MixtralForCausalLM"],
)  # fmt: skip
WAYS = (Candidate(1), Candidate(2), Candidate(3))


def written(folder: Path) -> str:
    CONFIG.save_pretrained(folder)
    return str(folder)


def engines(rank: int, world: int, folder: str) -> list[tuple[dict[str, int], int]]:
    """By way: bytes of the states; bytes of all-to-alls of a forward and a backward."""
    found = []
    for way in WAYS:
        torch.manual_seed(0)
        model: Any = MixtralForCausalLM(CONFIG).train()
        config = filled(way, folder, "bf16") | {"expert_parallel": {"enabled": True, "autoep_size": 2}}
        config["train_batch_size"] = world
        engine, *_ = initialize(model=model, model_parameters=_groups(model), config=config)
        tokens = torch.arange(LENGTH).unsqueeze(0) + rank
        ledger.reset()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        sent = sum(tally.num_bytes for (_, operation), tally in ledger.tallies.items() if operation == "all_to_all")
        engine.step()
        found.append((state_bytes(engine), sent))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_states_and_messages_are_those_of_engines_to_the_byte(world: int, tmp_path: Path) -> None:
    """This holds for any routing: if one rank sends less, another one sends more."""
    ranks = run_ranks(engines, world, world, str(tmp_path / "drive"))
    model = load_model(written(tmp_path), "bf16", 0, 1, 2)
    seen = trace(model, micro_batch=1, length=LENGTH, checkpointing=False)
    assert not seen.note
    counts = LAYERS * EXPERTS * 8  # of tokens for each expert, in forward
    rows = bytes_per_token(hidden=HIDDEN, itemsize=2, top_k=TOP_K) * LENGTH * LAYERS
    for number, way in enumerate(WAYS):
        training = Training(length=LENGTH, expert_parallel=2)
        answers = resolved(ds_config(way, training), training, model, world)
        setting = Setting(answers, OptimizerSize(), shard_ranks=world, separate=False)
        assert ranks[0][number][0] == states_of(model, setting, seen), way
        sent = sum(told[number][1] for told in ranks)
        assert sent == world * sum(message.payload for message in seen.messages) == world * (rows + counts)


def plan_with(folder: str, size: int, **training: Any) -> RankedPlans:
    model = load_model(folder, "bf16", 0, 1, size)
    training = {"length": 128, "checkpointing": False, "expert_parallel": size, **training}
    return planned("", Training(**training), model, gpus_per_node=4)


def test_tokens_cost_less_than_experts(tmp_path: Path) -> None:
    """Eight experts, of which a token uses two, on four ranks: at most half of stage 3's traffic in total."""
    folder = written(tmp_path)
    plain, spread = plan_with(folder, 1), plan_with(folder, 4)
    alone = {each.candidate.name: each for each in plain.estimates}
    for each in spread.estimates:
        assert each.config["expert_parallel"] == {"enabled": True, "autoep_size": 4}
        before = alone[each.candidate.name]
        assert each.memory.states < before.memory.states or each.candidate.stage == 3
    three = next(each for each in spread.estimates if each.candidate.name == "stage 3")
    assert three.traffic.total <= 0.5 * alone["stage 3"].traffic.total
    note = next(note for note in spread.notes if note.startswith("experts over 4 ranks"))
    per_token = bytes_per_token(hidden=HIDDEN, itemsize=2, top_k=TOP_K) * LAYERS * 3 // 4
    said = [int(word.replace(",", "")) for word in note.split() if word.replace(",", "").isdigit()]
    assert per_token <= said[1] <= per_token + LAYERS * EXPERTS * 8 and said[1] <= 0.5 * said[2]
    assert any(why.startswith("stage 0: expert parallelism is not supported with stage 0") for why in spread.refused)
    assert "experts over 4 ranks" in title(spread) and as_dict(spread)["training"]["expert_parallel"] == 4


def test_copies_of_states_hold_all_experts(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for size, gets in ((2, True), (8, False)):
        model = load_model(folder, "bf16", 0, 1, size)
        training = Training(length=64, checkpointing=False, expert_parallel=size)
        found = planned("", training, model, gpus_per_node=4, nodes=2)
        assert any(each.candidate.copy_per_host for each in found.estimates) == gets
        assert gets or any("ranks per shard group = n x ranks along expert" in why for why in found.refused)


def test_a_ds_json_says_how_many(tmp_path: Path) -> None:
    section = {"enabled": True, "autoep_size": 4}
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    assert training_of(ConfigDict({**config, "expert_parallel": section}), Training(), 8).expert_parallel == 4
    assert training_of(ConfigDict(config), Training(), 8).expert_parallel == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--expert-parallel 3", "world size = data ranks x expert_parallel.autoep_size does not hold: 8 != n x 3"),
        ("--expert-parallel 8 --gpus-per-node 16 --sequence-parallel 2", "a plan counts one of them"),
        ("--expert-parallel 2 --tensor-parallel 2", "a plan counts one of them"),
        ("--expert-parallel 16 --gpus-per-node 16", "experts = ranks x experts per rank does not hold: 8 != 16 x n"),
    ],
)
def test_refusals_have_their_equation(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", written(tmp_path), "--gpu", "h100", "--gpus-per-node", "8", *flags.split()]
    assert main(words) == 2 and message in capsys.readouterr().err


def test_a_model_without_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "40M", "--gpu", "h100", "--gpus-per-node", "8", "--expert-parallel", "2"]) == 2
    assert "has no packed experts" in capsys.readouterr().err
