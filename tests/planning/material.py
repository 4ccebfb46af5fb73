"""A tiny Llama as a config.json, and plans for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from hf_zero.planning.candidates import Training
from hf_zero.planning.choose import RankedPlans, plan
from hf_zero.planning.machine import hardware
from hf_zero.planning.model import PlannedModel, load_model


def config_folder(folder: Path, **changes: Any) -> str:
    """Creates a folder with config.json."""
    values = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
        "architectures": ["LlamaForCausalLM"],
    }
    LlamaConfig(**{**values, **changes}).save_pretrained(folder)
    return str(folder)


@cache
def of_size(source: str, precision: str = "bf16") -> PlannedModel:
    """A Llama of this size, the same for all tests, which then share its traces."""
    return load_model(source, precision)


def planned(
    source: str, training: Training | None = None, model: PlannedModel | None = None, **machine: Any
) -> RankedPlans:
    """The plan for a model, by default `of_size`, on given machines."""
    given = {"gpu": "h100", "gpus_per_node": 8, "host_memory": "1T", **machine}
    training = training or Training(length=64)
    return plan(model or of_size(source, training.precision), hardware(given), training)
