"""At stage 3 no rank holds the whole model during construction or loading, which give the right dtype and values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
)

from tests.end_to_end.stage3 import arguments, auto_config, whole
from tests.support.memory import anonymous_memory
from tests.support.ranks import run_ranks

WORLD = 2
SHARD = "20MB"
MIB = 1 << 20


def llama_config() -> LlamaConfig:
    """200 MB in fp32."""
    return LlamaConfig(
        vocab_size=4000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12
    )


def mixtral_config() -> MixtralConfig:
    """190 MB in fp32, most of it in experts, which are separate in the checkpoint and packed in the model."""
    return MixtralConfig(
        vocab_size=4000,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        num_local_experts=8,
        max_position_embeddings=512,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {"llama": llama_config, "mixtral": mixtral_config}
CLASSES: dict[str, Any] = {"llama": LlamaForCausalLM, "mixtral": MixtralForCausalLM}


@dataclass(frozen=True)
class Measured:
    """The increase of one rank's anonymous memory, and sizes to compare it with, in bytes."""

    grown: int
    model: int
    largest_layer: int

    @property
    def allowed(self) -> float:
        """The share of the rank, one layer, and a tenth."""
        return 1.1 * (self.model / WORLD + self.largest_layer)


def measured(build: Callable[[], Any]) -> Measured:
    """Builds a model and measures memory. Interpreter, libraries and the first gather have been warmed up."""
    gc.collect()
    with anonymous_memory() as memory:
        model = build()
    element = next(model.parameters()).element_size()
    parameters = [parameter.numel() * element for parameter in model.parameters()]
    layers = [sum(p.numel() * element for p in layer.parameters()) for layer in model.model.layers]
    return Measured(memory.grown, sum(parameters), max(layers))


def run_measured(rank: int, folder: str, kind: str, loads: bool) -> Measured:
    alive = arguments(f"{folder}/out", auto_config())
    AutoModelForCausalLM.from_pretrained(f"{folder}/tiny_{kind}")  # runs everything once
    if loads:
        found = measured(lambda: AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}"))
    else:
        found = measured(lambda: AutoModelForCausalLM.from_config(CONFIGS[kind]()))
    del alive
    return found


def save(folder: Path, kind: str) -> None:
    """Saves the model in several files, and a tiny one of its kind."""
    config = CONFIGS[kind]()
    CLASSES[kind](config).save_pretrained(folder / kind, max_shard_size=SHARD)
    assert len(list((folder / kind).glob("*.safetensors"))) > 5
    save_tiny(folder, kind)


def save_tiny(folder: Path, kind: str) -> Any:
    """The same architecture with hardly any weights."""
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    model = CLASSES[kind](type(CONFIGS[kind]())(**{**CONFIGS[kind]().to_dict(), **sizes, "head_dim": None}))
    model.save_pretrained(folder / f"tiny_{kind}")
    return model


def assert_modest(found: list[Measured]) -> None:
    """Checks every rank, with the figures in the message."""
    for rank, seen in enumerate(found):
        story = f"{seen.grown / MIB:.0f} MiB, allowed {seen.allowed / MIB:.0f}, model {seen.model / MIB:.0f}"
        print(f"rank {rank}: {story}")
        assert seen.model > 150 * MIB
        assert seen.grown <= seen.allowed, f"rank {rank} grew by {story}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("loads", [True, False], ids=["from_pretrained", "from_config"])
def test_no_rank_ever_holds_the_model(loads: bool, kind: str, tmp_path: Path) -> None:
    """A model that fits in shards ran out of memory during construction or loading, because the checkpoint was read
    whole on every rank, or at least on rank 0. Files are now mapped; but shards between freed whole parameters kept the
    C library's heap at twice the memory in use (236 MiB instead of 105 for this model)."""
    save(tmp_path, kind)
    assert_modest(run_ranks(run_measured, WORLD, str(tmp_path), kind, loads, init=False))


def run_load_right(rank: int, folder: str, kind: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    alive = arguments(f"{folder}/out", {**auto_config(), "bf16": {"enabled": "auto"}}, **options)
    state = torch.random.get_rng_state()
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/tiny_{kind}")
    assert torch.equal(torch.random.get_rng_state(), state), "weights were drawn at random that are loaded"
    del alive
    return whole(model)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("bf16", [False, True])
def test_loading_gives_the_saved_weights_once_and_in_the_dtype_of_training(
    kind: str, bf16: bool, tmp_path: Path
) -> None:
    """Weights under zero.Init were fp32 for bf16 training, or were first initialised randomly and then loaded."""
    model = save_tiny(tmp_path, kind)
    runs = run_ranks(run_load_right, WORLD, str(tmp_path), kind, {"bf16": bf16}, init=False)
    for loaded in runs:
        for name, value in model.named_parameters():
            expected = value.bfloat16() if bf16 else value
            assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected), name
