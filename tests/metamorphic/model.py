"""Model, data and ds.json of a task in a shape: the same weights and samples in every process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.metamorphic.spec import ROWS, Shape, Task

VOCABULARY, LENGTH, WIDTH = 61, 8, 6
IGNORED = -100
RATE = 1e-2
# Intentionally large for Adam: it bounds how far rounding in a gradient near zero can move a weight (rate / eps).
EPS = 1e-3
Batch = dict[str, Tensor]


class Mlp(nn.Module):
    """Odd sizes, a scalar, a frozen matrix, a tied one and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle = nn.Linear(WIDTH, 13), nn.Linear(13, 13)
        self.frozen, self.unused = nn.Linear(13, 13), nn.Parameter(torch.randn(5))
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.middle.weight
        self.scale, self.head = nn.Parameter(torch.tensor(0.7)), nn.Linear(13, 3)
        self.frozen.requires_grad_(False)
        self.recompute = ""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = x.to(self.head.weight.dtype)
        hidden = torch.tanh(self.inner(x))
        if self.recompute and self.training:
            hidden = checkpoint(self._between, hidden, use_reentrant=self.recompute == "reentrant")
        else:
            hidden = self._between(hidden)
        logits = self.head(hidden) * self.scale
        return (None if y is None else nn.functional.mse_loss(logits.float(), y)), logits

    def _between(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.middle(hidden) + self.frozen(hidden)) + self.again(hidden)


class Encoder(nn.Module):
    """Layers that are copies of others when the model is built, some of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 12)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        block = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.blocks = nn.ModuleList([copy.deepcopy(block) for _ in range(2)])
        self.teacher = copy.deepcopy(self.blocks[0]).requires_grad_(False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = x.to(self.head.weight.dtype)
        hidden = self.encoder(self.inner(x).unflatten(-1, (3, 4))).flatten(-2)
        taught = self.teacher(hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden + taught)
        return (None if y is None else nn.functional.mse_loss(logits.float(), y)), logits


class Normed(nn.Module):
    """Running statistics, of every rank's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first = nn.Linear(WIDTH, 10, bias=False), nn.BatchNorm1d(10)
        self.middle, self.second = nn.Linear(10, 10), nn.BatchNorm1d(10, momentum=0.5)
        self.head = nn.Linear(10, 3)
        self.second.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        x = x.to(self.head.weight.dtype)
        hidden = self.second(torch.tanh(self.middle(self.first(self.inner(x)))))
        logits = self.head(hidden)
        return (None if y is None else nn.functional.mse_loss(logits.float(), y)), logits


_OWN_MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "encoder": Encoder, "normed": Normed}


def _bare(kind: str) -> nn.Module:
    if kind in _OWN_MODELS:
        return _OWN_MODELS[kind]()
    common = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(n_embd=24, n_layer=2, n_head=4, n_positions=16, **common, **dropouts))
    shape = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "max_position_embeddings": 16, **shape}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common, head_dim=6, tie_word_embeddings=True))
    if kind == "mixtral":
        common |= {"intermediate_size": 40}  # rows of parts of matrices are aligned to 16 bytes, for grouped_mm
        return MixtralForCausalLM(MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**common))


def build_model(task: Task, recompute: str = "") -> nn.Module:
    """Biases and gains are not initialized to zeros and ones, which would hide errors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = _bare(task.model)
        if task.adapters:
            from peft import LoraConfig, get_peft_model

            targets = {"gpt2": ["c_attn", "c_fc"], "mixtral": ["q_proj", "v_proj"]}
            modules = targets.get(task.model, ["q_proj", "v_proj", "down_proj"])
            options = {"target_modules": modules, "fan_in_fan_out": task.model == "gpt2", "init_lora_weights": False}
            model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape) * 0.05
                if task.driver == "own" and task.precision == "bf16":  # as under zero.Init, which rounds weights
                    parameter.copy_(parameter.bfloat16() + noise.bfloat16())
                else:
                    parameter.add_(noise)
    if recompute and isinstance(model, Mlp):
        model.recompute = recompute
    elif recompute:
        if task.adapters:  # otherwise reentrant recomputation finds nothing that requires a gradient
            model.enable_input_require_grads()  # type: ignore[operator]
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})  # type: ignore[operator]
    return model.train()


def samples(task: Task, number: int, first: int = 0) -> list[Batch]:
    """Training samples from `first` on, each generated from its number; evaluation samples have negative numbers."""
    found = []
    for index in range(first, first + number):
        generator = torch.Generator().manual_seed(task.seed * 1_000_003 + index + 500_000)
        if task.model in _OWN_MODELS:
            x = torch.randn(WIDTH, generator=generator)
            found.append({"x": x, "y": torch.stack([x.sum(), x[0] * x[1], x[2].sin()])})
            continue
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        # Nothing predicts the first label, and some libraries count it nevertheless.
        ignored = 1 + int(torch.randint(LENGTH - 2, (1,), generator=generator)) if task.uneven else 1
        labels[:ignored] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def stack(rows: list[Batch]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def evaluated(task: Task) -> list[Batch]:
    return samples(task, task.num_evaluated, -task.num_evaluated)


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 5 * RATE, "momentum": 0.9},
    "Lion": {"lr": RATE / 10, "weight_decay": 0.1},
    "Adagrad": {"lr": RATE, "eps": EPS},
    "Lamb": {"lr": RATE, "eps": EPS, "weight_decay": 0.1},
    "Muon": {"lr": RATE},
    "Adafactor": {"lr": RATE},
    "OneBitAdam": {"lr": RATE, "eps": EPS, "freeze_step": 2},
}
_FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "curriculum": {
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 4,
            "max_difficulty": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 2},
        }
    },
    "random_ltd": {
        "data_efficiency": {
            "data_routing": {
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 2,
                    "random_ltd_layer_num": 1,
                    "random_ltd_layer_id": [1],
                    "model_mask_name": "attention_mask",
                    "model_type": "decoder",
                    "hidden_state_order": "batch_seq_dim",
                    "random_ltd_schedule": {
                        "min_value": 4,
                        "max_value": LENGTH,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 6, "seq_per_step": 2},
                    },
                }
            }
        }
    },
    "layer_drop": {"progressive_layer_drop": {"enabled": True, "theta": 0.3, "gamma": 2.0}},
    "compression": {
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {"enabled": True, "schedule_offset": 1, "quantize_groups": 1},
                "different_groups": {
                    "all": {
                        "params": {"start_bits": 10, "target_bits": 8, "quantization_period": 1},
                        "modules": ["mlp"],
                    }
                },
            }
        }
    },
}


def ds_config(task: Task, shape: Shape, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": shape.stage, "overlap_comm": shape.overlap}
    own: dict[str, Any] = {}
    if shape.small:
        zero |= {"reduce_bucket_size": 700, "allgather_bucket_size": 900, "sub_group_size": 1500}
        if shape.stage == 3:
            names = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
            zero |= {f"stage3_{name}": 0 for name in names}
    what, _, device = shape.offload.partition("_")
    place = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    if what in ("optimizer", "both"):
        zero["offload_optimizer"] = place
    if what in ("param", "both"):
        zero["offload_param"] = {**place, **({"max_in_cpu": 0} if device == "nvme" else {})}
    if shape.gather_group:
        zero["zero_hpz_partition_size"] = shape.gather_group
    if shape.shard_group:
        own["shard_group"] = shape.shard_group
    if task.wire:
        zero[f"zero_quantized_{task.wire}"] = True
    own |= {f"tiled_{name}": True for name in ("mlp", "loss") if shape.tiles in (name, "both")}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.accumulation,
        "gradient_clipping": task.clip,
        "zero_optimization": zero,
        "optimizer": {
            "type": task.optimizer,
            "params": _OPTIMIZERS.get(task.optimizer, {"lr": RATE, "eps": EPS, "weight_decay": 0.1}),
        },
        **_FEATURES[task.feature],
    }
    if own:
        config["hf_zero"] = own
    if task.precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif task.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": task.scale_power}
    if shape.keeps_on_host:
        config["activation_checkpointing"] = {"cpu_checkpointing": True, "contiguous_memory_optimization": True}
    if shape.universal:
        config["checkpoint"] = {"load_universal": True}
    if shape.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": shape.tensor}
    if shape.experts > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": shape.experts}
    if task.schedule:
        steps = {"warmup_num_steps": 1, "total_num_steps": 5, "warmup_max_lr": RATE, "warmup_min_lr": RATE / 3}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": steps}
    return config


def share(shape: Shape, rank: int, micro: int, rows: list[Batch]) -> list[Batch]:
    """A rank's samples in one micro-batch of an update."""
    start = (micro * shape.data_ranks + rank // (shape.tensor * shape.sequence)) * shape.micro_batch
    return rows[start : start + shape.micro_batch]


def sequence_part(shape: Shape, rank: int) -> int:
    """Which part of its sequences a rank holds: ranks that hold parts of the same matrices hold the same one."""
    return rank // shape.tensor % shape.sequence


def update_samples(task: Task, update: int) -> list[Batch]:
    return samples(task, ROWS, update * ROWS)
