"""Training on the late device: bitwise the same as on the CPU, and every wait is necessary.

The device carries out a copy only when somebody waits for it (`tests.support.late`), so that a missing wait always
fails here, without an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.device.runtime import HOST_MEMORY, Lane, Runtime
from hf_zero.offload import update_speed
from hf_zero.offload.placement import Departures, StagedVector, StagingPool
from hf_zero.offload.vector import InMemoryVector
from hf_zero.optim.adam8 import AdamW8bit
from tests.offload.offload_runs import ROWS, SHARDED, Run, engine_for, train, waits_for_gradients, weights_of
from tests.support.late import Deaf, Late, LateError, line_of, use
from tests.support.models import mlp_batches

CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "FOLDER", "buffer_count": 5}
SUB_GROUPS = {"sub_group_size": 64}

ON_DEVICE = {"hf_zero": {"offload_update": "device"}}
BY_BOTH = {"hf_zero": {"offload_update": "both"}}

CASES = {
    "stage 0": Run(0, clip=0.05),
    "stage 2, optimizer on the host": Run(2, {"offload_optimizer": CPU, **SUB_GROUPS}, clip=0.05, accumulation=2),
    "the same in fp32": Run(2, {"offload_optimizer": CPU, **SUB_GROUPS}, bf16=False),
    "stage 2, optimizer on a drive": Run(2, {"offload_optimizer": NVME, **SUB_GROUPS}, accumulation=2),
    "a torch optimizer": Run(2, {"offload_optimizer": CPU}, optimizer=(torch.optim.RMSprop, {"lr": 0.01})),
    "stage 3, optimizer on the host": Run(3, {"offload_optimizer": CPU, **SUB_GROUPS}, clip=0.05),
    "stage 3, all on the host": Run(3, {"offload_optimizer": CPU, "offload_param": CPU, **SUB_GROUPS}, clip=0.05),
    "stage 3, parameters on the host": Run(3, {"offload_param": CPU}, accumulation=2),
    "the same, in fp32": Run(3, {"offload_param": CPU}, bf16=False),
    "stage 2, streamed through the device": Run(
        2, {"offload_optimizer": CPU, **SUB_GROUPS}, clip=0.05, accumulation=2, sections=ON_DEVICE
    ),
    "the same in fp32, whose weights are the masters": Run(
        2, {"offload_optimizer": CPU, **SUB_GROUPS}, bf16=False, sections=ON_DEVICE
    ),
    "8-bit states, streamed": Run(
        2, {"offload_optimizer": CPU}, optimizer=(AdamW8bit, {"lr": 0.01}), sections=ON_DEVICE
    ),
    "the same in fp32, stage 3": Run(
        3, {"offload_optimizer": CPU, "offload_param": CPU, **SUB_GROUPS}, bf16=False, sections=ON_DEVICE
    ),
    "stage 3, updated by both": Run(3, {"offload_optimizer": CPU, **SUB_GROUPS}, clip=0.05, sections=BY_BOTH),
    "streamed from a drive": Run(2, {"offload_optimizer": NVME, **SUB_GROUPS}, sections=ON_DEVICE),
    "a streamed torch optimizer": Run(
        2, {"offload_optimizer": CPU}, optimizer=(torch.optim.RMSprop, {"lr": 0.01}), sections=ON_DEVICE
    ),
    "stage 3, all on a drive": Run(3, {"offload_optimizer": NVME, "offload_param": NVME, **SUB_GROUPS}),
    "stage 3, parameters on a drive": Run(3, {"offload_param": NVME}),
}


@pytest.fixture(autouse=True)
def small_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_speed, "_NUMEL", 1 << 10)  # the late device clones what it copies


def trained(run: Run) -> list[Any]:
    """Losses, norms and weights of a single rank."""
    torch.manual_seed(1234)
    engine = engine_for(run, 1)
    numbers = train(engine, run, 0, 1, steps=3)
    assert all(number == number for number in numbers), "NaN"
    with GatheredParameters(list(engine.module.parameters())):
        weights = [parameter.detach().flatten().tolist() for parameter in engine.module.parameters()]
    engine.destroy()
    return [*numbers, *weights]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str, tmp_path: Path) -> None:
    """With all copies late, and with some early."""
    run = CASES[case].in_folder(tmp_path)
    with use(Runtime()):
        expected = trained(run)
    for early in (0.0, 0.3):
        with use(Late(early=early)) as runtime:
            found = trained(run)
            runtime.synchronize()
        for ours, wanted in zip(found, expected, strict=True):
            if isinstance(wanted, float):
                assert ours == pytest.approx(wanted, rel=1e-6)  # a single rank has units: another order of summation
            else:
                assert ours == wanted


Program = Callable[[Late], Any]


def training(run: Run) -> Program:
    return lambda runtime: trained(run)


# Cases that no training covers, because its engines live on and use everything that they fetch.


def staged(runtime: Late, *, is_host: bool) -> StagedVector:
    """Updated in host memory or on the device, stored on the other side."""
    memory = runtime.own if is_host else HOST_MEMORY
    pool = StagingPool(runtime, lambda numel, dtype: torch.zeros(numel, dtype=dtype), is_host=is_host)
    return StagedVector(InMemoryVector(torch.arange(8.0), memory), pool)


def fetched_for_nothing(runtime: Late) -> Any:
    """A unit that was prefetched but not used; then a checkpoint is loaded into the row."""
    home = InMemoryVector(torch.arange(8.0))
    pool = StagingPool(runtime, lambda numel, dtype: torch.zeros(numel, dtype=dtype), is_host=False)
    vector = StagedVector(home, pool)
    vector.fetch()
    vector.release(changed=False)
    home.take().zero_()
    runtime.synchronize()


def gone_while_it_comes(runtime: Late) -> Any:
    vector = staged(runtime, is_host=False)
    vector.fetch()
    buffer = vector._values  # the compute stream's
    del vector
    runtime.synchronize()
    return buffer.tolist()


def gone_while_it_leaves(runtime: Late) -> Any:
    vector = staged(runtime, is_host=False)
    vector.fetch(reads=False)
    vector.take().fill_(1)
    vector.release(changed=True)
    del vector
    runtime.synchronize()


def read_again_while_it_leaves(runtime: Late) -> Any:
    """A program asks for a master right after its update on the device."""
    vector = staged(runtime, is_host=False)
    for reads in (False, True):
        vector.fetch(reads=reads)
        values = vector.take()
        seen = values.tolist()
        values.fill_(1)
        vector.release(changed=True)
    return seen


def gone_while_gradients_leave(runtime: Late) -> Any:
    pool = StagingPool(runtime, lambda numel, dtype: torch.zeros(numel, dtype=dtype), is_host=True)
    leaving = Departures(runtime, pool)
    leaving.send(torch.ones(8), lambda values: None)
    del leaving, pool
    runtime.synchronize()


def place_gone_while_gradients_leave(runtime: Late) -> Any:
    leaving = Departures(runtime, StagingPool(runtime, lambda *_: torch.zeros(0), is_host=True))
    gradients = torch.ones(8)
    leaving.send(gradients, lambda values: None, torch.zeros(8))
    del leaving
    runtime.synchronize()
    return gradients.tolist()


def read_right_after_its_update(runtime: Late) -> Any:
    """A program reads masters on the device, whose update is queued on the update lane."""
    run = Run(3, {"offload_param": CPU, **SHARDED})
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=1)
    engine.optimizer.param_groups[0]["params"][0].tolist()
    has_waited = runtime.has_joined(Lane.UPDATE)
    engine.destroy()
    return has_waited


STORIES: tuple[Program, ...] = (
    fetched_for_nothing,
    gone_while_it_comes,
    gone_while_it_leaves,
    read_again_while_it_leaves,
    gone_while_gradients_leave,
    place_gone_while_gradients_leave,
    read_right_after_its_update,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_whatever_goes_in_the_middle_of_a_copy_stays_until_it_is_done(story: Program) -> None:
    with use(Late(early=0.0)) as runtime:
        story(runtime)


def sites_of(program: Program) -> set[str]:
    with use(Deaf()) as runtime:
        program(runtime)
        return runtime.sites


def notices(program: Program, site: str, expected: Any) -> bool:
    with use(Deaf(deaf_at=site)) as runtime:
        try:
            found = program(runtime)
            runtime.synchronize()
        except (LateError, AssertionError, RuntimeError):
            return True
    return bool(found != expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_wait_is_needed(tmp_path: Path) -> None:
    """A mutation campaign: each wait is omitted in turn, and some training or case must fail."""
    programs = [*STORIES, *(training(run.in_folder(tmp_path)) for run in CASES.values())]
    expected, sites = [], []
    for program in programs:
        with use(Late(early=0.0)) as runtime:
            expected.append(program(runtime))
        sites.append(sites_of(program))
    unnoticed = []
    for site in sorted(set.union(*sites)):
        if not site.startswith("offload/"):
            continue  # read numbers, which are not copies of states
        here = [(run, wanted) for run, seen, wanted in zip(programs, sites, expected, strict=True) if site in seen]
        if not any(notices(run, site, wanted) for run, wanted in here):
            unnoticed.append(f"{site}: {line_of(site)}")
    assert not unnoticed, f"left out, and nothing minds: {unnoticed}"


def lanes_of(runtime: Late, run: Run) -> list[tuple[str, str]]:
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=2)
    runtime.trace = []
    train(engine, run, 0, 1, first=2, steps=1)
    trace, runtime.trace = runtime.trace, None
    engine.destroy()
    return trace


def test_gradients_leave_while_backward_goes_on(late: Late) -> None:
    """Copies out are requested between the buckets of backward, and the host waits for none before backward ends."""
    trace = lanes_of(late, Run(2, {"offload_optimizer": CPU, "sub_group_size": 64}))
    start = trace.index(("compute", "hf_zero backward"))
    stop = trace.index(("compute", "hf_zero step"))
    backward = [lane for lane, _ in trace[start + 1 : stop]]
    assert backward.count("out") >= 3 and "host" not in backward[: max(backward.index("out"), 1) + 2]


def test_weights_go_back_while_the_next_sub_group_is_updated(late: Late) -> None:
    """The weights of each update are sent; the host only waits for gradients of the next one."""
    trace = lanes_of(late, Run(2, {"offload_optimizer": CPU, "sub_group_size": 64}))
    step = trace[trace.index(("compute", "hf_zero step")) :]
    sent = [position for position, (lane, what) in enumerate(step) if lane == "in"]
    assert len(sent) >= 4
    for before, after in zip(sent, sent[1:], strict=False):
        waits = [what for lane, what in step[before + 1 : after] if lane == "host" and "placement.py" in what]
        others = [what for what in waits if what not in waits_for_gradients()]
        assert len(others) <= 2, "for its own buffer and old weights, not for those that were just sent"


def test_everything_is_offloaded_unless_a_ratio_says_less(late: Late) -> None:
    """The share counts elements, and parts of buckets have padding: the last bucket's masters and states could stay on
    the device."""
    engine = engine_for(Run(2, {"offload_optimizer": CPU, "reduce_bucket_size": 40}), 1)
    buckets = engine.gradients.assembly.store.buckets
    assert len(buckets) > 2 and all(bucket.placement.work == HOST_MEMORY for bucket in buckets)
    engine.destroy()


def test_rows_come_in_without_the_host(late: Late) -> None:
    """The compute stream waits for every incoming row; the host waits for none of them in forward."""
    run = Run(3, {"offload_optimizer": CPU, "offload_param": CPU, **SHARDED})
    trace = lanes_of(late, run)
    forward = trace[trace.index(("compute", "hf_zero forward")) : trace.index(("compute", "hf_zero backward"))]
    copies = [position for position, (lane, _) in enumerate(forward) if lane == "in"]
    uses = [position for position, (lane, what) in enumerate(forward) if lane == "compute" and "waits" in what]
    assert len(copies) == len(uses) >= 2 and all(copy < use for copy, use in zip(copies, uses, strict=True))
    assert not any(lane == "host" and "placement.py" in what for lane, what in forward)


def test_an_engine_that_goes_in_the_middle_of_a_copy(late: Late) -> None:
    """Its buffers in host memory stay until the device has read them."""
    run = Run(2, {"offload_optimizer": CPU, **SUB_GROUPS})
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=1)
    engine.destroy()
    del engine
    late.synchronize()


@pytest.mark.parametrize("zero", [{"offload_param": CPU}, {"offload_param": CPU, "offload_optimizer": CPU}], ids=str)
def test_a_checkpoint_loaded_right_after_a_forward(zero: dict[str, Any], late: Late, tmp_path: Path) -> None:
    """Rows in host memory are only overwritten after the previous forward has read them, even if it was not used."""
    run = Run(3, zero)
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=1)
    engine.save_checkpoint(str(tmp_path))
    expected = weights_of(engine)
    train(engine, run, 0, 1, first=1, steps=1)
    (batch,) = mlp_batches(1, ROWS)
    engine(**{key: value.bfloat16() for key, value in batch.items()}, flag=True)
    engine.load_checkpoint(str(tmp_path))
    late.synchronize()
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(engine).items())
