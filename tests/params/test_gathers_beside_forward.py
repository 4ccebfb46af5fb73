"""Stages 1 and 2 gather updated weights beside the next forward: whoever reads a weight waits for it first.

`step()` used to return when all gathers were done, so the link was idle in forward, and the device during the gathers.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.api.parameter_access import safe_set_full_fp32_param
from hf_zero.comm import Pending
from hf_zero.comm.cpu import shared_memory
from hf_zero.params.gathers_beside_forward import BucketGather, GatheringParameter, may_run_beside
from tests.support.happens_before import Fault, GraphWorld
from tests.support.in_process import engines_in
from tests.support.late import use
from tests.support.ranks import run_each

WIDTH = 8


@pytest.fixture(scope="module", autouse=True)
def _hook_ends() -> Iterator[None]:
    """Gathers that nobody waited for keep the hook of all modules, which torch.compile in a later test would see."""
    yield
    gc.collect()
    nn.Identity()(torch.ones(1))
    assert not nn.modules.module._global_forward_pre_hooks


class Gather(Pending):
    """Writes the new weights when somebody waits."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.old = parameter.detach()  # the same memory
        self.new = parameter.detach().clone()
        self.old.fill_(float("nan"))
        self.has_arrived = False

    def wait(self) -> None:
        self.old.copy_(self.new)
        self.has_arrived = True


class Model(nn.Module):
    def __init__(self, read: Callable[[Tensor], object] = lambda weight: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.read(block.weight)
        return x.square().mean()


def in_flight(module: nn.Module) -> list[Gather]:
    """A gather for each parameter."""
    gathers = []
    for parameter in module.parameters():
        gathers.append(Gather(parameter))
        BucketGather([parameter], gathers[-1])
    return gathers


READS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda module: module(torch.ones(2, WIDTH)),
    "functional": lambda module: torch.nn.functional.linear(torch.ones(2, WIDTH), module.weight),
    "data": lambda module: module.weight.data,
    "detach": lambda module: module.weight.detach(),
    "state_dict": lambda module: module.state_dict(),
    "deepcopy": lambda module: copy.deepcopy(module),
    "pickle": lambda module: torch.save(module, io.BytesIO()),
    "list": lambda module: torch._foreach_norm(list(module.parameters())),
    "keyword": lambda module: torch.sum(input=module.weight),
    "in place": lambda module: module.weight.detach().mul_(1.0),
    "address": lambda module: module.weight.data_ptr(),
    "storage": lambda module: module.weight.untyped_storage(),
    "repr": lambda module: repr(module.weight),
    "numpy": lambda module: module.weight.detach().numpy(),
    "functional_call": lambda module: torch.func.functional_call(
        module, dict(module.named_parameters()), torch.ones(2, WIDTH)
    ),
    "optimizer": lambda module: torch.optim.SGD([module.weight]).param_groups[0]["params"][0].sum(),
    "custom function": lambda module: _Function.apply(module.weight),  # type: ignore[no-untyped-call]
}


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("read", READS)
def test_a_read_waits_for_the_bucket(read: str) -> None:
    module = nn.Linear(WIDTH, WIDTH)
    weight, before = module.weight, module.weight.detach().clone()
    gather = in_flight(module)[0]
    assert isinstance(weight, nn.Parameter)
    READS[read](module)
    assert gather.has_arrived and type(module.weight) is nn.Parameter and module.weight is weight
    assert torch.equal(module.weight, before)


def test_a_copy_is_a_plain_parameter() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    in_flight(module)
    copied = copy.deepcopy(module)
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    again = type(module.weight)(torch.ones(2), False)
    in_flight(module)
    assert type(type(module.weight)(torch.ones(2), False)) is type(again) is nn.Parameter
    assert torch.equal(copied.weight, module.weight)


def test_what_needs_no_values_does_not_wait() -> None:
    """Between two steps Trainer counts parameters, and optimizers and the engine look at gradients and hooks."""
    module = nn.Linear(WIDTH, WIDTH)
    gathers = in_flight(module)
    module.zero_grad()
    module.requires_grad_(True)
    module.train().eval()
    for parameter in module.parameters():
        assert parameter.grad is None and parameter.requires_grad and parameter.is_leaf
        parameter.grad = torch.ones_like(parameter)
        assert parameter.numel() == parameter.shape.numel() and parameter.dtype is torch.float32
        assert parameter in set(module.parameters())
        parameter.register_hook(lambda gradient: None)
        assert parameter.is_floating_point() and parameter._version >= 0
    assert not any(gather.has_arrived for gather in gathers)
    module(torch.ones(2, WIDTH))
    assert all(gather.has_arrived for gather in gathers)


def test_c_code_of_a_module_finds_its_own_weights() -> None:
    """A C++ extension that takes tensors does not ask the class of a parameter."""

    class Extension(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return super().forward(x)

    module = nn.Sequential(Extension(WIDTH, WIDTH), Extension(WIDTH, WIDTH))
    gathers = in_flight(module)
    assert module[0](torch.ones(2, WIDTH)).isfinite().all()
    assert [gather.has_arrived for gather in gathers] == [True, True, False, False]


def test_a_replaced_forward_finds_all_weights_inside() -> None:
    """`torch.cuda.make_graphed_callables` replaces it by one that replays a graph, which reads all weights."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weights = [each.weight.detach() for each in module]
    module.forward = lambda x: x @ weights[0] @ weights[1]  # type: ignore[method-assign]
    gathers = in_flight(module)
    assert module(torch.ones(2, WIDTH)).isfinite().all()
    assert all(gather.has_arrived for gather in gathers)


def test_nothing_stays_behind() -> None:
    hooks, other = nn.modules.module._global_forward_pre_hooks, nn.Linear(2, 2)
    for _ in range(2):
        gc.collect()
        other(torch.ones(1, 2))
        assert not hooks
        module = nn.Linear(WIDTH, WIDTH)
        in_flight(module)
        assert len(hooks) == 1
        del module  # an engine that is dropped with its gathers
    module = nn.Linear(WIDTH, WIDTH)
    in_flight(module)
    module(torch.ones(2, WIDTH))
    gc.collect()
    other(torch.ones(1, 2))
    assert not hooks


def test_other_parameter_classes_and_compiled_code_wait_in_the_step() -> None:
    class Own(nn.Parameter):
        pass

    plain = [nn.Parameter(torch.ones(2))]
    assert may_run_beside(plain) and not may_run_beside([Own(torch.ones(2))])
    frames = {"frames": {"total": 1}}
    with mock.patch.dict("sys.modules", {"torch._dynamo.utils": mock.Mock(counters=frames)}):
        assert not may_run_beside(plain)


# Over streams


def steps_of_a_graph(stage: int, *, reads_on: str = "compute") -> GraphWorld:
    """Three updates in which the device reads each weight after the module that owns it."""
    world = GraphWorld(2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH + WIDTH},
    }

    def body(rank: int) -> None:
        memory: dict[int, Tensor] = {}

        def read(weight: Tensor) -> None:
            if id(weight) in memory:
                world.device.record(memory[id(weight)])

        model = Model(read)
        engine = initialize(model=model, config=config)[0]
        memory.update({id(block.weight): block.weight.detach() for block in model.blocks})
        for _ in range(3):
            if reads_on != "compute":
                with world.graph.on(reads_on):
                    model.blocks[0].weight.sum()
            engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
            engine.step()
            assert type(model.blocks[0].weight) is GatheringParameter
        engine.destroy()
        assert type(model.blocks[0].weight) is nn.Parameter

    with use(world.device), engines_in(world) as initialize:
        world.run(body)
    return world


@pytest.mark.parametrize("stage", [1, 2])
def test_streams_read_what_they_have_waited_for(stage: int) -> None:
    steps_of_a_graph(stage).graph.refuse_faults()


def test_a_missing_wait_is_found() -> None:
    def forget(gather: BucketGather) -> None:
        for parameter in gather._parameters:
            parameter.__class__ = nn.Parameter

    with mock.patch.object(BucketGather, "wait", forget), pytest.raises(Fault, match="reads what .* may still use"):
        steps_of_a_graph(2).graph.refuse_faults()


def test_a_read_on_another_stream_lets_both_wait() -> None:
    """The first reader may be on a stream of the program's own; later readers on the usual one do not wait again."""
    steps_of_a_graph(2, reads_on="side").graph.refuse_faults()


# Between hosts


def train(rank: int, overlaps: bool) -> tuple[list[Tensor], int]:
    """Six updates with reads and writes of all kinds in between. Returns what was read, and how many weights were still
    being gathered when `step` returned."""
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "overlap_comm": overlaps, "reduce_bucket_size": WIDTH * WIDTH + WIDTH},
    }
    found: list[Tensor] = []
    num_beside = 0
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {rank}"):
        engine = hf_zero.initialize(model=model, config=config)[0]
    for step in range(6):
        loss = engine(torch.full((1, WIDTH), 0.1 * (step + rank + 1)))
        engine.backward(loss)
        engine.step()
        num_beside += sum(type(parameter) is GatheringParameter for parameter in model.parameters())
        if step == 1:
            found.extend(engine.module.state_dict().values())
        elif step == 2:
            found.append(engine(torch.ones(1, WIDTH)))
        elif step == 3:
            with torch.no_grad():
                model.blocks[2].weight.mul_(0.5)
        elif step == 4:
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        elif step == 5:  # a write into masters overwrites what gathers still send: it waits for all of them
            safe_set_full_fp32_param(model.blocks[0].weight, torch.full((WIDTH, WIDTH), 0.3))
            assert type(model.blocks[2].weight) is nn.Parameter
            found.append(engine(torch.ones(1, WIDTH)))
    found.extend(model.parameters())
    engine.destroy()
    return [values.detach().clone() for values in found], num_beside


def test_values_are_the_same_to_the_bit() -> None:
    """Over gloo between hosts, where memory changes when a message arrives."""
    beside, in_step = run_each(train, 2, [(True,), (False,)])
    for (values, num_beside), (expected, none) in zip(beside, in_step, strict=True):
        assert (num_beside, none) == (36, 0)
        assert all(map(torch.equal, values, expected))
