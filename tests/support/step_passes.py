"""Memory passes of one step of bf16 training with AdamW and clipping, on one rank of a simulated world.

hf_zero runs on meta tensors, on the path of an accelerator, with the traffic of its Triton kernels as in their
docstrings (which tests/kernels/test_compilation.py checks). FSDP2 runs with real tensors on the CPU and no-op
collectives, with fp32 parameters under `MixedPrecisionPolicy(param_dtype=bf16, ...)` and PyTorch's fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.support.passes import Passes
from tests.support.simulation import META, SimulatedCollectives, simulated_world

WORLD, RANK, WIDTH, LAYERS = 8, 3, 1024, 4
BF16 = torch.bfloat16
# phase -> (bytes read, bytes written) per parameter of the model
Table = dict[str, tuple[float, float]]


def floor(stage: int, micro_batches: int = 1) -> Table:
    """The minimum that collectives and PyTorch's autograd require.

    At stage 3 parameters are gathered where they are used, and gradients are reduced where autograd has left them.
    Below it gradients arrive one by one. No parameter is updated before the total norm is known.
    """
    times, own = micro_batches, 2 / WORLD
    later = 4.0 if stage == 1 else 2.0  # added to existing gradients, before they are reduced or after
    found = {"norm": (own, 0.0), "update": (7 * own, 7 * own)}
    if stage < 3:
        found["gradients into a bucket"] = (2.0 + (times - 1) * later, 2.0 * times)
    if times > 1 and stage > 1:
        found["reduced gradients, cast or added up"] = ((times - 1) * 2 * own, (times - 1) * own)
    if stage == 3:
        found["own row into the gather"] = (2 * times * own, 2 * times * own)
    return found


def measure() -> dict[str, Table]:
    """Bytes per parameter, read and written, in the phases of a step, as bench.kernel_report stores them."""
    found = {f"stage {stage}": ours(stage) for stage in (1, 2, 3)}
    found |= {"FSDP2": fsdp2(), "FSDP2, reduced in fp32": fsdp2(torch.float32)}
    return {
        name: {phase: (round(moved[0], 2), round(moved[1], 2)) for phase, moved in table.items()}
        for name, table in found.items()
    }


class Net(nn.Module):
    """Units of two matrices each, whose sizes are divisible by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * LAYERS)]
        self.layers = nn.ModuleList(nn.Sequential(*linear[i : i + 2]) for i in range(0, 2 * LAYERS, 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


_RELEASES = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
NUMEL = 2 * LAYERS * WIDTH * WIDTH


def _moved(vectors: Any) -> tuple[int, int]:
    """Bytes that a single-pass update reads and writes."""
    changing = [vectors.weight, *vectors.states]
    written = [*changing, *([] if vectors.lp_param is None else [vectors.lp_param])]
    return sum(t.nbytes for t in (*changing, vectors.gradient)), sum(t.nbytes for t in written)


@contextmanager
def _phases(passes: Passes) -> Iterator[None]:
    """hf_zero's phases, and replacements for kernels that cannot run on meta tensors."""
    from hf_zero.comm.collectives import Collectives
    from hf_zero.grads.bucket import Arrivals, ReducedGradient
    from hf_zero.kernels import adam, norm
    from hf_zero.params.unit import UnitPart

    def within(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with passes.during(phase):
                return method(*args, **keywords)

        return call

    def squares(flat: Tensor) -> Tensor:
        with passes.during("norm"):
            passes.add("norm._squares", flat.nbytes, 0)
        return torch.zeros((), dtype=torch.float64, device=flat.device)

    def update(vectors: Any, *_rest: Any) -> None:
        with passes.during("update"):
            passes.add("adam._adam", *_moved(vectors))

    with ExitStack() as stack:
        for owner, name, phase in (
            (Collectives, "_gather_rows", "own row into the gather"),
            (SimulatedCollectives, "_gather_pieces", "own row into the gather"),
            (UnitPart, "_unpack", "gathered rows into parameters"),
            (Arrivals, "take", "gradients into a bucket"),
            (ReducedGradient, "add", "reduced gradients, cast or added up"),
        ):
            stack.enter_context(mock.patch.object(owner, name, within(phase, getattr(owner, name))))
        for module, form, stand_in in ((norm, "norm.sum_of_squares", squares), (adam, "adam.adam", update)):
            stack.enter_context(mock.patch.object(module, "runs_on_gpu", lambda *_vectors: True))
            stack.enter_context(mock.patch(f"hf_zero.kernels.gpu.{form}_on_gpu", stand_in))
        yield


def ours(stage: int, micro_batches: int = 1, accumulation: str = "bf16") -> Table:
    """The second update of an engine; at stage 3 weights are gathered for forward and again for backward."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": accumulation},
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": stage, **(_RELEASES if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    with simulated_world(RANK, WORLD) as world:
        with META:
            net = Net()
        engine, batch = world.engine(net, config), torch.zeros(1, WIDTH, dtype=BF16, device=META)
        passes = Passes()
        with _phases(passes):
            for _ in range(2):
                passes.calls.clear()
                for _ in range(micro_batches):
                    with passes:
                        loss = engine(batch)
                        engine.backward(loss)
                        with passes.during("rest of the step"):
                            engine.step()
    return table(passes)


# Operations of FSDP2 and PyTorch -> phase.
_THEIRS = {
    "all_gather_copy_in": "own row into the gather",
    "split_with_sizes_copy": "gathered rows into parameters",
    "chunk_cat": "gradients into a bucket",
    "_foreach_copy_": "weights, cast for the gather",
    "_foreach_norm": "norm",
    "_foreach_mul_": "clipping",
    "_fused_adamw_": "update",
}


def fsdp2(reduce_dtype: torch.dtype = BF16) -> Table:
    """The second step; needs a process without a process group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        net = Net()
        for part in (*net.layers, net):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        passes = Passes()
        for _ in range(2):
            passes.calls.clear()
            with passes:
                net(torch.zeros(1, WIDTH)).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    by_phase = Passes()
    for name, read, written in passes.calls[""]:
        cast = "reduced gradients, cast or added up" if name == "_to_copy" and 0 < read < written else ""
        by_phase.calls[_THEIRS.get(name, cast)].append((name, read, written))
    return table(by_phase)


def table(passes: Passes) -> Table:
    """Named phases that move more than a few numbers."""
    found = {phase: (read / NUMEL, written / NUMEL) for phase, (read, written) in passes.bytes.items() if phase}
    return {phase: moved for phase, moved in found.items() if sum(moved) > 0.01}
