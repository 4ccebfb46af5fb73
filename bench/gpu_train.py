"""Llama-like models on one GPU: hf_zero at stages 0, 2, 3 and with offload, against FSDP2, torchao and DeepSpeed.

    python -m bench.gpu_train "hf_zero 3 offload" --size 7b --micro-batches 4
    python -m bench.gpu_train "hf_zero 3 streaming 8-bit" --size 14b --in-shards
    python -m bench.gpu_train fsdp2 --size tiny --device cpu

One case in one process; bench/gpu_programme.py runs many. bf16, AdamW, clipping to 1 (not with streaming),
recomputation. Reports seconds per update, tokens per second, seconds of forward, backward and update, and peaks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.gpu_device import Device, device_of
from hf_zero.planning.arguments import known_gpu
from hf_zero.planning.event_model import Machine, Setup, Shape, simulate

VOCABULARY, TINY_VOCABULARY = 32_000, 512
# name -> hidden, heads, layers, sequences, length
SIZES = {
    "tiny": (64, 2, 2, 2, 32),
    "0.5b": (1280, 20, 20, 8, 2048),
    "1.5b": (2048, 16, 28, 8, 2048),
    "3.2b": (3072, 24, 26, 8, 2048),
    "7b": (4096, 32, 32, 4, 2048),
    "7b wide": (4096, 32, 32, 24, 2048),
    "14b": (5120, 40, 44, 16, 2048),
}


@dataclass(frozen=True)
class Way:
    """How hf_zero or DeepSpeed trains.

    Attributes:
        states: of streaming: "fp32", "bf16" or "8-bit".
    """

    setup: Setup
    states: str = "fp32"
    update: str = "cpu"  # hf_zero.offload_update
    is_compiled: bool = False
    fp8: bool = False


_OFFLOAD, _STREAMING = {"offload_optimizer": True, "offload_parameters": True}, {"streams": True, "clips": False}
OURS = {
    "hf_zero 0": Way(Setup(0)),
    "hf_zero 2": Way(Setup(2)),
    "hf_zero 3": Way(Setup(3)),
    "hf_zero 2 offload": Way(Setup(2, offload_optimizer=True)),
    "hf_zero 3 offload": Way(Setup(3, **_OFFLOAD)),
    "hf_zero 3 offload in step": Way(Setup(3, **_OFFLOAD, overlaps_step=False)),
    "hf_zero 3 offload both": Way(Setup(3, **_OFFLOAD), update="both"),
    "hf_zero 3 streaming": Way(Setup(3, **_OFFLOAD, **_STREAMING)),
    "hf_zero 3 streaming bf16": Way(Setup(3, **_OFFLOAD, **_STREAMING), states="bf16"),
    "hf_zero 3 streaming 8-bit": Way(Setup(3, **_OFFLOAD, **_STREAMING), states="8-bit"),
    "hf_zero 0 compiled": Way(Setup(0), is_compiled=True),
    "hf_zero 3 compiled": Way(Setup(3), is_compiled=True),
    "hf_zero 3 fp8": Way(Setup(3), fp8=True),
}
OTHERS = (
    "compute alone", "torch fused", "fsdp2", "deepspeed 0", "deepspeed 2", "deepspeed 3",
    "fsdp2 offload", "torchao offload", "deepspeed 2 offload", "deepspeed 3 offload",
)  # fmt: skip
NEEDS = {"torchao offload": "torchao", "hf_zero 3 fp8": "torchao"}


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

    def __init__(self, hidden: int, heads: int, layers: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.width = hidden // heads
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 1e4 ** -(torch.arange(0, self.width, 2, device=tokens.device) / self.width)
        turn, x = positions[:, None] * rates, self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, turn, use_reentrant=False) if self.recomputes else layer(x, turn)
        logits = self.head(self.norm(x)[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Trainer:
    """One way to train.

    Attributes:
        update: called after every micro-batch, with whether it is the last of an update.
        autocasts: the device type whose autocast forward runs in.
        averages: whether it averages gradients over micro-batches itself.
    """

    model: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], object]
    update: Callable[[bool], object]
    autocasts: str | None = None
    averages: bool = True
    engine: Any = None

    def step(self, batches: list[Tensor], now: Callable[[], float] | None = None) -> tuple[Tensor, dict[str, float]]:
        """One update: the mean loss, and with a clock, which waits for the device, the seconds of its parts."""
        total = torch.zeros((), device=batches[0].device)
        seconds = dict.fromkeys(("forward", "backward", "update"), 0.0)

        def timed(part: str, call: Callable[..., Any], *values: Any) -> Any:
            start = now() if now else 0.0
            result = call(*values)
            seconds[part] += now() - start if now else 0.0
            return result

        for number, tokens in enumerate(batches, 1):
            casts = torch.autocast(self.autocasts, torch.bfloat16) if self.autocasts else nullcontext()
            with casts:
                loss = timed("forward", self.model, tokens)
            total += loss.detach() / len(batches)
            timed("backward", self.backward, loss if self.averages else loss / len(batches))
            timed("update", self.update, number == len(batches))
        return total, seconds


def ds_config(way: Way, batch: int, micro_batches: int = 1) -> dict[str, Any]:
    """The same for hf_zero and DeepSpeed."""
    setup = way.setup
    zero: dict[str, Any] = {"stage": setup.stage}
    zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if setup.offload_optimizer else {}
    zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if setup.offload_parameters else {}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0 if setup.clips else 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW8bit" if way.states == "8-bit" else "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }
    if way.update != "cpu" or not way.setup.overlaps_step:
        config["hf_zero"] = {"offload_update": way.update, "overlap_step": way.setup.overlaps_step}
    if setup.streams:
        states = {"states": "bf16"} if way.states == "bf16" else {}
        config["bf16"] |= {"check_grad_overflow": False}
        config["hf_zero"] = {"streaming": {"enabled": True, **states}}
        del zero["offload_optimizer"]
    return config


def with_engine(module: str, model: Llama, config: dict[str, Any], way: Way, device: Device) -> Trainer:
    """`initialize` of hf_zero or DeepSpeed."""
    if way.fp8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda layer, name: name != "head")
    library = importlib.import_module(module)
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if way.is_compiled:
        engine.compile(backend=None if device.is_gpu else "eager")  # a CPU would compile for minutes
    return Trainer(engine, engine.backward, lambda is_last: engine.step(), engine=engine)


def with_torch(model: Llama, device: torch.device, case: str) -> Trainer:
    """fp32 masters and autocast, FSDP2 with or without CPU offload, torchao's optimizer on the host, or no update."""
    model = model.cpu() if case == "fsdp2 offload" else model.to(device)
    if case.startswith("fsdp2"):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # As in torchtitan: recomputation gets the inputs that FSDP has cast.
        model.recomputes = False
        model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)

        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if case.endswith("offload") else OffloadPolicy()
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "offload_policy": offload}
        for block in model.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
    if case == "compute alone":  # the lower bound: bf16 weights without an update
        model = model.bfloat16()

        def forget(is_last: bool) -> None:
            for parameter in model.parameters():
                parameter.grad = None

        return Trainer(model, torch.Tensor.backward, forget, averages=False)
    optimizer: Any
    if case == "torchao offload":
        from torchao.optim import CPUOffloadOptimizer

        model = model.bfloat16()
        optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(is_last: bool) -> None:
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    casts = device.type if case == "torch fused" else None
    return Trainer(model, torch.Tensor.backward, update, autocasts=casts, averages=False)


def trainer_of(case: str, size: str, micro_batches: int, device: Device, in_shards: bool) -> tuple[Trainer, int]:
    """Also the number of parameters. With `in_shards` the model never exists as a whole, except in host memory."""
    hidden, heads, layers, batch, _ = SIZES[size]
    way = OURS.get(case.replace("deepspeed", "hf_zero"))
    config = {} if way is None else ds_config(way, batch, micro_batches)
    torch.manual_seed(0)
    if in_shards:
        from hf_zero.api.zero_init import Init

        shards: Any = Init(config_dict_or_path=config, remote_device="cpu")
    else:
        shards = nullcontext()
    with shards, device.device:  # where random numbers are generated fastest
        model = Llama(hidden, heads, layers, TINY_VOCABULARY if size == "tiny" else VOCABULARY)
    numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    if way is None:
        return with_torch(model, device.device, case), numel
    return with_engine("hf_zero" if case in OURS else "deepspeed", model, config, way, device), numel


def measure(
    case: str,
    size: str,
    device: Device,
    *,
    steps: int = 5,
    warm_up: int = 2,
    micro_batches: int = 1,
    in_shards: bool = False,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Runs one case in this process; with `trace` also an update under the profiler, whose trace is kept there."""
    from hf_zero.comm import init_distributed

    init_distributed()
    started, compiled_before = device.now(), _compilations()
    trainer, numel = trainer_of(case, size, micro_batches, device, in_shards)
    made_s = device.now() - started
    _, _, _, batch, length = SIZES[size]
    vocabulary = TINY_VOCABULARY if size == "tiny" else VOCABULARY
    tokens = [torch.randint(vocabulary, (batch, length), device=device.device) for _ in range(micro_batches)]
    losses = [float(trainer.step(tokens)[0]) for _ in range(warm_up)]
    compiled = _compilations()
    device.forget_peak()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(float(trainer.step(tokens)[0]))  # synchronizes, as a training loop that logs does
        times.append(time.perf_counter() - start)
    seconds, num_tokens = statistics.median(times), batch * length * micro_batches
    found: dict[str, Any] = {"case": case, "size": size, "parameters": numel, "micro_batches": micro_batches}
    found |= {"s_per_step": seconds, "s_of_steps": times, "losses": losses, "made_s": made_s, "peaks": device.peaks()}
    found |= {"tokens_per_s": num_tokens / seconds, "tflops": 6e-12 * numel * num_tokens / seconds}
    found |= {"graphs": compiled - compiled_before, "recompilations": _compilations() - compiled}
    found["parts_s"] = trainer.step(tokens, device.now)[1]
    if trace is not None:
        found["profile"] = device.profiled(lambda: trainer.step(tokens), trace)
    if trainer.engine is not None and hasattr(trainer.engine, "destroy"):
        trainer.engine.destroy()
    return found


def _compilations() -> int:
    """Graphs that torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def predicted(device: str, shape: Shape, setup: Setup) -> float | None:
    """Predicted seconds per step; None for an unknown GPU."""
    gpu = known_gpu(device)
    if gpu is None:
        return None
    machine = Machine(device, 1, gpu.flops, gpu.memory, 1e15, gpu.host_link, gpu.host_memory, gpu.capacity)
    return simulate(machine, shape, setup).seconds


def missing(case: str) -> str | None:
    """Requirements of a case that are not installed; DeepSpeed's is its own package, not hf_zero under its name."""
    module = NEEDS.get(case)
    if module and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if case.startswith("deepspeed"):
        from importlib.metadata import distributions

        is_there = any(found.name.lower() == "deepspeed" and found.files for found in distributions() if found.name)
        return None if is_there else "deepspeed is not installed"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[*OURS, *OTHERS])
    parser.add_argument("--size", default="0.5b", choices=SIZES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1, help="per update")
    parser.add_argument("--in-shards", action="store_true", help="build the model in shards, in host memory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trace", type=Path, help="file for the profiler's trace of one update")
    options = parser.parse_args()
    if (reason := missing(options.case)) is not None:
        sys.exit(reason)
    found = measure(
        options.case,
        options.size,
        device_of(options.device),
        steps=options.steps,
        micro_batches=options.micro_batches,
        in_shards=options.in_shards,
        trace=options.trace,
    )
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
