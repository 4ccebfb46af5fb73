"""A released parameter reads as NaN where Python cannot intercept it; the first NaN loss names the parameter.

An EMA callback that read parameters at stage 3 silently collected NaN for a whole training. Reads that Python sees have
raised since then (`test_outside_forward.py`); these tests are about the others.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.params.partitioning import shard_parameter
from hf_zero.params.sharded_parameter import ShardedParameter
from hf_zero.params.stand_ins import FirstNan, StandIns, signature, signature_of, signed_nan
from tests.api.test_outside_forward import BOTH, engine_of
from tests.support.groups import groups_of
from tests.support.limits import NOTHING_STAYS
from tests.support.messages import heard
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1, 61, 62, 63, 1000, 2**22])
def test_a_nan_with_a_number_is_one_and_is_known_again(dtype: torch.dtype, number: int) -> None:
    nan = signed_nan(number, dtype, CPU)
    assert nan.isnan() and nan.dtype == dtype and nan.ndim == 0
    known = signature(number, dtype)
    assert known > 0
    assert signature_of(nan.item()) == known
    wider = torch.promote_types(dtype, torch.float32)
    assert signature_of(nan.expand(64).to(wider)[5].item()) == known


def test_a_number_survives_what_a_loss_is_made_with() -> None:
    nan = signed_nan(17, torch.float32, CPU)
    weights = torch.randn(40, 40)
    made = {
        "product": (nan.expand(40, 40) * weights).mean(),
        "sum": weights.sum() + 0.1 * nan,
        "square": nan.expand(300).pow(2).sum(),
    }
    assert {name: signature_of(value.item()) for name, value in made.items()} == dict.fromkeys(
        made, signature(17, torch.float32)
    )


def test_plain_nans_and_numbers_say_nothing() -> None:
    assert signature_of(float("nan")) == signature_of(math.inf) == signature_of(1.5) == 0
    assert signature_of((torch.zeros(()) / 0).item()) == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2], ids=str)
def test_where_there_is_no_room_it_is_a_plain_nan(dtype: torch.dtype) -> None:
    nan = signed_nan(3, dtype, CPU)
    assert nan.to(torch.complex64).isnan() and signature(3, dtype) == 0


def unseen(parameter: Tensor) -> Tensor:
    """Reads as a C++ extension does."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().as_subclass(Tensor).clone()


def warnings_of(engine: Any, loss_of: Any) -> list[str]:
    with heard(level=logging.WARNING) as found:
        for _ in range(2):
            engine.backward(loss_of(engine))
    return found


def _spoilt_losses(rank: int, limits: dict[str, int]) -> None:
    torch.manual_seed(rank)
    x = torch.randn(2, 5)

    def penalised(engine: Any) -> Tensor:
        penalty = unseen(engine.module.first.weight).square().mean()
        return engine(x).square().mean() + 0.01 * penalty

    (said,) = warnings_of(engine_of(limits), penalised)
    assert "backward 1; said once" in said and "comes from 'first.weight':" in said and "GatheredParameters" in said

    def plainly_nan(engine: Any) -> Tensor:
        return engine(x).square().mean() * (torch.zeros(()) / 0)

    (said,) = warnings_of(engine_of(limits), plainly_nan)
    assert "the loss is NaN (backward 1; said once). If it" in said
    assert warnings_of(engine_of(limits), lambda engine: engine(x).mean()) == []


@pytest.mark.at_once
@pytest.mark.parametrize("limits", BOTH, ids=["zero", "defaults"])
def test_the_first_loss_that_is_nan_is_reported_with_the_parameter_that_was_read(limits: dict[str, int]) -> None:
    run_ranks(_spoilt_losses, 2, limits)


def _evaluated(rank: int) -> None:
    engine = engine_of(NOTHING_STAYS)
    spoilt = torch.tensor(engine.module.first.bias)[:5].expand(2, 5)  # by torch.tensor, which Python code does not see
    with heard(level=logging.WARNING) as found, torch.no_grad():
        engine.module.forward = lambda x: {"loss": x.mean()}["loss"]
        engine(spoilt)
    assert len(found) == 1 and "evaluation after step 0" in found[0] and "'first.bias'" in found[0]


@pytest.mark.at_once
def test_so_is_that_of_an_evaluation() -> None:
    run_ranks(_evaluated, 2)


def test_below_stage_3_a_nan_is_the_users_own() -> None:
    run_ranks(_below_stage_3, 1)


def _below_stage_3(rank: int) -> None:
    engine = engine_of({}, stage=2)
    assert warnings_of(engine, lambda e: e(torch.full((2, 5), math.nan)).mean()) == []


def test_where_the_host_runs_ahead_a_loss_is_looked_at_two_later() -> None:
    """Checking the loss at once would make the host wait for the device."""

    handle = released("layer")
    watch = FirstNan(StandIns([handle]), torch.device("cuda"))
    counts = []
    with heard(level=logging.WARNING) as found:
        for number in range(4):
            watch.look(handle.mark if number == 1 else torch.ones(()), f"backward {number}")
            counts.append(len(found))
    assert counts == [0, 0, 0, 1] and "backward 1;" in found[0] and "'layer'" in found[0]


def released(name: str, dtype: torch.dtype = torch.float32) -> ShardedParameter:
    handle = shard_parameter(nn.Parameter(torch.ones(2, 3, dtype=dtype)), groups_of())
    handle.name = name
    return handle


def fill(handle: ShardedParameter, value: float) -> None:
    """Writes as C++ code does."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        handle.parameter.fill_(value)


def test_stand_ins_that_were_filled_are_counted_and_named() -> None:
    handles = [released("a"), released("b", torch.bfloat16), released("c")]
    stand_ins = StandIns(handles)
    assert stand_ins.num_overwritten() == 0
    stand_ins.refuse_overwritten()
    fill(handles[1], 0.0)
    fill(handles[2], 7.0)
    assert stand_ins.num_overwritten() == 2
    with pytest.raises(RuntimeError, match="2 parameters were overwritten while .*: b, c. Write"):
        stand_ins.refuse_overwritten()
    assert StandIns(()).num_overwritten() == 0


def test_a_nan_is_traced_to_the_stand_ins_that_have_its_number() -> None:
    handles = [released("a"), released("b"), released("c", torch.float64)]
    stand_ins = StandIns(handles)
    for handle in handles:
        assert stand_ins.sources_of(float(handle.mark * 2 + 1)) == [repr(handle.name)]
    assert stand_ins.sources_of(math.nan) == stand_ins.sources_of(1.0) == []
