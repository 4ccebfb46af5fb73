"""fp16 in the engine: scripted overflows, and training that follows fp32."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.api.parameter_access import safe_get_full_fp32_param
from hf_zero.config import Views, examine
from tests.step.training import ROWS, adamw, assert_same, config, reference, train
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_each, run_ranks
from tests.support.reference import Trace

STEPS, CLIP = 6, 0.5
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


class Line(nn.Module):
    """One matrix; the loss is linear in it, so the gradient equals the input. A bad input makes it infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(x))
        return hidden.float().mean()


def fp16(**options: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2, **options}}


def run_script(rank: int, world: int, stage: int, script: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The state after each update of the script; x: only rank 0 gets an infinite input."""
    torch.manual_seed(0)
    settings = config(stage, world, **fp16(**options))
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    settings["scheduler"] = {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 1}}
    model = Line()
    engine, optimizer, _, _ = initialize(model=model, config=settings)
    seen = []
    for letter in script:
        before = [shard.master.clone() for shard in optimizer.sub_groups]
        x = torch.ones(2, 6, dtype=torch.float16)
        if letter == "x" and rank == 0:
            x[0, 0] = float("inf")
        loss = engine(x)
        assert engine.backward(loss) is loss
        engine.step()
        changed = any(
            not torch.equal(old, shard.master) for old, shard in zip(before, optimizer.sub_groups, strict=True)
        )
        seen.append(
            {
                "scale": engine.loss_scale(),
                "skipped": engine.skipped_steps,
                "steps": engine.global_steps,
                "lr": round(engine.get_lr()[0], 9),
                "changed": changed,
                "overflow": optimizer.overflow,
                "norm": engine.get_global_grad_norm(),
            }
        )
    assert engine.dynamic_loss_scale() and optimizer.cur_scale == optimizer.loss_scale == engine.loss_scale()
    return seen


@pytest.mark.parametrize(("world", "stages"), [(1, [0]), (2, [0, 1, 3]), (3, [2])])
def test_scripted_overflows(world: int, stages: list[int]) -> None:
    """With hysteresis 2 the first overflow keeps the scale, the second halves it, and three clean updates double it.

    The norm of an overflow was NaN if infinities of both signs met: a script compared the result of
    accelerator.clip_grad_norm_ with a limit, and no comparison was true.
    """
    for by_rank in run_each(run_script, world, [(world, stage, "x.x....", {}) for stage in stages]):
        check_overflows(by_rank)


def check_overflows(by_rank: list[list[dict[str, Any]]]) -> None:
    # Any rank may change: the last one may own only padding.
    changed = [any(steps) for steps in zip(*([step["changed"] for step in seen] for seen in by_rank), strict=True)]
    assert changed == [False, True, False, True, True, True, True]
    for seen in by_rank:
        assert [step["scale"] for step in seen] == [16, 16, 8, 8, 8, 16, 16]
        assert [step["skipped"] for step in seen] == [1, 1, 2, 2, 2, 2, 2]
        assert [step["steps"] for step in seen] == [1, 2, 3, 4, 5, 6, 7]
        overflows = [True, False, True, False, False, False, False]
        assert [step["overflow"] for step in seen] == overflows
        assert [step["norm"] == math.inf for step in seen] == overflows
        assert all(math.isfinite(step["norm"]) for step in seen if not step["overflow"])
        # The schedule advances with applied updates only: 1e-3 * (1 + t).
        assert [step["lr"] for step in seen] == [0.001, 0.002, 0.002, 0.003, 0.004, 0.005, 0.006]


def run_until_it_ends(rank: int, world: int, stage: int) -> str:
    try:
        run_script(rank, world, stage, "xxxx", {"hysteresis": 1, "initial_scale_power": 1})
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the scale cannot fall below its minimum")


def test_at_the_minimum_every_rank_names_the_parameters() -> None:
    """DeepSpeed ends the run with an error that names no parameter, and at stage 0 skips steps forever."""
    for message in itertools.chain(*run_each(run_until_it_ends, 2, [(2, stage) for stage in (0, 2, 3)])):
        assert "the loss scale is at its minimum (1)" in message and "bf16" in message
        assert "first.weight" in message and "second.weight" in message


def run_engine(rank: int, world: int, stage: int, sections: dict[str, Any]) -> Trace:
    model = AwkwardMLP()
    settings = config(stage, world, gradient_clipping=CLIP, **sections)
    engine, _, _, _ = initialize(model=model, optimizer=adamw(model), config=settings)
    return train(engine, rank, world, mlp_batches(STEPS, ROWS))


@pytest.mark.parametrize(
    ("sections", "tolerance"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 64}}, 1e-2),
        ({"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1}}, 1e-2),
        ({"prescale_gradients": True}, 1e-5),
        ({"gradient_predivide_factor": 4.0}, 1e-5),
    ],
    ids=str,
)
def test_scaled_losses_and_gradients_train_as_plain_pytorch(sections: dict[str, Any], tolerance: float) -> None:
    """Also in steps where the scale doubles: DeepSpeed divides those gradients by the new scale, halving them."""
    expected = reference(2, 1, CLIP, STEPS)
    for stage, traces in enumerate(run_each(run_engine, 2, [(2, stage, sections) for stage in (0, 1, 2, 3)])):
        assert_same(traces, expected, tolerance, f"stage {stage}")


def run_sum(rank: int, world: int, stages: list[dict[str, Any]]) -> list[tuple[float, list[torch.Tensor]]]:
    found = []
    for zero in stages:
        torch.manual_seed(0)
        settings = {**config(int(zero["stage"]), world, gradient_allreduce_op="sum"), "zero_optimization": zero}
        settings |= {"gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        model = Line()
        engine = initialize(model=model, config=settings)[0]
        for step in range(2):
            engine.backward(engine(torch.arange(12.0).view(2, 6) + rank + step))
            engine.step()
        found.append((float(engine.get_global_grad_norm()), [safe_get_full_fp32_param(p) for p in model.parameters()]))
    return found


def test_the_sum_of_gradients_is_the_sum_at_every_stage() -> None:
    """`gradient_allreduce_op: "sum"` at stage 3: a warning said that it had no effect there, but the gradients were
    summed anyway, so that users who believed the warning trained with a wrong learning rate."""
    torch.manual_seed(0)
    model = Line()
    for step in range(2):
        loss = sum(model(torch.arange(12.0).view(2, 6) + rank + step) for rank in range(2))
        assert isinstance(loss, torch.Tensor)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    stages: list[dict[str, Any]] = [{"stage": 0}, {"stage": 2}, {"stage": 3}]
    stages += [{"stage": 3, "mics_shard_size": 1}, {"stage": 3, "zero_quantized_gradients": True}]
    for found, zero in zip(run_ranks(run_sum, 2, 2, stages)[0], stages, strict=True):
        tolerance = 2e-2 if "zero_quantized_gradients" in zero else 1e-5
        assert found[0] == pytest.approx(norm, rel=tolerance), zero
        for ours, theirs in zip(found[1], model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)
    findings = examine({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, Views(world_size=1))
    assert not [remark for remark in findings.remarks if remark.path == "gradient_allreduce_op"]


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, True), (3, False)])
def test_a_streak_of_overflows_recovers_also_across_a_resume(stage: int, offload: bool, tmp_path: Path) -> None:
    """An initial scale that is far too high skips updates until it fits. From then on the training equals plain
    PyTorch's without those batches, whether or not it is resumed from a checkpoint in between."""
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    settings = {
        **config(stage, 1, **fp16(initial_scale_power=26, loss_scale_window=1000)),
        **{"zero_optimization": zero, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 1.0},
    }

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss_of(module: Any, number: int) -> torch.Tensor:
        x, y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(number)).split(1)
        return (module(x[0].to(next(module.parameters()).dtype)).float() - y[0, :, :2]).pow(2).mean()

    engine = initialize(model=model(), config=settings)[0]
    skipped: list[bool] = []
    for number in range(20):
        if number == 4:
            engine.save_checkpoint(str(tmp_path))
            engine.destroy()
            engine = initialize(model=model(), config=settings)[0]
            engine.load_checkpoint(str(tmp_path))
        before = engine.skipped_steps
        engine.backward(loss_of(engine, number))
        engine.step()
        skipped.append(engine.skipped_steps > before)
        assert (engine.get_global_grad_norm() == math.inf) == skipped[-1]
    assert all(skipped[:7]) and sum(skipped) < 16
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in (number for number in range(20) if not skipped[number]):
        optimizer.zero_grad()
        loss_of(plain, number).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(ours), theirs.detach(), rtol=1e-2, atol=1e-3)


def test_a_backward_of_ones_own_needs_the_scale() -> None:
    engine, optimizer, _, _ = initialize(model=Line(), config={**config(1, 1, **fp16()), "optimizer": ADAM})
    engine(torch.ones(2, 6, dtype=torch.float16)).backward()
    with pytest.raises(RuntimeError, match=r"engine.scale\(loss\).backward\(\); a plain loss.backward\(\) makes"):
        engine.step()
    engine.zero_grad()
    engine.scale(engine(torch.ones(2, 6, dtype=torch.float16))).backward()
    engine.step()
    scaled = optimizer.grad_norm
    engine.backward(engine(torch.ones(2, 6, dtype=torch.float16)))
    engine.step()
    assert scaled is not None and scaled == pytest.approx(optimizer.grad_norm, rel=0.2)


def test_the_log_names_both_scales(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hf_zero"):
        run_script(0, 1, 1, "xx.", {})
    assert [line for line in caplog.messages if "skipped" in line] == [
        "step 1 skipped on all ranks: overflow at loss scale 16, which stays",
        "step 2 skipped on all ranks: overflow at loss scale 16, now 8",
    ]


def run_saved(rank: int, world: int, stage: int, folder: str) -> tuple[list[float], list[float]]:
    """The scales of an uninterrupted run, and of one that is resumed from a checkpoint in the middle, with the same
    weights."""
    settings = {**config(stage, world, **fp16()), "optimizer": ADAM}

    def go_on(engine: Any, script: str) -> list[float]:
        scales = []
        for letter in script:
            x = torch.ones(2, 6, dtype=torch.float16)
            x[0, 0] = float("inf") if letter == "x" else 1.0
            engine.backward(engine(x))
            engine.step()
            scales.append(engine.loss_scale())
        return scales

    engine = initialize(model=Line(), config=settings)[0]
    go_on(engine, "x.x")
    engine.save_checkpoint(folder)
    unbroken = go_on(engine, "..x..")
    fresh = initialize(model=Line(), config=settings)[0]
    assert fresh.load_checkpoint(folder)[0] is not None
    assert fresh.loss_scale() == 8.0 and fresh.skipped_steps == 2
    resumed, expected = go_on(fresh, "..x.."), engine.module_state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in fresh.module_state_dict().items())
    return unbroken, resumed


def test_the_scaler_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    cases = [(2, stage, str(tmp_path / str(stage))) for stage in (0, 2)]
    for unbroken, resumed in itertools.chain(*run_each(run_saved, 2, cases)):
        assert resumed == unbroken == [8.0, 8.0, 4.0, 4.0, 4.0]


class Nested(nn.Module):
    """Reports the dtypes that reach forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, extra: Any, keyword: torch.Tensor | None = None) -> dict[str, Any]:
        seen = [x.dtype, extra[0].dtype, extra[1]["inner"].dtype, extra[1]["whole"].dtype]
        return {
            "seen": [*seen, None if keyword is None else keyword.dtype],
            "out": self.linear(x.to(self.linear.weight.dtype)),
        }


def cast(sections: dict[str, Any]) -> tuple[list[Any], torch.dtype]:
    engine, _, _, _ = initialize(model=Nested(), config={**config(1, 1, **sections), "optimizer": ADAM})
    inner = {"inner": torch.ones(2), "whole": torch.ones(2, dtype=torch.long)}
    answer = engine(torch.ones(1, 2), [torch.ones(2), inner], keyword=torch.ones(1))
    return answer["seen"], answer["out"].dtype


def test_auto_cast_reaches_positional_inputs() -> None:
    seen, unasked = cast(fp16(auto_cast=True))[0], cast(fp16())[0]
    assert seen == [torch.float16, torch.float16, torch.float16, torch.long, torch.float32]
    assert unasked[0] == torch.float32


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, torch.bfloat16),
        ({"torch_autocast": {"enabled": True}}, torch.bfloat16),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, torch.float16),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, torch.float32),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, torch.float16),
        ({"amp": {"enabled": True, "opt_level": "O0"}}, torch.float32),
    ],
)
def test_forward_under_autocast(sections: dict[str, Any], dtype: torch.dtype) -> None:
    assert cast(sections)[1] == dtype


def run_amp(rank: int, world: int) -> tuple[float, bool]:
    engine, _, _, _ = initialize(model=Line(), config={**config(2, world, amp={"enabled": True}), "optimizer": ADAM})
    x = torch.ones(2, 6)
    engine.backward(engine(x))
    engine.step()
    x[0, 0] = float("nan")
    engine.backward(engine(x))
    engine.step()
    return engine.loss_scale(), engine.was_step_applied()


def test_amp_scales_the_loss_and_keeps_fp32_weights() -> None:
    assert run_ranks(run_amp, 2, 2) == [(32768.0, False)] * 2
