"""Weights for an inference engine: full, under the model's own names, never all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.api import gathered_parameters
from hf_zero.api.zero_init import Init
from hf_zero.comm import ledger
from tests.support.memory import anonymous_memory, live_bytes
from tests.support.ranks import run_ranks
from tests.support.requirements import requires

WORLD = 2
LARGEST_BYTES = 4 * 512 * 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.large.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.large(tokens)
        for layer in self.layers:
            values = layer(values).tanh()
        loss: Tensor = self.head(values).square().mean()
        return loss


def engine_of(model: nn.Module, stage: int) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {**zero, "stage3_max_reuse_distance": 0},
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.arange(4)[None]))
    engine.step()
    return engine


def one_by_one(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Gathers few parameters at a time, as with a larger model.

    No rank continues before all have measured: messages of a rank that is ahead also use memory of this one, and once
    in some hundred runs the largest parameter was still held when the next message arrived.
    """
    with mock.patch.object(gathered_parameters, "TOGETHER_NUMEL", 1):
        for name, values in hf_zero.gathered_weights(engine):
            yield name, values
            torch.distributed.barrier()


def run_plain(rank: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    """The exported weights, a state dict to compare, the increase of memory, and the elements received from others."""
    torch.manual_seed(0)
    engine = engine_of(Model(), stage)
    expected = {name: values.clone() for name, values in engine.module_state_dict().items()}
    copies = {}
    rest, most = live_bytes(), 0
    ledger.reset()
    for name, values in one_by_one(engine):
        copies[name] = values.clone()
        most = max(most, live_bytes(list(copies.values())))
    return copies, expected, most - rest, sum(t.within for t in ledger.tallies.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_come_whole_one_after_the_other(stage: int) -> None:
    for copies, expected, risen, num_bytes in run_ranks(run_plain, WORLD, stage):
        assert list(copies) == [name for name in expected if name != "head.weight"][:1] + [
            "head.weight", *(name for name in expected if name.startswith("layers"))
        ]  # fmt: skip
        assert all(torch.equal(copies[name], expected[name]) for name in expected)
        if stage == 3:
            assert 0 < risen <= 1.05 * LARGEST_BYTES
            whole = 4 * sum(values.numel() for name, values in expected.items() if name != "head.weight")
            assert num_bytes == whole // WORLD  # the other rank's half of each
        else:
            assert risen == num_bytes == 0


def run_large(rank: int) -> tuple[int, int, int, int]:
    """(parameters, bytes of the largest, increase of tensor memory, increase of anonymous memory) during the export."""
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = LlamaConfig(vocab_size=32000, tie_word_embeddings=True, use_cache=False, **shape)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(config)
    engine = hf_zero.initialize(model=model, config=settings)[0]
    rest, most, numel, largest = live_bytes(), 0, 0, 0
    with anonymous_memory() as watched:
        for name, values in hf_zero.gathered_weights(engine):
            most = max(most, live_bytes())
            if name != "lm_head.weight":
                numel, largest = numel + values.numel(), max(largest, values.nbytes)
    return numel, largest, most - rest, watched.grown


@pytest.mark.slow
def test_a_model_of_110_million_rises_by_one_parameter() -> None:
    for numel, largest, risen, grown in run_ranks(run_large, WORLD, timeout_s=250):
        assert 109e6 < numel < 111e6
        assert 0 < risen <= 1.05 * largest
        assert grown <= 1.05 * largest


def run_adapted(rank: int, kind: str) -> tuple[list[str], float, int]:
    """Names, the largest difference from a model with its adapter merged by PEFT, and the increase of memory."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["layers.0", "layers.3"]
    config = LoraConfig(
        r=4, target_modules=targets, modules_to_save=["layers.5"], init_lora_weights=False, use_dora=kind == "dora"
    )
    model = get_peft_model(Model(), config)
    engine = engine_of(model, 3)
    rest, most, found = live_bytes(), 0, {}
    for name, values in one_by_one(engine):
        found[name] = values.clone()
        most = max(most, live_bytes(list(found.values())))
    with hf_zero.gathered(engine):
        merged = model.merge_and_unload()
        expected = {name: values.detach().clone() for name, values in merged.state_dict().items()}
    assert found.keys() == expected.keys()
    return list(found), max((found[name] - expected[name]).abs().max().item() for name in found), most - rest


@requires(modules=("peft",))
def test_adapters_are_merged_layer_by_layer() -> None:
    """TRL gathers the whole model for the merge, although the adapter is a thousandth of it."""
    for names, difference, risen in run_ranks(run_adapted, WORLD, "lora"):
        assert "layers.5.weight" in names and not any("lora" in name or "base" in name for name in names)
        assert difference < 1e-6
        assert risen <= 1.05 * LARGEST_BYTES


@requires(modules=("peft",))
def test_an_adapter_that_is_no_sum_is_refused() -> None:
    with pytest.raises(Exception, match=r"the adapter of .*layers.0 is not added to a weight"):
        run_ranks(run_adapted, WORLD, "dora")
