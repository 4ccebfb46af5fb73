"""Calls of the host per unit of stage 3 in a steady step: what a unit costs, whatever the load of the machine.

    python -m tests.support.host_calls             # a table: hf_zero, FSDP2, the plain model
    python -m tests.support.host_calls --list      # and which functions of hf_zero are called how often

One rank of a simulated world trains in bf16, on the path of an accelerator and with a plan. A unit is a block of seven
matrices, which is gathered for forward and for backward. What one more unit adds to a step is counted, so that the rest
of the step does not matter. FSDP2 runs on the CPU, with collectives that do nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.layout import buckets
from tests.support.simulation import META, simulated_world

RANK, WORLD, MATRICES, WIDTH, FEW, MANY = 0, 2, 7, 64, 4, 8
_STEPS = 4  # until there are plans
BF16 = torch.bfloat16
# Parts of torch that run in place of kernels on the meta device.
_META_KERNELS = ("_meta_registrations", "_prims_common", "/_refs/", "/_decomp/", "/torch/fx/", "torch/__init__.py")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(MATRICES):
            setattr(self, f"matrix{number}", nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.children():
            x = matrix(x)
        return x


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@dataclass(frozen=True)
class Calls:
    """Calls of a step, or of a unit in it.

    Attributes:
        python: calls of Python functions.
        native: calls of built-in functions from Python.
        operations: PyTorch operations that are dispatched.
        by_function: calls of Python functions, by file and name.
    """

    python: float
    native: float
    operations: float
    by_function: Counter[str]

    def __sub__(self, other: Calls) -> Calls:
        left = Counter(self.by_function)
        left.subtract(other.by_function)
        return Calls(self.python - other.python, self.native - other.native, self.operations - other.operations, +left)

    def divided(self, number: int) -> Calls:
        by_function = Counter({name: count // number for name, count in self.by_function.items()})
        return Calls(self.python / number, self.native / number, self.operations / number, by_function)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def calls_of(step: Callable[[], object]) -> Calls:
    """Count the calls of one step; it runs twice. Meta kernels do not count."""
    with _Operations() as operations:
        step()
    by_function: Counter[str] = Counter()
    num_native = depth = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_native, depth
        if depth or any(part in frame.f_code.co_filename for part in _META_KERNELS):
            depth += {"call": 1, "return": -1}.get(event, 0)  # what a meta kernel calls does not count either
        elif event == "call":
            by_function[f"{frame.f_code.co_filename}:{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"] += 1
        elif event == "c_call":
            num_native += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Calls(by_function.total(), num_native, operations.number, by_function)


def per_unit(calls: Callable[[int], Calls]) -> Calls:
    """What one more unit adds, from the calls of a step at two depths."""
    return (calls(MANY) - calls(FEW)).divided(MANY - FEW)


def plain(depth: int) -> Calls:
    """A step without an update."""
    with META:
        model, x = Blocks(depth).bfloat16(), torch.zeros(1, WIDTH, dtype=BF16)

    def step() -> None:
        model(x).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    return calls_of(step)


@contextmanager
def _kernels_on_device() -> Iterator[None]:
    """Updates and norms as on an accelerator: one launch each."""
    from hf_zero.kernels import adam, norm

    with ExitStack() as stack:
        for module in (norm, adam):
            stack.enter_context(mock.patch.object(module, "runs_on_gpu", lambda *_vectors: True))
        nothing = torch.zeros((), dtype=torch.float64, device=META)
        stack.enter_context(mock.patch("hf_zero.kernels.gpu.norm.sum_of_squares_on_gpu", lambda _flat: nothing))
        stack.enter_context(mock.patch("hf_zero.kernels.gpu.adam.adam_on_gpu", lambda *_vectors: None))
        yield


def ours(depth: int, *, is_direct: bool = True) -> Calls:
    """A step of hf_zero; with `is_direct` matrices are gathered where they are used, as large ones are."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2 * MATRICES * WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 1 << 30,
    }
    smallest = mock.patch.object(buckets, "MIN_DIRECT_BYTES", 0 if is_direct else 1 << 60)
    with simulated_world(RANK, WORLD, negotiates=True) as world, _kernels_on_device(), smallest:
        with META:
            model, x = Blocks(depth), torch.zeros(1, WIDTH, dtype=BF16)
        engine = world.engine(model, config)

        def step() -> None:
            engine.backward(engine(x))
            engine.step()

        for _ in range(_STEPS):
            step()
        found = calls_of(step)
        engine.destroy()
    return found


def fsdp2(depth: int) -> Calls:
    """A step of FSDP2; needs a process without a process group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        model, x = Blocks(depth), torch.zeros(1, WIDTH)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step() -> None:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        return calls_of(step)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the functions of hf_zero")
    options = parser.parse_args()
    ways = {"plain": plain, "FSDP2": fsdp2, "hf_zero, copied": partial(ours, is_direct=False), "hf_zero": ours}
    found = {name: per_unit(way) for name, way in ways.items()}
    write = sys.stdout.write
    write(f"calls per unit of {MATRICES} matrices and step\n{'':16}{'Python':>10}{'native':>10}{'operations':>12}\n")
    for name, calls in found.items():
        write(f"{name:16}{calls.python:10.1f}{calls.native:10.1f}{calls.operations:12.1f}\n")
    for name, number in found["hf_zero"].by_function.most_common() if options.list else ():
        write(f"{number:6} {name.rpartition('site-packages/')[2]}\n")


if __name__ == "__main__":
    main()
