"""Block 1 of the GPU programme: whether NCCL does what the engine assumes, on one GPU.

- *alone*: one rank whose collectives go through groups of one rank. Engines reduce and gather at every stage, and
  each collective begins and ends late, so a missing wait changes a loss.
- *two ranks*, *four ranks*: processes that share the GPU. NCCL refuses two ranks on one GPU unless they count as
  several hosts (NCCL_HOSTID), or NCCL 2.30 is loaded before torch's (`--nccl`, NCCL_MULTI_RANK_GPU_ENABLE).
- *ranks that differ*: programs in which a rank uses modules that others do not use.
- *one rank fails*: how the other ranks end.

Over gloo (`--device cpu`) ranks use the collectives of NCCL's path, not those of shared memory. A delayed collective of
one rank takes place there when the engine waits for it.
"""

from __future__ import annotations

import argparse
import lzma
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from bench.gpu_device import Device, device_of
from bench.gpu_parity import CLIP, CPU, UPDATES, Task, ds_config, examine, same, shared_cases
from bench.gpu_programme import AS_HOSTS, START_S, Case, Found, NotHere, Part, Place, Running
from bench.gpu_train import TINY_VOCABULARY
from hf_zero import initialize
from hf_zero.comm import Channel, Collectives, Pending, get_rank, get_world_size, groups, init_distributed
from hf_zero.comm.known_groups import KnownGroups
from hf_zero.comm.torch_backend import GatherStreamCollectives, NativeCollectives
from hf_zero.device.registry import runtime_of

Config = dict[str, Any]
SEEN = 9.1e-8  # two ranks over gloo and one, as measured on an H100: a difference in the last bit of a loss
QUANTIZED = 2e-3  # of a loss, if weights or gradients travel in 8 bits
TIMEOUT_S = 40.0  # of a collective
ENDS_WITHIN_S = {"cuda": 5.0, "cpu": 30.0}  # a rehearsal may share its cores with others
RELEASED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
FAR_AHEAD = {**RELEASED, "stage3_max_live_parameters": 10**6, "stage3_prefetch_bucket_size": 10**6}


def parts(block: int, kind: str, options: argparse.Namespace) -> list[Part]:
    """All parts, the most valuable first."""
    hosts = {**AS_HOSTS, "NCCL_HOSTID": "rank{rank}"}
    library = _unpacked(options.nccl) if kind == "cuda" else None
    few = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
    here = {**few, "LD_PRELOAD": str(library)}
    without = "" if library else "over gloo there is nothing to load" if kind == "cpu" else f"no file {options.nccl}"
    order = "streams and events in hf_zero/comm/torch_backend.py and hf_zero/device/registry.py"
    two = [_first(2), Case("memory", *_MEMORY)]
    two += [Case(name, f"within {SEEN} of one rank", order) for name, _ in shared_cases()]
    four = [_first(4)] + [
        Case(name, f"losses within {QUANTIZED if lossy else SEEN} of one rank", order)
        for name, (_, lossy) in DATA_PARALLEL.items()
    ]
    four += [Case(name, "as one process, within 2e-5", f"hf_zero/{where}") for name, where in MODEL_PARALLEL.items()]
    lockstep = "hf_zero/comm/negotiation/lockstep.py: a rank that issues gathers in another order than the others"
    alike = "as one process, within 1e-5; in seconds"
    differ = [_first(2)] + [Case(name, alike, lockstep, limit_s=20) for name in PROGRAMS]
    # NCCL ends a process whose peer was killed from within C++, so only the launcher names the peer.
    ends = f"the other ends within {ENDS_WITHIN_S[kind]:.0f} s, and after an exception names rank 1"
    dead = "describe_dead in hf_zero/comm/known_groups.py; NCCL's watchdog"
    fails = [Case(name, ends, dead, limit_s=START_S[kind] + 5 * ENDS_WITHIN_S[kind]) for name in FAULTS]
    delayed = "to the bit stage 0 (offload, clipping: itself without delays); at most one host wait more per update"
    alone = [Case(name, delayed, order) for name in ALONE]
    alone += [Case(name, "nothing raises in torch's alarm of host waits", order) for name in WAITING]
    return [
        Part("first", "bench.gpu_nccl:first", (_first(1), Case("memory", *_MEMORY))),
        Part("alone", "bench.gpu_nccl:alone", tuple(alone)),
        Part("two ranks", "bench.gpu_nccl:several", tuple(two), 2, hosts, shares=True),
        Part("ranks that differ", "bench.gpu_nccl:differing", tuple(differ), 2, hosts, shares=True),
        # Without MPS: a killed client may end the others'.
        Part("one rank fails", "bench.gpu_nccl:failing", tuple(fails), 0),
        Part("four ranks", "bench.gpu_nccl:several", tuple(four), 4, hosts, shares=True),
        Part("two ranks, NCCL 2.30", "bench.gpu_nccl:several", tuple(two), 2, here, shares=True, absent=without),
    ]


_MEMORY = (
    "at most 1.5 GB per rank, which is what plan counts for communicators and the driver's context together",
    "CONTEXT_BYTES in hf_zero/planning/machine.py",
)


def _first(ranks: int) -> Case:
    look = "NCCL_DEBUG=INFO; NCCL_HOSTID, NCCL_SOCKET_IFNAME" if ranks > 1 else "the driver, torch's NCCL"
    return Case("first all-reduce", f"{ranks}.0, of ones", look, limit_s=45)


def _unpacked(file: Path) -> Path | None:
    """A library, decompressed; None if there is none."""
    if not file.exists():
        return None
    if file.suffix != ".xz":
        return file.resolve()
    target = Path(tempfile.mkdtemp(prefix="nccl-")) / "libnccl.so.2"
    target.write_bytes(lzma.decompress(file.read_bytes()))
    return target


# --- joining -----------------------------------------------------------------------------------------------------


@cache
def joined(kind: str) -> Device:
    """The device of this rank, which has joined the others."""
    torch.set_num_threads(1 if kind == "cpu" else torch.get_num_threads())
    if kind == "cpu":
        KnownGroups.collectives = _native  # type: ignore[method-assign]
    device = device_of(kind)
    device.limit_memory(0.8 / int(os.environ.get("WORLD_SIZE", 1)))
    init_distributed(timeout=timedelta(seconds=TIMEOUT_S))
    return device


def _native(
    self: KnownGroups, device: torch.device, channel: Channel, ranks: tuple[int, ...], number: int
) -> Collectives:
    """What NCCL's ranks use, over gloo."""
    kind = GatherStreamCollectives if channel is Channel.GATHER else NativeCollectives
    group = self.native_group(number, channel, device)
    return kind(group, None if channel is Channel.GATHER else self._hosts_of(number, channel))


def first(case: str, place: Place) -> Found:
    device = joined(place.kind)
    if case == "memory":
        return memory(device)
    one = torch.ones(1, device=device.device)
    before = _quiet(device)
    dist.all_reduce(one)
    value, took = float(one), before - _quiet(device)
    facts = device.facts()
    words = f"{value}; the communicator took {took / 1e6:.0f} MB; NCCL {facts.get('nccl', 'is not here')}"
    return Found(words, value == get_world_size(), figures={"facts": facts, "bytes": took})


def memory(device: Device) -> Found:
    """Bytes that the first collective of each further channel takes from the device, of all ranks together."""
    took = {}
    with groups_of_one(None) if get_world_size() == 1 else nullcontext():
        for channel in (Channel.GATHER, Channel.ACCESS, Channel.LAYERS):
            values = torch.ones(get_world_size() * 64, device=device.device)
            before = _quiet(device)
            groups.collectives_for(device.device, channel).all_reduce(values).wait()
            took[channel.name] = before - _quiet(device)
    words = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in took.items())
    figures = {"bytes": took, "ranks": get_world_size()}
    return Found(words, sum(took.values()) <= 1.5e9 * get_world_size(), figures=figures)


def _quiet(device: Device) -> int:
    """Free bytes while no rank does anything."""
    device.synchronize()
    hosts = groups.background_collectives()
    hosts.gather_objects(None)
    free = device.free_bytes()
    hosts.gather_objects(None)
    return free


# --- one rank, whose collectives go through groups ---------------------------------------------------------------


class NotOne(int):
    """A size of 1 that does not equal 1, so that engines do not skip what a single rank need not do."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Delayed(NativeCollectives):
    """Collectives that begin and end late."""

    device: Device
    calls: ClassVar[Counter[str]] = Counter()

    def _all_reduce(self, flat: Tensor) -> Pending:
        self.calls["all_reduce"] += 1
        return self.device.late(lambda: super(Delayed, self)._all_reduce(flat), flat)

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        self.calls["reduce_scatter"] += 1
        return self.device.late(lambda: super(Delayed, self)._reduce_scatter(shard, flat), shard, flat)

    def _reduce_scatter_pieces(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> Pending:
        self.calls["reduce_scatter in place"] += 1
        return self.device.late(lambda: super(Delayed, self)._reduce_scatter_pieces(shards, wholes), *shards, *wholes)

    def _all_gather(self, flat: Tensor) -> Pending:
        self.calls["all_gather"] += 1
        return self.device.late(lambda: super(Delayed, self)._all_gather(flat), flat)

    def _sum_small(self, values: Tensor) -> None:
        self._between_naps(lambda: super(Delayed, self)._sum_small(values))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self._between_naps(lambda: super(Delayed, self)._broadcast(tensor, source))

    def _between_naps(self, call: Callable[[], None]) -> None:
        self.device.nap()
        call()
        self.device.nap()


class DelayedGathers(Delayed, GatherStreamCollectives):
    def _gather_into(self, flat: Tensor, row: Tensor) -> None:
        self.calls["gather"] += 1
        self._between_naps(lambda: super(DelayedGathers, self)._gather_into(flat, row))

    def _gather_each_into(self, wholes: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        self.calls["gather in place"] += 1
        self._between_naps(lambda: super(DelayedGathers, self)._gather_each_into(wholes, pieces))


@contextmanager
def groups_of_one(delays: Device | None) -> Iterator[None]:
    """Context in which an engine of one rank communicates through groups, as if it were one of several.

    Args:
        delays: the device, if collectives are to begin and end late.
    """

    def collectives_for(
        device: torch.device, channel: Channel = Channel.REDUCE, partition: Any = None, reduced_over: Any = None
    ) -> Collectives:
        known, number, ranks = groups._known(), 0, (get_rank(),)
        collectives = known.collectives(device, channel, ranks, number)
        assert isinstance(collectives, NativeCollectives), "what NCCL uses"
        if delays is not None:
            collectives.__class__ = DelayedGathers if channel is Channel.GATHER else Delayed
            collectives.device = delays  # type: ignore[attr-defined]
        collectives.size = NotOne(1)
        if channel is Channel.GATHER:
            collectives.negotiation = known.negotiation(collectives, ranks, number, can_attend=False)
        return collectives

    with (
        mock.patch.object(groups, "collectives_for", collectives_for),
        mock.patch("hf_zero.step.assemble.is_kept_elsewhere", lambda zero, device: True),  # then one rank has shards
        mock.patch("hf_zero.comm.ledger.received", lambda *sizes: (0, 0)),  # it divides by the number of other ranks
    ):
        yield


_BOTH = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **RELEASED}
ALONE: dict[str, tuple[str, Config, float]] = {
    "stage 1": ("fp32", {"stage": 1}, 0.0),
    "stage 2": ("bf16", {"stage": 2}, 0.0),
    "stage 3": ("fp32", {"stage": 3, **RELEASED}, 0.0),
    "stage 3, bf16, clipped": ("bf16", {"stage": 3, **RELEASED}, CLIP),
    "stage 3, far ahead": ("bf16", {"stage": 3, **FAR_AHEAD}, 0.0),
    "stage 2, states on the host": ("bf16", {"stage": 2, "offload_optimizer": CPU}, 0.0),
    "stage 3, all on the host": ("bf16", _BOTH, 0.0),
}
"""Name -> precision, zero_optimization, gradient clipping. One rank has no second shards, so hpZ needs several."""
WAITING = {
    **{f"host waits, stage {stage}, {precision}": (stage, precision) for stage in range(4) for precision in ("bf16",)},
    "host waits, stage 3, fp32": (3, "fp32"),
}
"""Name -> stage, precision."""


def task_of(device: Device) -> Task:
    return Task(device.device, 512, 4, 256) if device.is_gpu else Task(device.device, 64, 2, 32, TINY_VOCABULARY)


def alone(case: str, place: Place) -> Found:
    device = joined(place.kind)
    if case in WAITING:
        return host_waits(device, *WAITING[case])
    precision, zero, clip = ALONE[case]
    task, runtime, clipping = task_of(device), runtime_of(device.device), {"gradient_clipping": clip}
    config = ds_config(precision, zero, clipping)
    # An update on the host differs from one on the GPU in its last bits, as does a norm that is added up in parts.
    is_itself = bool(clip) or "offload_optimizer" in zero
    waits = [runtime.num_host_waits]
    with groups_of_one(None) if is_itself else nullcontext():
        expected, weights = examine(task, config if is_itself else ds_config(precision, {"stage": 0}, clipping))
    waits.append(runtime.num_host_waits)
    Delayed.calls.clear()
    with groups_of_one(device):
        losses, found = examine(task, config)
    waits.append(runtime.num_host_waits)
    calls, needed = dict(Delayed.calls), {"reduce_scatter", "gather" if zero["stage"] == 3 else "all_gather"}
    equal, before, after = losses == expected and same(found, weights), waits[1] - waits[0], waits[2] - waits[1]
    words = "equal" if equal else f"losses end with {losses[-1]!r}, those of the other with {expected[-1]!r}"
    words += f"; {after} host waits, {before} in the other; " + ", ".join(f"{n} {name}" for name, n in calls.items())
    holds = equal and after - before <= UPDATES and needed <= calls.keys()
    return Found(words, holds, figures={"losses": losses, "host_waits": waits, "calls": calls})


class Blocks(nn.Module):
    """Blocks that stage 3 gathers one after the other."""

    def __init__(self, width: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def host_waits(device: Device, stage: int, precision: str) -> Found:
    """The third update runs in torch's sync debug mode, in which a host that waits for the device raises."""
    if not device.is_gpu:
        raise NotHere("torch's alarm needs a GPU; tests/step/test_no_waiting.py checks the same")
    config: Config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, **RELEASED},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "steps_per_print": 1 << 30,
    }
    torch.manual_seed(0)
    with groups_of_one(None):
        engine = initialize(model=Blocks(), config=config)[0]
        x = torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16 if precision == "bf16" else None)
        try:
            for update in range(3):
                with device.no_waits() if update == 2 else nullcontext():
                    for _ in range(2):
                        engine.backward(engine(x))
                        engine.step()
        except RuntimeError as error:
            return Found(str(error).splitlines()[0], False)
        finally:
            engine.destroy()
    return Found("nothing raises", True)


# --- several ranks -----------------------------------------------------------------------------------------------

DATA_PARALLEL: dict[str, tuple[Config, bool]] = {
    "hybrid, 2 x 2": ({"stage": 3, "mics_shard_size": 2, **RELEASED}, False),
    "hpZ, 2 x 2": ({"stage": 3, "zero_hpz_partition_size": 2, **RELEASED}, False),
    "qwZ": ({"stage": 3, "zero_quantized_weights": True, **RELEASED}, True),
    "qgZ": ({"stage": 3, "zero_quantized_gradients": True, **RELEASED}, True),
    "qwZ, qgZ, hpZ": (
        {
            "stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True,
            "zero_hpz_partition_size": 2, **RELEASED,
        },
        True,
    ),
}  # fmt: skip
"""Name -> zero_optimization, whether messages are quantized."""
MODEL_PARALLEL = {
    "expert parallelism, 2 x 2": "extras/experts/exchange.py",
    "tensor parallelism, 2 x 2": "tensor/layers.py",
    "sequence parallelism, 2 x 2": "sequence/layer.py",
}
"""Name -> a module to look at."""


@cache
def _reference(kind: str) -> tuple[Task, list[float]]:
    task = task_of(joined(kind))
    return task, task.reference("fp32", CLIP)


def several(case: str, place: Place) -> Found:
    """Ranks that all see the same samples, and one rank of plain PyTorch; or the models of the tests in parts."""
    if case in ("first all-reduce", "memory"):
        return first(case, place)
    device = joined(place.kind)
    if case in MODEL_PARALLEL:
        apart = _in_parts(case.split()[0], device)
        return Found(", ".join(f"{name} {value:.1e}" for name, value in apart.items()), max(apart.values()) <= 2e-5)
    zero, lossy = {**{name: (zero, False) for name, zero in shared_cases()}, **DATA_PARALLEL}[case]
    task, expected = _reference(place.kind)
    config = ds_config("fp32", zero, {"hf_zero": {"quantized_gradient_bits": 8}} if lossy else {})
    losses, _ = examine(task, config)
    apart_by = max(abs(one - two) / two for one, two in zip(losses, expected, strict=True))
    return Found(f"{apart_by:.1e}", apart_by <= (QUANTIZED if lossy else SEEN), figures={"losses": losses})


def _in_parts(kind: str, device: Device) -> dict[str, float]:
    """Largest differences from one plain process, over all ranks, with the models of the tests."""
    hf_zero.install()  # the tests import DeepSpeed's names
    from tests.experts import training as experts
    from tests.sequence import training as sequence
    from tests.tensor import training as tensor

    rank, world, steps = get_rank(), get_world_size(), 3

    def here(data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [{name: values.to(device.device) for name, values in batch.items()} for batch in data]

    if kind == "expert":
        model, data = experts.model_of("mixtral").to(device.device), here(experts.batches(steps * world))
        plain = experts.in_one_process(model, data, together=world)
        engine = experts.engine_of(model, 3, 2, rank)
        losses, norms, weights = experts.train(engine, data, rank, world).differs_from(plain, plain.losses[rank::world])
        engine.destroy()
    elif kind == "tensor":
        model, data = tensor.model_of("llama").to(device.device), here(tensor.batches(steps * world // 2))
        whole = tensor.in_one_process(model, data, data_ranks=world // 2)
        parts = tensor.in_parts(rank, model, data, stage=3, tensor=2, world=world)
        losses = _apart(parts.losses, whole.losses[rank // 2 :: world // 2])
        norms, weights = _apart(parts.norms, whole.norms), _most(parts.weights, whole.weights)
    else:
        model, data = sequence.model_of("llama").to(device.device), here(sequence.batches(steps * world // 2))
        one = sequence.in_one_process(model, data, data_ranks=world // 2)
        trained = sequence.in_parts(rank, model, data, stage=3, size=2)
        losses, norms = _apart(trained.losses, one.losses[rank // 2 :: world // 2]), 0.0
        weights = _most(trained.weights, one.weights)
    found = groups.background_collectives().gather_objects((losses, norms, weights))
    return dict(zip(("losses", "norms", "weights"), map(max, *found), strict=True))  # type: ignore[call-overload]


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - two) for one, two in zip(ours, theirs, strict=True))


def _most(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(float((ours[name].cpu() - value.cpu()).abs().max()) for name, value in theirs.items())


# --- ranks that differ -------------------------------------------------------------------------------------------

WIDTH, WIDE, ROWS = 64, 512, 2  # a wide block's matrix is gathered in place
Used = Callable[[int, int], bool]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class TextAndImages(nn.Module):
    """Like a vision-language model: its vision blocks run only for batches with an image."""

    def __init__(self, num_vision: int, num_text: int, width: int) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Block(width) for _ in range(num_vision))
        self.text = nn.ModuleList(Block(width) for _ in range(num_text))

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            for block in self.vision:
                image = block(image)
            x = x + image
        for block in self.text:
            x = block(x)
        return x.square().mean()


def _first_has(rank: int, step: int) -> bool:
    return rank == 0


# name -> (vision blocks, text blocks, whether a rank has an image in a step, zero_optimization, micro-batches)
PROGRAMS: dict[str, tuple[int, int, Used, Config, int]] = {
    "images on both": (6, 6, lambda rank, step: True, RELEASED, 1),
    "images on one rank, 4 vision blocks": (4, 4, _first_has, RELEASED, 1),
    "images on one rank, 12 vision blocks": (12, 4, _first_has, RELEASED, 1),
    "images on one rank, all kept": (12, 6, _first_has, {"stage3_param_persistence_threshold": 0}, 1),
    "images on one rank, far ahead": (12, 6, _first_has, FAR_AHEAD, 1),
    "images on one rank, 3 micro-batches": (12, 6, _first_has, RELEASED, 3),
    "images on one rank, wide": (12, 6, _first_has, RELEASED, 1),
    "images on both, later on one": (6, 4, lambda rank, step: rank == 0 or step < 4, RELEASED, 1),
    "images on one rank in turn": (6, 6, lambda rank, step: (rank + step) % 2 == 0, RELEASED, 1),
    "one rank runs a forward more": (0, 10, lambda rank, step: False, RELEASED, 1),
}
STEPS = 6


def differing(case: str, place: Place) -> Found:
    if case == "first all-reduce":
        return first(case, place)
    device = joined(place.kind)
    num_vision, num_text, has_image, zero, micro = PROGRAMS[case]
    again, width = case == "one rank runs a forward more", WIDE if case.endswith("wide") else WIDTH
    rank, world = get_rank(), get_world_size()
    draws = torch.Generator().manual_seed(3)
    data = torch.randn(STEPS, world, micro, 2, ROWS, width, generator=draws).to(device.device)

    def batch(step: int, of: int, number: int) -> tuple[Tensor, ...]:
        x, image = data[step, of, number]
        return (x, image) if has_image(of, step) else (x,)

    def made() -> TextAndImages:
        torch.manual_seed(0)
        return TextAndImages(num_vision, num_text, width)

    plain = made().to(device.device)
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step in range(STEPS):
        for of in range(world):
            for number in range(micro):
                loss = plain(*batch(step, of, number))
                (loss / world / micro).backward()
                expected += [float(loss)] if of == rank else []
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, **zero},
        "steps_per_print": 1 << 30,
    }
    engine, losses, began = initialize(model=made(), config=config)[0], [], device.now()
    for step in range(STEPS):
        for number in range(micro):
            loss = engine(*batch(step, rank, number))
            if again and rank == 0:
                with torch.no_grad():
                    engine(*batch(step, rank, number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    seconds = device.now() - began
    engine.destroy()
    own = max(abs(float(one) - two) / two for one, two in zip(losses, expected, strict=True))
    apart = max(map(float, groups.background_collectives().gather_objects(own)))  # type: ignore[arg-type]
    return Found(f"{apart:.1e} in {seconds:.1f} s", apart <= 1e-5, figures={"seconds": seconds})


# --- one rank fails ----------------------------------------------------------------------------------------------

FAULTS = ("an exception in step 3", "a kill in step 3")


def failing(case: str, place: Place) -> Found:
    """Starts two ranks, one of which fails, and times the other's end."""
    stem, fault = place.folder / case.replace(" ", "-"), place.folder / f"{case.replace(' ', '-')}.at"
    fault.unlink(missing_ok=True)
    environment = {**AS_HOSTS, "NCCL_HOSTID": "rank{rank}"}
    words = ["bench.gpu_programme", "--child", "bench.gpu_nccl:doomed", place.kind, os.devnull, str(place.folder), case]
    running = Running.start(words, 2, environment, stem)
    ended: dict[int, float] = {}
    try:
        deadline, has_failed = time.time() + START_S[place.kind], False
        while len(ended) < 2 and time.time() < deadline:
            if not has_failed and fault.exists():
                deadline, has_failed = time.time() + 4 * ENDS_WITHIN_S[place.kind], True
            for rank, code in enumerate(running.codes()):
                if code is not None:
                    ended.setdefault(rank, time.time())
            time.sleep(0.02)
        if len(ended) < 2:
            running.show_stacks()
    finally:
        running.end()
    if not fault.exists():
        return Found(f"no rank came to step 3: {running.last_output(0)}", False)
    log = running.logs[0].read_text(errors="replace")
    seconds = ended.get(0, time.time()) - float(fault.read_text())
    names = "rank 1" in log
    how = f"after {seconds:.1f} s with {running.codes()[0]}" if 0 in ended else f"not within {seconds:.0f} s"
    words = f"rank 0 ended {how}, {'naming' if names else 'without naming'} rank 1: {running.last_output(0)}"
    holds = (
        0 in ended and seconds <= ENDS_WITHIN_S[place.kind] and (names or "kill" in case) and bool(running.codes()[0])
    )
    return Found(words, holds, figures={"seconds": seconds})


def doomed(case: str, place: Place) -> Found:
    """A rank of `failing`."""
    device = joined(place.kind)
    task = task_of(device)
    engine = initialize(model=task.model(), config=ds_config("fp32", {"stage": 3, **RELEASED}, {}))[0]
    for step in range(6):
        if step == 3 and get_rank() == 1:
            (place.folder / f"{case.replace(' ', '-')}.at").write_text(str(time.time()))
            if "kill" in case:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the fault of this test")
        task.train(engine, range(step, step + 1))
    sys.exit("no rank has failed")
