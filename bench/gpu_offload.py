"""The largest Llama-like model that one GPU and its host memory train: ZeRO-3, parameters and optimizer offloaded.

    python -m bench.gpu_offload                       # as many layers as host memory holds
    python -m bench.gpu_offload --layers 8 --json FILE
    python -m bench.gpu_offload --layers 2 --hidden 64 --length 32      # a trial run without a GPU

bf16, gradient checkpointing, AdamW on the CPU. Reports tokens per second and the share of a step in which the GPU is
busy, and compares both with an estimate from the machine's measured rates. Needs only torch and hf_zero's requirements.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.api.zero_init import Init
from hf_zero.comm import local_device
from hf_zero.device.host_memory import host_available

VOCABULARY = 32_000
# Per parameter: bf16 shard and gradient, fp32 master and two moments; streaming: the shard and the rest of its master.
HOST_BYTES = {None: 16, "fp32": 12, "bf16": 8}
HOST_SHARE = 0.9  # of the available memory; the rest is for the interpreter and buffers
FLOPS_PER_PARAMETER = 8  # per token: forward, recomputed forward, backward


class Block(nn.Module):
    """Attention and a gated MLP with norms and rotary positions: the shape of a Llama layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        wide = 8 * hidden // 3 // 64 * 64 or hidden
        self.gate_up, self.down = nn.Linear(hidden, 2 * wide, bias=False), nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = (parts[:, :, index] for index in range(3))
        mixed = F.scaled_dot_product_attention(_rotate(q, turn), _rotate(k, turn), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Token ids [batch, length] -> loss of predicting the next ones.

    Attributes:
        recomputes: whether backward recomputes each layer's forward; False if the layers do so themselves.
    """

    recomputes = True

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 1e4 ** -(torch.arange(0, self.width, 2, device=tokens.device) / self.width)
        turn, x = positions[:, None] * rates, self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, turn, use_reentrant=False) if self.recomputes else layer(x, turn)
        logits = self.head(self.norm(x)[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def block_numel(hidden: int) -> int:
    """Parameters of one layer."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Block(hidden, 1).parameters())


def layers_that_fit(hidden: int, streaming: str | None) -> int:
    """The number of layers whose states fit in host memory."""
    numel = HOST_SHARE * host_available() / HOST_BYTES[streaming] - 2 * VOCABULARY * hidden
    return max(1, int(numel // block_numel(hidden)))


def build(options: argparse.Namespace) -> Any:
    """The engine; the model never exists unpartitioned."""
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 50_000_000,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    if options.streaming:
        # A whole gradient never exists: it can neither be clipped nor checked before the update.
        config |= {"gradient_clipping": 0.0, "bf16": {"enabled": True, "check_grad_overflow": False}}
        config["zero_optimization"] = {"stage": 3, "offload_param": {"device": "cpu"}}
        config["hf_zero"] = {"streaming": {"enabled": True, "states": options.streaming}}
    torch.manual_seed(0)
    with Init(config_dict_or_path=config, remote_device="cpu"):
        model = Llama(options.hidden, options.heads, options.layers)
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def step(engine: Any, tokens: Tensor) -> dict[str, float]:
    """Seconds of each part of one step, including the device's work."""
    times = [_now()]
    loss = engine(tokens)
    times.append(_now())
    engine.backward(loss)
    times.append(_now())
    engine.step()
    times.append(_now())
    forward, backward, update = (end - start for start, end in zip(times, times[1:], strict=False))
    return {"loss": float(loss.detach()), "forward_s": forward, "backward_s": backward, "update_s": update}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def busy_shares(engine: Any, tokens: Tensor) -> dict[str, float]:
    """Shares of one step, under the profiler, in which the GPU runs kernels and copies."""
    if not torch.cuda.is_available():
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        seconds = sum(value for name, value in step(engine, tokens).items() if name.endswith("_s"))
    kinds: dict[str, list[tuple[float, float]]] = {"kernels": [], "copies": []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = "copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"
            kinds[kind].append((event.time_range.start, event.time_range.end))
    return {kind: covered(spans) / 1e6 / seconds for kind, spans in kinds.items()}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def estimate(numel: int, num_tokens: int) -> dict[str, float]:
    """Seconds of each part of a step from the machine's rates; computation and transfers overlap."""
    if not torch.cuda.is_available():
        return {}
    flops, to_device, per_parameter = matmul_rate(), copy_rate(), adam_rate()
    compute = FLOPS_PER_PARAMETER * numel * num_tokens / flops
    transfer = 2 * numel * (2 + 1) / to_device  # parameters for forward and for backward, gradients
    update = numel * per_parameter
    return {"compute_s": compute, "transfer_s": transfer, "update_s": update, "step_s": max(compute, transfer) + update}


def _timed(call: Any, repeats: int = 5) -> float:
    call()
    started = _now()
    for _ in range(repeats):
        call()
    return (_now() - started) / repeats


def matmul_rate() -> float:
    """bf16 FLOP/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _timed(lambda: a @ b)


def copy_rate() -> float:
    """Bytes/s from pinned host memory to the device."""
    home = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(home, device="cuda")
    return home.numel() / _timed(lambda: there.copy_(home, non_blocking=True))


def adam_rate() -> float:
    """Seconds per parameter of the CPU's update."""
    from hf_zero.kernels.adam import AdamRule, adam
    from hf_zero.kernels.vectors import Vectors

    numel = 1 << 26
    master, m, v = (torch.zeros(numel) for _ in range(3))
    vectors = Vectors(master, torch.ones(numel).bfloat16(), (m, v), master.bfloat16())
    rule = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True)
    return _timed(lambda: adam(vectors, rule, 1), repeats=2) / numel


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build, train, and compare the measurements with the estimate."""
    started = time.perf_counter()
    engine = build(options)
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    tokens = torch.randint(0, VOCABULARY, (options.batch, options.length), device=local_device())
    found: dict[str, Any] = {"numel": numel, "layers": options.layers, "init_s": time.perf_counter() - started}
    steps = [step(engine, tokens) for _ in range(options.steps + 1)][1:]
    seconds = sum(sum(value for name, value in one.items() if name.endswith("_s")) for one in steps) / len(steps)
    found |= {"steps": steps, "step_s": seconds, "tokens_per_s": tokens.numel() / seconds}
    found["busy"] = busy_shares(engine, tokens)
    if torch.cuda.is_available():
        found["device_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    engine.destroy()
    return {**found, "estimate": estimate(numel, tokens.numel())}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=0, help="default: one per 128 of hidden")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as host memory holds")
    parser.add_argument("--streaming", choices=("fp32", "bf16"), help="stream, with host states of this dtype")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="output file")
    options = parser.parse_args(words)
    options.heads = options.heads or max(1, options.hidden // 128)
    options.layers = options.layers or layers_that_fit(options.hidden, options.streaming)
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(words)
    found = measure(options)
    sys.stdout.write(f"{found['numel'] / 1e9:.2f} billion parameters, {options.layers} layers\n")
    sys.stdout.write(f"step {found['step_s']:.2f} s, {found['tokens_per_s']:.0f} tokens/s; GPU busy {found['busy']}\n")
    sys.stdout.write(f"estimate {found['estimate']}\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
