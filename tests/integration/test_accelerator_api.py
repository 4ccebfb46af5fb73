"""Accelerator's methods with hf_zero on two ranks, compared with plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import hf_zero

hf_zero.install()

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, DummyOptim, DummyScheduler  # noqa: E402

from hf_zero.api.gathered_parameters import GatheredParameters  # noqa: E402
from tests.integration.flows import clean  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.reference import assert_same_weights  # noqa: E402

RANKS, BATCH, BATCHES, ACCUMULATION, CLIP = 2, 3, 6, 2, 0.05
STAGES = (2, 3)
MOSTLY_3 = (pytest.param(2, marks=pytest.mark.slow), 3)
TOLERANCE = 1e-5
PORTION = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}


class Trained(NamedTuple):
    weights: dict[str, Tensor] | None
    norms: list[float]  # before clipping, of every update
    rates: list[float]  # after every update


def new_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    count = RANKS * BATCH * BATCHES
    return TensorDataset(torch.randn(count, 7, generator=generator), torch.randn(count, 3, generator=generator))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-6)


def new_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train_plainly(model: nn.Module | None = None, *, scheduled: bool = True) -> Trained:
    """Trains on the whole batch in one process, without hf_zero."""
    model = model or new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    norms, rates = [], []
    for number, batch in enumerate(DataLoader(rows(), batch_size=RANKS * BATCH), 1):
        (loss_of(model, batch) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            for _ in range(RANKS * scheduled):  # accelerate counts the steps of one process over all batches
                schedule.step()
            optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
    return Trained(copy.deepcopy(dict(model.state_dict())), norms, rates)


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, schedule: Any = None) -> Trained:
    """The loop of accelerate's documentation."""
    norms, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        assert not accelerator.optimizer_step_was_skipped
        if accelerator.sync_gradients and schedule is not None:
            rates.append(schedule.get_last_lr()[0])
    return Trained(copy.deepcopy(accelerator.get_state_dict(model)), norms, rates)


def assert_weights(got: dict[str, Tensor] | None, expected: dict[str, Tensor], rank: int, stage: int) -> None:
    """At stage 3 they are gathered on the main process only, as in DeepSpeed."""
    if stage == 3 and rank > 0:
        assert got is None
    else:
        assert got is not None
        assert_same_weights(got, expected, TOLERANCE)


def plugin(stage: int, **more: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(zero_stage=stage, gradient_clipping=CLIP, zero3_save_16bit_model=True, **more)


def from_environment(stage: int) -> Accelerator:
    """Configured by the environment, as by a launcher."""
    os.environ |= {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(ACCUMULATION),
        "ACCELERATE_GRADIENT_CLIPPING": str(CLIP),
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }
    return Accelerator()


def from_plugin(stage: int) -> Accelerator:
    return Accelerator(deepspeed_plugin=plugin(stage), gradient_accumulation_steps=ACCUMULATION)


def told_to_use_the_cpu(stage: int) -> Accelerator:
    """accelerate alone would not use the engine, and train with DDP."""
    return Accelerator(cpu=True, deepspeed_plugin=plugin(stage), gradient_accumulation_steps=ACCUMULATION)


def selected(stage: int) -> Accelerator:
    """The second of two plugins."""
    plugins = {"other": DeepSpeedPlugin(zero_stage=0), "wanted": plugin(stage)}
    accelerator = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=ACCUMULATION)
    accelerator.state.select_deepspeed_plugin("wanted")
    return accelerator


def run_loop(rank: int, make: Any, stage: int, calls: int) -> Trained:
    clean()
    accelerator = make(stage)
    assert (accelerator.num_processes, accelerator.process_index, str(accelerator.device)) == (RANKS, rank, "cpu:0")
    model = new_model()
    optimizer = new_optimizer(model)
    loader, schedule = DataLoader(rows(), batch_size=BATCH), new_schedule(optimizer)
    inner = model
    if calls == 1:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    else:
        loader = accelerator.prepare(loader)
        model, optimizer = accelerator.prepare(model, optimizer)
        schedule = accelerator.prepare(schedule)
    assert model.zero_optimization_stage() == stage
    assert accelerator.unwrap_model(model) is inner
    return train(accelerator, model, optimizer, loader, schedule)


LOOPS = {
    "plugin": (from_plugin, 1),
    "several-calls": (from_plugin, 3),
    "environment": (from_environment, 1),
    "cpu": (told_to_use_the_cpu, 1),
    "selected": (selected, 1),
}
ALWAYS = ("plugin-2", "plugin-3", "several-calls-3", "environment-3", "cpu-2", "selected-2")


def loops() -> list[Any]:
    cases = {f"{name}-{stage}": (*how, stage) for name, how in LOOPS.items() for stage in STAGES}
    marks = {name: [] if name in ALWAYS else [pytest.mark.slow] for name in cases}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in cases.items()]


@pytest.mark.parametrize(("make", "calls", "stage"), loops())
def test_a_loop_trains_as_plain_pytorch(make: Any, calls: int, stage: int) -> None:
    expected = train_plainly()
    for rank, got in enumerate(run_ranks(run_loop, RANKS, make, stage, calls, init=False)):
        assert_weights(got.weights, expected.weights, rank, stage)
        assert got.norms == pytest.approx(expected.norms, rel=TOLERANCE)
        assert got.rates == pytest.approx(expected.rates, rel=TOLERANCE)


def run_no_sync(rank: int, stage: int) -> Trained:
    """The documentation's example: two backwards, with gradients reduced in the second."""
    clean()
    accelerator = Accelerator(deepspeed_plugin=plugin(stage))
    model = new_model()
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), DataLoader(rows(), batch_size=BATCH))
    norms = []
    batches = iter(loader)
    for first, second in zip(batches, batches):
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, first) / 2)
            assert model.global_steps == len(norms)
        accelerator.backward(loss_of(model, second) / 2)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(copy.deepcopy(accelerator.get_state_dict(model)), norms, [])


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), *MOSTLY_3])
def test_no_sync_holds_the_update_back(stage: int) -> None:
    """It raised an error at stages 0 and 1, and made an extra update at stages 2 and 3."""
    expected = train_plainly(scheduled=False)
    for rank, got in enumerate(run_ranks(run_no_sync, RANKS, stage, init=False)):
        assert_weights(got.weights, expected.weights, rank, stage)
        assert got.norms == pytest.approx(expected.norms, rel=TOLERANCE)


def run_saving(rank: int, stage: int, folder: str) -> dict[str, Any]:
    clean()
    accelerator = from_plugin(stage)
    model = new_model()
    optimizer = new_optimizer(model)
    parts = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=BATCH), new_schedule(optimizer))
    model, optimizer, loader, schedule = parts
    train(accelerator, *parts)
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    saved = copy.deepcopy(accelerator.get_state_dict(model))
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    gathered = dict(zip(names, whole(model), strict=True))
    after = train(accelerator, *parts)
    accelerator.load_state(f"{folder}/state")
    assert schedule.get_last_lr()[0] == pytest.approx(0.02 * 0.9**6)
    again = train(accelerator, *parts)
    return {"saved": saved, "gathered": gathered, "after": after, "again": again}


@pytest.mark.parametrize("stage", MOSTLY_3)
def test_what_is_saved_is_what_was_trained(stage: int, tmp_path: Path) -> None:
    expected = train_plainly().weights
    results = run_ranks(run_saving, RANKS, stage, str(tmp_path), init=False)
    in_file = load_file(tmp_path / "model" / "model.safetensors")
    assert_same_weights(in_file, expected, TOLERANCE)
    for rank, got in enumerate(results):
        assert_weights(got["saved"], expected, rank, stage)
        assert all(torch.equal(a, in_file[name]) for name, a in got["gathered"].items())
        assert all(torch.equal(a, in_file[name]) for name, a in (got["saved"] or {}).items())
        assert got["again"].norms == got["after"].norms and got["again"].rates == got["after"].rates
        for name, weight in (got["after"].weights or {}).items():
            assert torch.equal(weight, got["again"].weights[name])
    model = new_model()
    model.load_state_dict(in_file)


def whole(model: nn.Module) -> list[Tensor]:
    """All weights, on every rank."""
    with GatheredParameters(list(model.parameters())):
        return [parameter.detach().clone() for parameter in model.parameters()]


def run_overflow(rank: int, stage: int) -> list[tuple[bool, float, bool]]:
    """After every update: whether it was skipped, the learning rate, whether the weights have changed."""
    clean()
    config = {
        **PORTION,
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision="fp16")
    model = new_model()
    optimizer = new_optimizer(model)
    parts = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=BATCH), new_schedule(optimizer))
    model, optimizer, loader, schedule = parts
    found = []
    before = whole(model)
    for inputs, targets in loader:
        factor = 1e4 if len(found) == 0 else 1e-3  # the first step's gradients overflow in fp16
        accelerator.backward(loss_of(model, (inputs.half(), targets.half())) * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        now = whole(model)
        changed = any(not torch.equal(a, b) for a, b in zip(now, before, strict=True))
        found.append((accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0], changed))
        before = now
    return found


@pytest.mark.parametrize("stage", MOSTLY_3)
def test_a_skipped_step_is_reported_and_the_schedule_waits(stage: int) -> None:
    for found in run_ranks(run_overflow, RANKS, stage, init=False):
        assert found[0] == (True, 0.02, False)
        taken = next(number for number, (skipped, *_) in enumerate(found) if not skipped)
        for number, (skipped, rate, changed) in enumerate(found[taken:], 1):
            assert (skipped, changed) == (False, True)
            assert rate == pytest.approx(0.02 * 0.9 ** (RANKS * number))


def run_metrics(rank: int, stage: int) -> list[list[int]]:
    clean()
    accelerator = Accelerator(deepspeed_plugin=plugin(stage))
    model = new_model()
    numbers = TensorDataset(torch.arange(10))
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), DataLoader(numbers, batch_size=3))
    seen: list[int] = []
    for (batch,) in loader:
        with torch.no_grad():
            assert model(torch.zeros(len(batch), 7)).shape == (len(batch), 3)
        seen += accelerator.gather_for_metrics(batch).tolist()
    return [seen, accelerator.gather(torch.tensor([rank])).tolist(), accelerator.gather_for_metrics([rank], True)]


@pytest.mark.parametrize("stage", MOSTLY_3)
def test_metrics_count_every_row_once(stage: int) -> None:
    """Ten rows on two ranks in batches of three: the last batches are filled up, and the extra rows dropped again."""
    got = run_ranks(run_metrics, RANKS, stage, init=False)
    assert got == [[list(range(10)), [0, 1], [0, 1]]] * RANKS


def run_batches(rank: int) -> list[tuple[Any, ...]]:
    """The resulting `train_batch_size` and related sizes, and the first rows of this rank."""
    found = []
    for options, plugin_options, sizes in (
        ({}, {}, (BATCH,)),
        ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, {}, (2 * BATCH,)),
        ({}, {"is_train_batch_min": True}, (BATCH, 9)),
        ({}, {"is_train_batch_min": False}, (BATCH, 9)),
        ({"gradient_accumulation_steps": 4}, {}, (BATCH,)),
    ):
        clean()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, **plugin_options), **options)
        numbers = TensorDataset(torch.arange(36))
        loaders = [DataLoader(numbers, batch_size=size) for size in sizes]
        model = new_model()
        engine, _, first, *_ = accelerator.prepare(model, new_optimizer(model), *loaders)
        seen = next(iter(first))[0].tolist()
        config = accelerator.deepspeed_plugin.deepspeed_config
        sizes_found = tuple(config[name] for name in PORTION)
        assert sizes_found[:2] == (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size())
        found.append((*sizes_found, seen))
        engine.destroy()
    return found


def test_batch_sizes_are_those_of_the_loaders() -> None:
    def expected(rank: int) -> list[tuple[Any, ...]]:
        own = [3 * rank, 3 * rank + 1, 3 * rank + 2]
        return [(3, 6, 1, own), (3, 6, 1, own), (3, 6, 1, own), (9, 18, 1, own), (3, 24, 4, own)]

    assert run_ranks(run_batches, RANKS, init=False) == [expected(0), expected(1)]


def run_freeing(rank: int, stage: int) -> list[Trained]:
    """Twice in one process: the second training starts from the model that the first one left."""
    clean()
    accelerator = from_plugin(stage)
    inner, results = new_model(), []
    for _ in range(2):
        model, optimizer, loader = accelerator.prepare(
            inner, new_optimizer(inner), DataLoader(rows(), batch_size=BATCH)
        )
        results.append(train(accelerator, model, optimizer, loader))
        engine = weakref.ref(model)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        gc.collect()
        assert (model, optimizer, loader) == (None, None, None) and engine() is None
        assert accelerator.deepspeed_engine_wrapped is None
    return results


@pytest.mark.parametrize("stage", MOSTLY_3)
def test_freed_memory_is_free_and_the_model_trains_again(stage: int) -> None:
    model = new_model()
    expected = [train_plainly(model, scheduled=False) for _ in range(2)]
    for rank, got in enumerate(run_ranks(run_freeing, RANKS, stage, init=False)):
        for trained, plain in zip(got, expected, strict=True):
            assert_weights(trained.weights, plain.weights, rank, stage)


def test_a_stand_in_for_a_schedule_needs_its_model() -> None:
    clean()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    with pytest.raises(ValueError, match="a DummyScheduler without its model"):
        accelerator.prepare(DummyScheduler(DummyOptim(new_model().parameters()), total_num_steps=4))
