"""Training with expert parallelism, and the same in one plain process: losses, norms and weights compared."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

VOCABULARY, RATE, CLIP, EXPERTS, HIDDEN, LAYERS = 61, 0.1, 0.5, 4, 16, 2
KINDS = ("mixtral", "qwen3", "deepseek", "gpt-oss")
Batch = dict[str, Tensor]


def config_of(kind: str) -> PreTrainedConfig:
    """Tiny models; each token is routed to 2 experts."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    if kind == "qwen3":
        return Qwen3MoeConfig(
            **common, head_dim=8, num_experts=EXPERTS, moe_intermediate_size=16, norm_topk_prob=True,
            output_router_logits=True, router_aux_loss_coef=0.1, mlp_only_layers=[],
        )  # fmt: skip
    if kind == "deepseek":  # a dense layer first, a shared expert, groups of experts
        return DeepseekV3Config(
            **common, n_routed_experts=EXPERTS, n_group=2, topk_group=1, moe_intermediate_size=16, n_shared_experts=1,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=8,
        )  # fmt: skip
    if kind == "gpt-oss":  # biases, interleaved features of gate and up
        return GptOssConfig(**common, head_dim=8, num_local_experts=EXPERTS, sliding_window=8)
    return MixtralConfig(
        **common, num_local_experts=EXPERTS, output_router_logits=True, router_aux_loss_coef=0.1, sliding_window=None
    )


def model_of(kind: str, implementation: str = "eager") -> nn.Module:
    torch.manual_seed(7)
    config = config_of(kind)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # even where zeros and ones would hide an error
    return model.train()


def batches(number: int, size: int = 2, length: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(number):
        ids = torch.randint(1, VOCABULARY, (size, length), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]

    def differs_from(self, other: Trained, losses: list[float] | None = None) -> tuple[float, float, float]:
        """The largest difference of losses, norms and weights; `losses` are the other's, in another order."""
        assert list(self.weights) == list(other.weights)
        pairs = ((mine.cpu(), other.weights[name].cpu()) for name, mine in self.weights.items())
        weights = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
        told = other.losses if losses is None else losses
        return _apart(self.losses, told), _apart(self.norms, other.norms), weights


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


def in_one_process(model: nn.Module, data: list[Batch], *, together: int) -> Trained:
    """Plain PyTorch, with `together` batches per update."""
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for start in range(0, len(data), together):
        for batch in data[start : start + together]:
            loss = model(**batch).loss
            (loss / together).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def engine_of(
    model: nn.Module,
    stage: int,
    size: int,
    rank: int = 0,
    zero: dict[str, Any] | None = None,
    *,
    in_shards: bool = False,
    **more: Any,
) -> Any:
    """The other ranks start with different values, which must not matter.

    Args:
        zero: further keys of the section zero_optimization; `more`: of the config.
        in_shards: as `zero.Init` makes it.
    """
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **(zero or {})},
        "expert_parallel": {"enabled": size > 1, "autoep_size": size},
        **more,
    }
    if in_shards:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]


def train(engine: Any, data: list[Batch], rank: int, world: int) -> Trained:
    losses, norms = [], []
    for number, batch in enumerate(data[rank::world]):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        if (number + 1) % engine.gradient_accumulation_steps() == 0:
            norms.append(float(engine.get_global_grad_norm()))
    names = [name for name, _ in engine.module.named_parameters()]
    weights = engine.module_state_dict()
    return Trained(losses, norms, {name: weights[name].clone() for name in names})


def bytes_per_token(*, hidden: int, itemsize: int, top_k: int, computed_again: bool = False) -> int:
    """Bytes per token that a layer of experts sends: forward and backward each send `top_k` rows of `hidden` elements
    to experts and as many back. `computed_again`: forward runs a second time (gradient checkpointing)."""
    return (6 if computed_again else 4) * top_k * hidden * itemsize
