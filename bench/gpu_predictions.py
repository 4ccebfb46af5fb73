"""Predictions of `plan` for transformers' models on one GPU, and their measurements: peak memory and seconds per step.

    python -m bench.gpu_programme --block 4 --parts plan

Random weights in bf16, AdamW, attention by SDPA. Allocated is the peak of tensors' memory; reserved is what PyTorch's
caching allocator has reserved for them, to which `plan` adds the driver's context.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

CPU = {"device": "cpu", "pin_memory": True}
BOTH = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
STREAMING: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_param": CPU},
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "gradient_clipping": 0.0,
    "hf_zero": {"streaming": {"enabled": True}},
}
STEPS = 4  # the first is not timed


@dataclass(frozen=True)
class Run:
    """A model, its samples and its ds.json."""

    model: str
    batch: int
    length: int
    checkpointing: bool
    zero: dict[str, Any]
    lora_rank: int | None = None

    @property
    def name(self) -> str:
        zero = self.ds_config["zero_optimization"]
        away = [key for key in ("offload_optimizer", "offload_param") if key in zero]
        way = "streaming" if "hf_zero" in self.ds_config else f"stage {zero['stage']}"
        places = {0: "", 1: ", states on the host", 2: ", all on the host"}[len(away)] if way != "streaming" else ""
        more = f", LoRA of rank {self.lora_rank}" if self.lora_rank else ""
        recomputes = ", checkpointing" if self.checkpointing else ""
        return f"{self.model}, {self.batch} x {self.length}, {way}{places}{recomputes}{more}"

    @property
    def ds_config(self) -> dict[str, Any]:
        given = self.zero if "zero_optimization" in self.zero else {"zero_optimization": self.zero}
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "steps_per_print": 1 << 30,
            **given,
        }


RUNS = (
    Run("Qwen2.5 0.5B", 4, 2048, False, {"stage": 2}),
    Run("Llama 3.2 1B", 1, 2048, False, {"stage": 0}),
    Run("Llama 3.2 1B", 4, 4096, True, {"stage": 3}),
    Run("Llama 3.2 1B", 8, 2048, True, {"stage": 2, "offload_optimizer": CPU}),
    Run("Qwen3 MoE 1.3B", 4, 2048, True, {"stage": 2}),
    Run("Llama 3.2 3B", 2, 2048, True, {"stage": 3}),
    Run("Llama 3.1 8B", 2, 4096, True, {"stage": 3}, lora_rank=16),
    Run("Llama 3.2 3B", 8, 2048, True, BOTH),
    Run("Llama 3.2 3B", 8, 2048, True, STREAMING),
    Run("Llama 3.1 8B", 4, 2048, True, STREAMING),
)


def config_of(name: str, tiny: bool = False) -> Any:
    """transformers' config with the sizes of the published models."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

    def llama(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=tied,
            architectures=["LlamaForCausalLM"],
        )  # fmt: skip

    if name == "Qwen2.5 0.5B":
        config: Any = Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
        )  # fmt: skip
    elif name == "Qwen3 MoE 1.3B":
        config = Qwen3MoeConfig(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, moe_intermediate_size=512,
            num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4, num_experts=32,
            num_experts_per_tok=4, head_dim=64, tie_word_embeddings=True, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
    else:
        shapes = {
            "Llama 3.2 1B": (2048, 8192, 16, 32, True),
            "Llama 3.2 3B": (3072, 8192, 28, 24, True),
            "Llama 3.1 8B": (4096, 14336, 32, 32, False),
        }
        config = llama(*shapes[name])
    if tiny:
        config.num_hidden_layers, config.vocab_size = 2, 512
        config.hidden_size = 16 * config.num_attention_heads
        config.intermediate_size = 64
        if hasattr(config, "head_dim"):
            config.head_dim = 16
    config.use_cache = False
    return config


def measure(run: Run, device: torch.device, tiny: bool, experts: str | None = None) -> dict[str, Any]:
    """Train for a few steps. `experts`: transformers' implementation of experts; default: its own choice."""
    from transformers import AutoModelForCausalLM

    from hf_zero import initialize

    _forget(device)
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config_of(run.model, tiny), dtype=torch.bfloat16)
    if experts is not None:
        model.set_experts_implementation(experts)
    if run.lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=run.lora_rank, target_modules="all-linear"))
    if run.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = initialize(model=model, model_parameters=trained, config=run.ds_config)[0]
    batch, length = (1, 32) if tiny else (run.batch, run.length)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (batch, length), device=device)
    found: dict[str, Any] = {"run": run.name, "parameters": sum(each.numel() for each in trained)}
    _forget(device)
    times, losses = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - start)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.max_memory_reserved()
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": reserved}
        found |= {"driver": total - free - torch.cuda.memory_reserved() + reserved}
    found |= {"losses": losses, "s_of_steps": times, "s_per_step": statistics.median(times[1:])}
    engine.destroy()
    return found


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def predict(run: Run, gpu: str, host_gb: int) -> dict[str, Any]:
    """The row of `plan` for this ds.json."""
    from hf_zero.planning.candidates import Training, training_of
    from hf_zero.planning.choose import given_estimates
    from hf_zero.planning.machine import hardware
    from hf_zero.planning.model import load_model

    machine = hardware({"gpu": gpu, "gpus_per_node": 1, "nodes": 1, "host_memory": f"{host_gb}G"})
    with tempfile.TemporaryDirectory() as folder:
        config_of(run.model).save_pretrained(folder)
        model = load_model(folder, "bf16", run.lora_rank or 0)
    asked = Training(length=run.length, micro_batch=run.batch, checkpointing=run.checkpointing)
    training = training_of(run.ds_config, asked, machine.ranks)
    (found,) = given_estimates(model, machine, training, run.ds_config)
    return {"device": dict(found.memory.device), "total": found.memory.device_total, "seconds": found.seconds}
