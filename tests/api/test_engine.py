"""The engine's API: counters, boundaries, skipped steps, edits, errors, destroy."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.api.engine import ZeroEngine
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.parameter_access import safe_get_full_fp32_param
from hf_zero.comm import init_distributed
from hf_zero.config import ConfigError
from hf_zero.errors import WrongMoment
from hf_zero.step.outcome import clip_coefficient
from tests.support import beside_plain
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_each, run_ranks

ROWS = 4
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def config(**sections: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 2}, "optimizer": ADAMW, **sections}


def new_engine(model: nn.Module | None = None, **sections: Any) -> ZeroEngine:
    return initialize(model=model or AwkwardMLP(), config=config(**sections))[0]


def one_step(engine: ZeroEngine, seed: int = 0) -> float:
    (batch,) = mlp_batches(1, ROWS, seed=seed)
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def weights_of(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def test_a_loop_that_steps_after_every_backward_updates_at_boundaries_only() -> None:
    engine = new_engine(gradient_accumulation_steps=3)
    changed = []
    for _ in range(6):
        before = weights_of(engine)["head.weight"]
        changed.append(engine.is_gradient_accumulation_boundary())
        one_step(engine)
        assert changed[-1] != torch.equal(before, weights_of(engine)["head.weight"])
    assert changed == [False, False, True] * 2
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (6, 2, 24)
    assert engine.get_batch_info() == (12, 4, 3)


def test_the_loss_is_divided_by_the_engine_unless_the_caller_has_done_so() -> None:
    (batch,) = mlp_batches(1, ROWS)
    norms = []
    for divided_by_caller in (False, True):
        engine = new_engine(gradient_accumulation_steps=4)
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(**batch)
        if divided_by_caller:
            engine.backward(loss / 4, scale_wrt_gas=False)
        else:
            assert torch.equal(engine.backward(loss), loss / 4)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


@pytest.mark.parametrize("loss", [0.5, {"loss": torch.ones(())}])
def test_a_loss_that_is_no_tensor_is_refused(loss: Any) -> None:
    """`engine.backward(outputs)` and `engine.backward(loss.item())` failed with an AttributeError from deep inside."""
    engine = new_engine()
    with pytest.raises(TypeError, match=rf"backward\(loss\).* got {type(loss).__name__}; .* pass the loss"):
        engine.backward(loss)
    assert math.isfinite(one_step(engine))


def test_two_backwards_before_one_step_add_up() -> None:
    """A second backward in one step failed with "gradient computed twice".

    In the first version, the second reduction of a bucket was also launched before the result of the first had been
    added, so it overwrote that result and was then added to itself.
    """
    (first, second) = mlp_batches(2, ROWS)
    engine = new_engine()
    engine.backward(engine(**first))
    engine.backward(engine(**second))
    engine.step()
    both = new_engine()
    both.backward(both(**first) + both(**second))
    both.step()
    assert engine.get_global_grad_norm() == pytest.approx(both.get_global_grad_norm(), rel=1e-6)


def test_a_plain_loss_backward_is_noticed_too() -> None:
    (batch,) = mlp_batches(1, ROWS)
    engine, plain = new_engine(), new_engine()
    for _ in range(3):
        engine.backward(engine(**batch))
        engine.step()
        plain(**batch).backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(engine).values(), weights_of(plain).values(), strict=True))


def test_a_step_after_local_backwards_only_reduces_them_first() -> None:
    """Setting the boundary after the last backward gives the same step, not one from a stale buffer."""
    for stage, ranks in enumerate(run_each(run_boundary_after_backward, 2, [(0,), (1,), (2,)])):
        expected, late = zip(*ranks, strict=True)
        for norms in (expected, late):
            assert norms[0] == norms[1], stage
        assert late[0] == pytest.approx(expected[0], rel=1e-6), stage


def run_boundary_after_backward(rank: int, stage: int) -> tuple[list[float | None], list[float | None]]:
    traces: list[list[float | None]] = []
    for boundary_in_time in (True, False):
        engine = new_engine(zero_optimization={"stage": stage, "reduce_bucket_size": 150}, gradient_clipping=0.0)
        norms = []
        for step in range(3):
            first, second = mlp_batches(2, 2 * ROWS, seed=step)
            for batch, last in ((first, False), (second, True)):
                engine.set_gradient_accumulation_boundary(last and boundary_in_time)
                engine.backward(engine(**{key: value.chunk(2)[rank] for key, value in batch.items()}))
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        traces.append(norms)
    return traces[0], traces[1]


def test_zero_grad_drops_what_was_accumulated() -> None:
    engine = new_engine(gradient_accumulation_steps=2)
    before = weights_of(engine)
    (batch,) = mlp_batches(1, ROWS)
    engine.backward(engine(**batch))
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
    assert engine.get_global_grad_norm() == 0.0


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    cases = [(stage, bf16) for stage in (0, 1, 2) for bf16 in (False, True)]
    for case, ranks in zip(cases, run_each(run_nonfinite, 2, cases), strict=True):
        for skipped, unchanged, rates, steps in ranks:
            assert skipped == unchanged == [False, True, False], case
            assert rates[1] == rates[0] and rates[2] != rates[1], "the schedule advances with applied updates only"
            assert steps == (3, 1), case


def run_nonfinite(rank: int, stage: int, bf16: bool) -> tuple[list[bool], list[bool], list[float], tuple[int, int]]:
    engine = new_engine(
        bf16={"enabled": bf16},
        zero_optimization={"stage": stage},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_min_lr": 0.01}},
    )
    skipped, unchanged, rates = [], [], []
    for step in range(3):
        before = weights_of(engine)
        (batch,) = mlp_batches(1, ROWS, seed=step)
        inputs = {key: value.bfloat16() if bf16 else value for key, value in batch.items()}
        loss = engine(**inputs)
        engine.backward(loss * float("inf") if step == 1 and rank == 1 else loss)
        engine.step()
        assert engine.optimizer is not None
        skipped.append(engine.optimizer.overflow)
        unchanged.append(all(torch.equal(value, before[name]) for name, value in weights_of(engine).items()))
        rates.append(engine.get_lr()[0])
    return skipped, unchanged, rates, (engine.global_steps, engine.skipped_steps)


def test_check_grad_overflow_false_lets_it_through() -> None:
    model = nn.Linear(3, 2)
    engine = initialize(model=model, config=config(bf16={"enabled": True, "check_grad_overflow": False}))[0]
    engine.backward(engine(torch.ones(4, 3, dtype=torch.bfloat16)).sum() * float("inf"))
    engine.step()
    assert not torch.isfinite(model.weight).any()


@pytest.mark.parametrize(
    ("norm", "clip", "expected"), [(2.0, 0.0, 1.0), (2.0, 4.0, 1.0), (2.0, 1.0, 0.5), (math.inf, 1.0, 0.0)]
)
def test_clip_coefficient(norm: float, clip: float, expected: float) -> None:
    assert clip_coefficient(norm, clip) == pytest.approx(expected, rel=1e-6)


def test_masters_start_from_the_unrounded_weights() -> None:
    model = nn.Linear(64, 64)
    exact = model.weight.detach().clone()
    engine = initialize(model=model, config=config(bf16={"enabled": True}))[0]
    assert engine.optimizer is not None
    (master,) = (p for group in engine.optimizer.param_groups for p in group["params"])
    assert torch.equal(master[: exact.numel()], exact.view(-1))
    assert torch.equal(model.weight, exact.bfloat16())


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_written_after_initialize_are_kept(bf16: bool) -> None:
    """load_state_dict on a live bf16 engine was undone by the next step, which wrote back the old masters."""
    engine = new_engine(bf16={"enabled": bf16}, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    donor = AwkwardMLP(seed=5).state_dict()
    engine.module.load_state_dict(donor)
    (batch,) = mlp_batches(1, ROWS)
    engine.backward(engine(**{key: value.bfloat16() if bf16 else value for key, value in batch.items()}))
    engine.step()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, donor[name].to(value.dtype)), name


def test_a_replaced_storage_is_noticed() -> None:
    engine = new_engine()
    engine.module.head.weight.data = engine.module.head.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"storage of parameter 'head.weight' was replaced after initialize"):
        one_step(engine)


def test_moving_or_casting_a_live_engine_is_refused_and_no_ops_are_not() -> None:
    engine = new_engine()
    assert engine.to("cpu").to(torch.float32).to(device="cpu", dtype=torch.float32) is engine
    with pytest.raises(RuntimeError, match=r"separate the weights from the optimizer"):
        engine.to(torch.bfloat16)


def test_unused_parameters_can_be_made_an_error() -> None:
    engine = new_engine(zero_optimization={"stage": 2, "ignore_unused_parameters": False})
    # DeepSpeed asserts it.
    with pytest.raises(AssertionError, match=r"3 trainable parameters got no gradient on any rank: lonely, sometimes"):
        one_step(engine)


def test_an_engine_without_optimizer_runs_forward_only() -> None:
    engine, optimizer, _, scheduler = initialize(model=AwkwardMLP(), config=config(optimizer=None))
    assert optimizer is None and scheduler is None and engine.get_global_grad_norm() is None
    (batch,) = mlp_batches(1, ROWS)
    loss = engine(**batch)
    with pytest.raises(RuntimeError, match=r"engine.backward\(\) needs an optimizer"):
        engine.backward(loss)


def test_the_engine_is_the_model_to_those_who_look_through_it() -> None:
    model = AwkwardMLP()
    engine = new_engine(model)
    assert engine.head is model.head and engine.module is model
    assert engine.train() is engine and model.training
    assert engine.eval() is engine and not model.training and not engine.training
    assert {name for name, _ in engine.named_parameters()} == {f"module.{n}" for n, _ in model.named_parameters()}
    assert all(a is b for a, b in zip(engine.parameters(), model.parameters(), strict=True))
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        engine.nothing_of_the_kind  # noqa: B018
    assert engine.config["zero_optimization"] == {"stage": 2}


def test_groups_and_schedulers_see_the_base_optimizers_own_objects() -> None:
    model = AwkwardMLP()
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(base, step_size=1, gamma=0.5)
    engine, optimizer, _, returned = initialize(
        model=model, optimizer=base, lr_scheduler=scheduler, config=config(optimizer=None)
    )
    assert returned is scheduler and optimizer.param_groups is base.param_groups and engine.basic_optimizer is base
    one_step(engine)
    assert engine.get_lr() == [0.05]
    outside = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert outside.get_last_lr() == [pytest.approx(0.01)]


def test_a_scheduler_factory_gets_the_torch_optimizer() -> None:
    seen = []

    def factory(optimizer: torch.optim.Optimizer) -> Any:
        seen.append(optimizer)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)

    engine, _, _, scheduler = initialize(model=AwkwardMLP(), lr_scheduler=factory, config=config())
    assert seen == [engine.basic_optimizer] and engine.lr_scheduler is scheduler


def test_a_scheduler_class_is_a_factory() -> None:
    """A class has a `step` attribute, so it was mistaken for a scheduler and failed at the first update."""

    class Halving(torch.optim.lr_scheduler.StepLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer, step_size=1, gamma=0.5)

    engine, _, _, scheduler = initialize(model=AwkwardMLP(), lr_scheduler=Halving, config=config())
    one_step(engine)
    assert isinstance(scheduler, Halving) and engine.get_lr() == [0.005]


def test_a_step_hands_arguments_to_the_schedule() -> None:
    """Megatron-DeepSpeed calls `step(lr_kwargs={"increment": samples})`, and metric-based schedulers need the metric.
    Both failed with "unexpected keyword argument"."""
    model = AwkwardMLP()
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(base, patience=0, factor=0.5)
    engine = initialize(model=model, optimizer=base, lr_scheduler=schedule, config=config(optimizer=None))[0]
    rates = []
    for metric in (1.0, 2.0, 3.0):
        (batch,) = mlp_batches(1, ROWS)
        engine.backward(engine(**batch))
        engine.step(lr_kwargs={"metrics": metric})
        rates += engine.get_lr()
    assert rates == [1.0, 0.5, 0.25]


def test_an_optimizer_factory_gets_the_groups_that_were_given() -> None:
    """The factory got all parameters in one list, so every group silently trained at the same rate."""
    model = AwkwardMLP()
    groups = [{"params": model.head.parameters(), "lr": 0.0}, {"params": [model.scale], "lr": 0.5}]
    engine = initialize(
        model=model,
        model_parameters=groups,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        config=config(optimizer=None),
    )[0]
    before = weights_of(engine)
    one_step(engine)
    assert engine.get_lr() == [0.0, 0.5]
    assert torch.equal(before["head.weight"], weights_of(engine)["head.weight"])
    assert not torch.equal(before["scale"], weights_of(engine)["scale"])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_group_that_is_added_later_is_refused(stage: int) -> None:
    """Unfreezing by `optimizer.add_param_group(...)` was accepted, but the added parameters were never updated."""
    engine = new_engine(zero_optimization={"stage": stage})
    with pytest.raises(RuntimeError, match="no update would reach these parameters, because buckets and shards"):
        engine.optimizer.add_param_group({"params": list(engine.module.frozen.parameters())})
    assert len(engine.optimizer.param_groups) == 1


def test_an_optimizer_factory_and_training_data() -> None:
    data = [(torch.randn(3), index) for index in range(10)]
    engine, optimizer, loader, _ = initialize(
        model=AwkwardMLP(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        training_data=data,
        config=config(optimizer=None, dataloader_drop_last=True),
    )
    assert type(optimizer.optimizer) is torch.optim.SGD
    assert [len(labels) for _, labels in loader] == [4, 4]
    assert [len(labels) for _, labels in engine.deepspeed_io(data)] == [4, 4]


def test_used_optimizers_twice_listed_parameters_and_frozen_models_are_refused() -> None:
    model = AwkwardMLP()
    used = torch.optim.AdamW(model.parameters())
    (batch,) = mlp_batches(1, ROWS)
    model(**batch).backward()
    used.step()
    with pytest.raises(RuntimeError, match="AdamW has already stepped"):
        initialize(model=model, optimizer=used, config=config(optimizer=None))
    twice = [{"params": [model.scale]}, {"params": [model.scale]}]
    with pytest.raises(ConfigError, match="appear in more than one parameter group"):
        initialize(model=model, model_parameters=twice, config=config())
    with pytest.raises(ValueError, match="no trainable parameter"):
        initialize(model=AwkwardMLP().requires_grad_(False), config=config())


def test_arguments_are_checked_before_anything_happens() -> None:
    with pytest.raises(ValueError, match="needs model=") as caught:
        initialize(config=config())
    assert isinstance(caught.value, AssertionError), "as DeepSpeed has it"
    with pytest.raises(ConfigError, match="no config was given"):
        initialize(model=AwkwardMLP())
    with pytest.raises(NotImplementedError, match="object has neither get_sequence_parallel_group"):
        initialize(model=AwkwardMLP(), config=config(), mpu=object())
    with pytest.raises(ConfigError, match=r'"SGDD"|SGDD'):
        initialize(model=AwkwardMLP(), config=config(optimizer={"type": "SGDD", "params": {}}))
    with pytest.raises(ConfigError, match="momentumm"):
        initialize(model=AwkwardMLP(), config=config(optimizer={"type": "SGD", "params": {"lr": 1.0, "momentumm": 1}}))


def test_a_folder_without_a_checkpoint_loads_nothing(tmp_path: Any) -> None:
    engine = new_engine()
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", None, 3])
def test_a_checkpoint_needs_a_folder_with_a_name(folder: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_checkpoint("")` wrote into the working directory; `save_checkpoint(None)` raised a TypeError of pathlib."""
    monkeypatch.chdir(tmp_path)
    engine = new_engine(zero_optimization={"stage": 1})
    with pytest.raises(AssertionError, match=r"save_checkpoint\(save_dir=.*\): give a folder"):
        engine.save_checkpoint(folder)
    with pytest.raises(ValueError, match=r"load_checkpoint\(load_dir=.*\): give a folder"):
        engine.load_checkpoint(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adafactor_alone_on_its_rank_is_saved_whatever_the_stage(stage: int, tmp_path: Any) -> None:
    """One rank trained with Adafactor at stages 2 and 3, but its first save failed, after the training was done."""

    def build() -> ZeroEngine:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
        return initialize(model=model, optimizer=optimizer, config=config)[0]

    def update(engine: ZeroEngine) -> None:
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()

    engine = build()
    for _ in range(2):
        update(engine)
    engine.save_checkpoint(tmp_path)
    update(engine)
    resumed = build()
    assert resumed.load_checkpoint(tmp_path)[0] is not None
    update(resumed)
    for ours, theirs in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_batch_sizes_can_change_while_running() -> None:
    engine = new_engine()
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 4
    engine.set_train_micro_batch_size(2)
    assert engine.train_batch_size() == 8
    with pytest.raises(ValueError, match=r"train_batch_size=7 is not a positive multiple of micro batch 2 x world"):
        engine.set_train_batch_size(7)


def test_every_update_after_a_change_of_the_batch_size_is_whole() -> None:
    """A user raised the batch size after each epoch (set_train_batch_size). The engine, like DeepSpeed, took the number
    of all micro-batches modulo the new number of accumulation steps, so the next update had too few."""
    numbers = [3, 2, 4, 1, 2]
    engine = beside_plain.engine_of(plain_sgd, 2, 1, gradient_accumulation_steps=numbers[0])
    model = beside_plain.Layers()
    optimizer, micro_batch = plain_sgd(model), 0
    for number in numbers:
        engine.set_train_batch_size(number * beside_plain.ROWS)
        optimizer.zero_grad()
        for position in range(number):
            x = beside_plain.batch(micro_batch)
            assert engine.is_gradient_accumulation_boundary() == (position == number - 1)
            engine.backward(engine(x))
            with pytest.raises(WrongMoment, match="after the step"):
                engine.set_train_batch_size((number + 1) * beside_plain.ROWS)
            engine.step()
            (model(x) / number).backward()
            micro_batch += 1
        optimizer.step()
        beside_plain.assert_same(beside_plain.weights_of(engine), beside_plain.plain_weights(model), what=str(number))
    assert engine.global_steps == len(numbers) and engine.micro_steps == sum(numbers)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)


def test_destroy_frees_the_engine_and_leaves_a_model_that_can_be_initialised_again() -> None:
    model = AwkwardMLP()
    engine = new_engine(model)
    one_step(engine)
    engine.destroy()
    engine.destroy()
    assert engine.optimizer is None
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    again = new_engine(model)
    first = one_step(again)
    assert one_step(again) < first


def test_a_deep_copy_of_a_live_model_trains_on_its_own() -> None:
    engine = new_engine()
    copied = copy.deepcopy(engine.module)
    before = {name: value.clone() for name, value in copied.state_dict().items()}
    one_step(engine)
    assert all(torch.equal(value, before[name]) for name, value in copied.state_dict().items())


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_is_trained_can_be_pickled(stage: int) -> None:
    """`torch.save(model)` was: cannot pickle 'weakref.ReferenceType' object."""
    engine = new_engine(zero_optimization={"stage": stage})
    one_step(engine)
    file = io.BytesIO()
    torch.save(engine.module, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    saved = loaded.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in engine.module.state_dict().items())
    assert safe_get_full_fp32_param(loaded.head.weight) is None
    one_step(new_engine(loaded))


@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_and_its_optimizer_are_not_copied(stage: int) -> None:
    """torch's class put another `step` into ours while it was copied, and no engine of the process could step again."""
    engine = new_engine(zero_optimization={"stage": stage})
    for thing, words in ((engine.optimizer, r"save_checkpoint\(\)"), (engine, r"copy its model, engine\.module")):
        for how in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match=words):
                how(thing)
    one_step(engine)
    one_step(new_engine(zero_optimization={"stage": stage}))


def run_asserted(rank: int, folder: str) -> list[str]:
    engine, found = new_engine(zero_optimization={"stage": 1}, checkpoint={"tag_validation": "Fail"}), []
    (batch,) = mlp_batches(1, ROWS)
    engine.backward(engine(**batch))
    for call in (lambda: engine.step(), lambda: engine.save_checkpoint(folder, tag=f"of-{rank}")):
        with pytest.raises(AssertionError) as caught, engine.no_sync():
            call()
        found.append(str(caught.value).partition(":")[0])
    return found


def test_what_deepspeed_asserts_can_be_caught_as_assertions(tmp_path: Any) -> None:
    """Callers expect an AssertionError for a step inside no_sync, for different tags, and for a missing model. hf_zero
    raised RuntimeError and ValueError; the errors are now both.
    """
    words = ["step() inside no_sync()", "save_checkpoint(tag=...)"]
    assert run_ranks(run_asserted, 2, str(tmp_path)) == [words, words]


def run_different_models(rank: int) -> None:
    init_distributed()
    model = nn.Linear(3, 2 + rank)
    initialize(model=model, config=config())


def test_ranks_with_different_models_are_told_so_instead_of_hanging() -> None:
    with pytest.raises(AssertionError, match=r"different trainable parameters[\s\S]*\('weight', 6, 0, 'float32'\)"):
        run_ranks(run_different_models, 2)


def run_rank_0_wins(rank: int, stage: int) -> dict[str, list[float]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    for dtype in (torch.int16, torch.int64, torch.float8_e4m3fn, torch.uint16, torch.complex64):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.empty(3, 2).to(dtype).t())
    model.register_buffer("number", torch.tensor(0, dtype=torch.int16))
    model.register_buffer("unsaved", torch.empty(3), persistent=False)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1 + rank)
    initialize(model=model, config=config(zero_optimization={"stage": stage}))
    with GatheredParameters(list(model.parameters())):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: value.detach().to(torch.complex64).real.flatten().tolist() for name, value in tensors.items()}


def test_rank_0s_weights_frozen_weights_and_buffers_are_everybodys() -> None:
    """A buffer in int16 or float8, which neither gloo nor NCCL supports, failed initialize(): "Invalid scalar type". At
    stage 3 each rank kept its own buffers: two ranks then computed two different models."""
    for ranks in run_each(run_rank_0_wins, 2, [(2,), (3,)]):
        for found in ranks:
            assert len(found) == 16 and all(set(values) == {1.0} for values in found.values()), found


def run_accumulation_dtype(rank: int, stage: int, dtype: str) -> torch.Tensor:
    """Weights after one SGD step over 64 micro-batches whose gradients are all 1/512, except the first, which is 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = config(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=64,
        gradient_clipping=0.0,
        bf16={"enabled": True},
        zero_optimization={"stage": stage},
        data_types={"grad_accum_dtype": dtype},
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
    )
    engine = initialize(model=model, config=settings)[0]
    for step in range(64):
        x = torch.tensor([[1.0 if step == 0 else 1 / 512]], dtype=torch.bfloat16)
        engine.backward(engine(x).sum(), scale_wrt_gas=False)
        engine.step()
    assert engine.optimizer is not None
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    return torch.stack([master.detach().sum() for master in masters]).sum()


def test_accumulation_in_fp32_keeps_what_bf16_rounds_away() -> None:
    """The sum is 1 + 63/512; bf16 accumulation loses every single 1/512."""
    # The sum is communicated in bf16, which keeps eight bits.
    expected = {"fp32": pytest.approx(-(1 + 63 / 512), rel=2**-8), "bf16": -1.0}
    cases = [(stage, dtype) for stage in (0, 1, 2) for dtype in expected]
    for (stage, dtype), parts in zip(cases, run_each(run_accumulation_dtype, 2, cases), strict=True):
        copies = 2 if stage == 0 else 1  # at stage 0 both ranks hold the whole master
        assert float(sum(parts)) / copies == expected[dtype], (stage, dtype)


def test_parameters_that_are_unfrozen_later_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A user unfroze the encoder after two epochs. Its gradients were computed, but the parameters were silently never
    updated; in plain PyTorch they train if they are in the optimizer from the start."""
    model = AwkwardMLP()
    model.head.requires_grad_(False)
    engine = new_engine(model)
    one_step(engine)
    assert "frozen" not in caplog.text
    model.head.requires_grad_(True)
    before = weights_of(engine)["head.weight"]
    for _ in range(2):
        one_step(engine)
    assert torch.equal(before, weights_of(engine)["head.weight"])
    assert caplog.text.count("were frozen at initialize() require gradients now") == 1 and "head.weight" in caplog.text


def test_an_optimizer_of_another_model_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer was created before the model was copied, so the copy was silently not trained."""
    stale = torch.optim.AdamW(AwkwardMLP().parameters(), lr=1e-2)
    initialize(model=AwkwardMLP(), optimizer=stale, config={"train_micro_batch_size_per_gpu": ROWS})
    assert "has none of the model's parameters" in caplog.text
    prompt, frozen = nn.Parameter(torch.ones(3)), AwkwardMLP().requires_grad_(False)
    caplog.clear()
    initialize(model=frozen, optimizer=torch.optim.SGD([prompt], lr=1), config={"train_micro_batch_size_per_gpu": ROWS})
    assert "has none" not in caplog.text


def test_parameters_offloaded_below_stage_3_stop_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """accelerate's questionnaire offers `offload_param` from stage 2 on, but a run with it raised an error."""
    logging.getLogger("hf_zero").propagate = True
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        engine = new_engine(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})
    assert "zero_optimization.offload_param: no effect at stage 2" in caplog.text
    assert engine.zero_offload_param().device == "cpu" and engine.settings.resolved.zero.offload_param is None
