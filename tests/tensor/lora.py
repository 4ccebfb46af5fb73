"""Models with PEFT adapters, without zero weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn

from tests.tensor.models import model_of

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_OF_GPT2 = ["c_attn", "c_proj", "c_fc"]


def targets_of(kind: str) -> dict[str, Any]:
    """Default targets of tests: all linear layers; for Mixtral those of the attention."""
    if kind.startswith("gpt2"):
        return {"target_modules": ALL_OF_GPT2, "fan_in_fan_out": True}
    return {"target_modules": ATTENTION if kind == "mixtral" else "all-linear"}


def lora(kind: str, **more: Any) -> LoraConfig:
    options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(**options | targets_of(kind) | more)


def adapted(kind: str, config: PeftConfig | None = None, **more: Any) -> nn.Module:
    """`model_of(kind)` with LoRA (`more`: in its config) or another adapter, with the same values on all ranks."""
    return around(model_of(kind), config or lora(kind, **more))


def around(model: nn.Module, config: PeftConfig) -> nn.Module:
    """`model` with an adapter, which has the same values in every call."""
    torch.manual_seed(8)
    found: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    return with_noise(found)


@torch.no_grad()
def with_noise(model: nn.Module) -> nn.Module:
    """Adds noise to all trained parameters: the initial biases and magnitudes would hide errors. B is scaled to the
    size of weights, so that differences can be distinguished from rounding."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.mul_(0.2 if ".lora_B." in name else 1)
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()
