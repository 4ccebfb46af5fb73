"""Steps that do not synchronize with their device, and steps that turn out later to have been skipped.

Every step used to read the gradient norm, so that the host was blocked until the device had finished backward, and the
device was then idle until the host had launched the update.

These tests need no device. On the meta device nothing can be read at all, which makes it the strictest test; the
results of steps without synchronization are checked on the CPU, treated like an accelerator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero import initialize
from hf_zero.api import entry
from hf_zero.api.engine import ZeroEngine
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.params import edits
from hf_zero.step import assemble
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_each, run_ranks
from tests.support.simulation import META, simulated_world

pytestmark = pytest.mark.lengthy

ROWS = 4
OPTIMIZERS = {
    "AdamW": {"lr": 1e-2},
    "Lion": {"lr": 1e-3},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
}


class Blocks(nn.Module):
    """Two blocks, which are separate units at stage 3, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(2))
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).float().square().mean()


def config(kind: str, stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
        "optimizer": {"type": kind, "params": OPTIMIZERS[kind]},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_allow_untested_optimizer": True,
        **sections,
    }


class _Copies(TorchDispatchMode):
    """Detects copies from host to device that block the host: those of pageable memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [tensor for tensor in args if isinstance(tensor, Tensor)]
        crosses = isinstance(result, Tensor) and any(s.is_cpu != result.is_cpu for s in sources if s.dim())
        if crosses and not (kwargs or {}).get("non_blocking"):
            self.found.append(str(func))
        return result


@contextmanager
def no_copies() -> Iterator[None]:
    make = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        assert torch.device(kwargs.get("device") or "cpu").type == "cpu", "torch.tensor(numbers, device=...) waits"
        return make(*args, **kwargs)

    with mock.patch.object(torch, "tensor", tensor), _Copies() as copies:
        yield
    assert not copies.found


CASES = [("AdamW", precision) for precision in ("fp32", "bf16")] + [(kind, "bf16") for kind in list(OPTIMIZERS)[1:]]


# Each optimizer at every other stage, on one rank at one of them and on four at the other.
CELLS = [
    pytest.param(*case, stage, world, marks=[] if (number + stage) % 4 == 2 * (world == 4) else [pytest.mark.slow])
    for (number, case), stage, world in product(enumerate(CASES), range(4), (1, 4))
]


@pytest.mark.parametrize(("kind", "precision", "stage", "world"), CELLS)
def test_forward_backward_and_step_read_nothing(kind: str, precision: str, stage: int, world: int) -> None:
    """Any read of a tensor raises here. The first step is excluded: in it ranks agree on the order of gathers."""
    with simulated_world(world - 1, world) as simulated:
        with META:
            model = Blocks()
            batch = torch.empty(ROWS, 24, dtype=torch.bfloat16 if precision == "bf16" else None)
        engine = simulated.engine(model, config(kind, stage, bf16={"enabled": precision == "bf16"}))
        for step in range(3):
            with no_copies() if step else mock.MagicMock():
                for _ in range(2):
                    engine.backward(engine(batch))
                    engine.step()
                assert engine.gradients.assembly.step.outcome.is_known is False
        assert engine.global_steps == 3
        engine.destroy()


def test_reading_a_meta_tensor_raises() -> None:
    """The assumption of the test above."""
    number = torch.ones((), device=META)
    for read in (Tensor.item, Tensor.tolist, bool, float, int, Tensor.nonzero, Tensor.cpu, Tensor.numpy):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            read(number)  # type: ignore[operator]


@contextmanager
def as_a_device() -> Iterator[None]:
    """Engines created inside treat the CPU as a device that runs behind the host: they read the outcome of a step in
    the next one, and hosts exchange facts over a separate group."""
    made = assemble.assemble

    def with_hosts(module: nn.Module, optimizer: Any, plan: Any, names: Any) -> Any:
        if dist.is_initialized():
            plan.groups.world._hosts = dist.new_group(backend="gloo")
        return made(module, optimizer, plan, names)

    with (
        mock.patch.object(assemble, "host_runs_ahead", lambda _device: True),
        mock.patch.object(edits, "host_runs_ahead", lambda _device: True),
        mock.patch.object(entry, "assemble", with_hosts),
    ):
        yield


BAD_STEPS = (2, 5)


def run_both_ways(rank: int, kind: str, stage: int, world: int) -> None:
    """The same training with and without synchronization: weights, states, schedule and counters are bitwise equal."""
    waited, ahead = ended(kind, stage, rank, world), None
    with as_a_device():
        ahead = ended(kind, stage, rank, world)
    assert waited.keys() == ahead.keys()
    for name, value in waited.items():
        assert torch.equal(value, ahead[name]) if isinstance(value, Tensor) else value == ahead[name], name


def ended(kind: str, stage: int, rank: int, world: int) -> dict[str, Any]:
    engine = initialize(model=AwkwardMLP(), config=config(kind, stage, bf16={"enabled": True}))[0]
    found: dict[str, Any] = {}
    for step in range(7):
        for batch in mlp_batches(2, ROWS * world, seed=step):
            mine = {key: value.chunk(world)[rank].bfloat16() for key, value in batch.items()}
            loss = engine(**mine, flag=step % 3 == 1 and rank == 0)
            engine.backward(loss * float("nan") if step in BAD_STEPS and rank == world - 1 else loss)
            engine.step()
        found[f"norm of {step}"] = repr(engine.get_global_grad_norm()) if step % 2 else None
    found["counters"] = engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.global_samples
    found["schedule"] = engine.lr_scheduler.state_dict(), engine.lr_scheduler.get_last_lr(), engine.get_lr()
    found["applied"] = engine.was_step_applied()
    for index, shard in enumerate(engine.optimizer.sub_groups):
        found[f"master {index}"] = shard.master
        state = engine.optimizer.state.get(shard.tensors[0].parameter, {})
        found |= {f"{name} {index}": value for name, value in state.items() if isinstance(value, Tensor)}
    return found | {"steps": engine.optimizer.updater.parameter_steps()} | engine.module_state_dict()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_not_waiting_changes_no_bit(kind: str) -> None:
    run_both_ways(0, kind, 0, 1)


def test_not_waiting_changes_no_bit_between_ranks() -> None:
    run_each(run_both_ways, 2, [("AdamW", stage, 2) for stage in (1, 2, 3)])


def engine_ahead(zero: dict[str, Any] | None = None, seed: int = 0, **more: Any) -> ZeroEngine:
    """An engine that reads the outcome of a step in the next one."""
    settings = config("AdamW", 0, gradient_accumulation_steps=1, zero_optimization=zero or {"stage": 0})
    with as_a_device():
        return initialize(model=AwkwardMLP(seed), config=settings, **more)[0]


def one_update(engine: ZeroEngine, factor: float = 1.0) -> None:
    (batch,) = mlp_batches(1, ROWS)
    engine.backward(engine(**batch) * factor)
    engine.step()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("step ")]


def test_a_skip_is_told_as_soon_as_somebody_asks(caplog: pytest.LogCaptureFixture) -> None:
    """... and at the next step at the latest; weights and states are unchanged."""
    engine = engine_ahead()
    one_update(engine)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    rate = engine.get_lr()
    for ask in (lambda: engine.skipped_steps, lambda: engine.optimizer.overflow, engine.get_global_grad_norm):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_zero"):
            one_update(engine, float("inf"))
            assert not told(caplog) and not engine.gradients.assembly.step.outcome.is_known
            ask()
        number = engine.global_steps
        (said,) = told(caplog)
        assert said.startswith(f"step {number} skipped on all ranks: the gradient norm is nan; the first gradients")
        assert said.endswith(" that are not finite are of a parameter from scale to sometimes.bias")
    one_update(engine, float("inf"))
    assert engine.skipped_steps == 4 and engine.get_lr() == rate
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    assert set(engine.optimizer.updater.parameter_steps().values()) <= {0, 1}
    one_update(engine)
    assert engine.was_step_applied() and engine.get_lr() != rate


def test_a_rate_set_by_hand_survives_the_news_of_a_skip() -> None:
    engine = engine_ahead()
    one_update(engine, float("inf"))
    engine.optimizer.param_groups[0]["lr"] = 0.25
    before = engine.module.head.weight.detach().clone()
    one_update(engine)
    assert engine.skipped_steps == 1
    assert (engine.module.head.weight - before).abs().max() > 0.2, "Adam's first update moves by the rate"


class Counting:
    """A user's schedule that cannot be restored."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_a_schedule_that_cannot_go_back_is_moved_when_the_outcome_is_known() -> None:
    schedule = Counting()
    engine = engine_ahead(lr_scheduler=schedule)
    one_update(engine)
    one_update(engine, float("nan"))
    assert schedule.steps == 1 and engine.gradients.assembly.step.outcome.is_known


def test_a_checkpoint_knows_of_the_last_step(tmp_path: Any) -> None:
    engine = engine_ahead()
    one_update(engine)
    one_update(engine, float("nan"))
    engine.save_checkpoint(str(tmp_path))
    other = engine_ahead(seed=1)
    other.load_checkpoint(str(tmp_path))
    assert (other.global_steps, other.skipped_steps) == (2, 1)
    assert other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
    assert other.optimizer.updater.parameter_steps() == engine.optimizer.updater.parameter_steps()


def test_fp16_decides_in_the_step_itself() -> None:
    """The next backward needs the new loss scale."""
    with as_a_device():
        engine = initialize(model=AwkwardMLP(), config=config("AdamW", 0, fp16={"enabled": True}))[0]
    for batch in mlp_batches(2, ROWS):
        engine.backward(engine(**{key: value.half() for key, value in batch.items()}))
        engine.step()
    assert engine.gradients.assembly.step.outcome.is_known


def run_overwritten(rank: int) -> None:
    engine = engine_ahead({"stage": 3, "stage3_param_persistence_threshold": 0})
    one_update(engine)
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    if rank == 0:
        with torch._C.DisableTorchFunctionSubclass():  # as C++ code writes
            engine.module.head.weight.data.fill_(0.5)
    one_update(engine)
    with pytest.raises(RuntimeError, match="overwritten"):
        one_update(engine)
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())


def test_a_lost_edit_stops_the_next_step_and_nothing_is_updated() -> None:
    run_ranks(run_overwritten, 2)


def run_written_through_data(rank: int) -> None:
    engine = engine_ahead({"stage": 3})
    weight = engine.module.head.weight
    one_update(engine)
    with torch.no_grad():
        weight.fill_(0.5)
    with GatheredParameters(engine.module.head.bias, modifier_rank=0):
        engine.module.head.bias.data.fill_(0.25)
    one_update(engine)
    one_update(engine)
    assert (weight - 0.5).abs().max() < 0.1, "the write was lost"
    before = weight.detach().clone()
    weight.data.fill_(0.5)
    one_update(engine)
    with pytest.raises(RuntimeError, match=r"head.weight[\s\S]*written to through `parameter.data`"):
        one_update(engine)
    assert torch.equal(weight, before)


def test_a_write_through_data_into_a_persistent_parameter_is_refused_where_nobody_may_look() -> None:
    """`logit_scale.data.clamp_()` was lost at the next step. On a CPU it is now kept, but detecting it in time on a
    device would block the host."""
    run_ranks(run_written_through_data, 2)
