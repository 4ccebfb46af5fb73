"""TRL's transfer of weights to a vLLM-style engine, with states offloaded meanwhile: the trained weights arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hf_zero
from hf_zero.api import gathered_parameters
from hf_zero.comm import ledger
from hf_zero.integration.patches import MARK
from tests.support.ranks import run_ranks
from tests.support.requirements import requires

pytestmark = requires(modules=("trl", "peft"))
WORLD, ROUNDS = 2, 3


class Receiver:
    """The API that TRL uses of a server's client and a colocated engine's model: they take named weights."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], params: Iterator[Any]) -> None:
        """Like vLLM's sender, which joins the tensors of many parameters into one buffer after it has got the last."""
        self.load_weights(list(params))
        told = {name: shape for name, _, shape in metadata}
        assert told == {name: list(values.shape) for name, values in self.weights.items()}

    def load_weights(self, params: Iterable[tuple[str, Tensor]]) -> None:
        self.weights |= {name: values.clone() for name, values in params}

    def reset_prefix_cache(self) -> None:
        return None


def _prepared(kind: str, stage: int, *, tied: bool = False) -> tuple[Any, Any, Any]:
    """(accelerator, engine, optimizer) as in GRPOTrainer."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, use_cache=False, tie_word_embeddings=tied)
    )
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, engine, optimizer


def run_alone(rank: int) -> tuple[list[str], list[str]]:
    """Names that arrive, and those that TRL itself would send."""
    from trl.generation.vllm_generation import VLLMGeneration

    accelerator, engine, _ = _prepared("lora", 3, tied=True)
    with mock.patch.object(VLLMGeneration, "_init_vllm"):
        generation = VLLMGeneration(accelerator.unwrap_model(engine), accelerator, None, mode="colocate")
    with mock.patch.object(gathered_parameters, "TOGETHER_NUMEL", 1):
        arrived = [name for name, _ in generation._iter_named_params()]
    upstream = getattr(VLLMGeneration._iter_named_params, MARK)
    return arrived, [name for name, _ in upstream(generation)]


def test_merged_weights_have_the_names_that_trl_would_send() -> None:
    """Every weight once, a tied one under its first name, also if each is gathered alone."""
    for arrived, expected in run_ranks(run_alone, WORLD):
        assert sorted(arrived) == sorted(expected) and "lm_head.weight" not in arrived


def run_sync(rank: int, kind: str, mode: str, stage: int) -> list[tuple[float, int, int]]:
    """By round: the largest difference of received weights; bytes from the other rank; bytes of all weights."""
    from trl.generation.vllm_generation import VLLMGeneration

    accelerator, engine, optimizer = _prepared(kind, stage)
    receiver, found = Receiver(), []
    with mock.patch.object(VLLMGeneration, "_init_vllm"):
        generation = VLLMGeneration(accelerator.unwrap_model(engine), accelerator, None, mode=mode)
    generation.vllm_client, generation._weight_metadata = receiver, None
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=receiver))
    executor = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
    generation.llm = SimpleNamespace(llm_engine=executor, reset_prefix_cache=receiver.reset_prefix_cache)
    for number in range(ROUNDS):
        engine.offload_states()  # frees device memory for the rollout
        ledger.reset()
        generation.sync_weights()
        received = sum(tally.within for tally in ledger.tallies.values())
        engine.reload_states()
        expected = {name: values.clone() for name, values in hf_zero.gathered_weights(engine)}
        if mode == "colocate" or rank == 0:
            assert receiver.weights.keys() == expected.keys()
            apart = max(float((receiver.weights[name] - values).abs().max()) for name, values in expected.items())
        else:
            apart = 0.0
        found.append((apart, received, sum(values.nbytes for values in expected.values())))
        tokens = torch.arange(12).view(2, 6) + number + rank
        accelerator.backward(engine(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("kind", "mode", "stage"),
    [
        ("full", "server", 3),
        pytest.param("full", "colocate", 3, marks=pytest.mark.slow),
        pytest.param("full", "server", 2, marks=pytest.mark.slow),
        pytest.param("lora", "colocate", 3, marks=pytest.mark.slow),
        ("lora", "server", 3),
    ],
)
def test_what_arrives_is_what_trains(kind: str, mode: str, stage: int) -> None:
    for found in run_ranks(run_sync, WORLD, kind, mode, stage):
        assert len(found) == ROUNDS and all(apart <= (0 if kind == "full" else 1e-6) for apart, _, _ in found)
        # A server first gets names and shapes, for which TRL iterates over all weights once more.
        passes = [1 + (mode == "server" and number == 0) for number in range(ROUNDS)]
        if kind == "lora":
            limits = [1.2 * each * whole // WORLD for each, (_, _, whole) in zip(passes, found, strict=True)]
            received = [received for _, received, _ in found]
            assert all(0 < sent <= limit for sent, limit in zip(received, limits, strict=True)), "weights and adapters"
        else:
            shares = [each * whole // WORLD * (stage == 3) for each, (_, _, whole) in zip(passes, found, strict=True)]
            assert [received for _, received, _ in found] == shares
