"""The Triton form of every kernel: in Triton's interpreter here, or on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import MIXTURES, NARROW, UPDATES, Form
from tests.support.requirements import requires

pytestmark = [requires(modules=("triton",)), pytest.mark.lengthy]

HAS_GPU = torch.cuda.is_available()
FORM = Form(device="cuda") if HAS_GPU else Form(interpreted=True, truncates=True)
SIZES = [1, 1024 + 17, pytest.param(3 * 1024 + 17, marks=pytest.mark.slow)]  # a program has 1024 elements
# A row that ends with a program and one that does not, whole rows and parts of them, each in one of the two widths.
SLOW = [(1, 8, 4), (2, 1000, 8), (2, 127, 4), (1, 4096 + 256, 8)]


def device_scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, device=FORM.device)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", UPDATES)
def test_updates(name: str, numel: int) -> None:
    for types in MIXTURES if numel > 1 else MIXTURES[:1]:  # larger vectors cover the dtypes of one element
        cases.check_update(name, numel, types, 0.125, FORM)
    cases.check_update(name, numel, MIXTURES[0], device_scalar(0.5), FORM)


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test_16_bit_masters(name: str, states: torch.dtype) -> None:
    for numel in (1, 1041):
        cases.check_narrow(name, numel, states, FORM)


@pytest.mark.parametrize("name", UPDATES)
def test_skip_flag(name: str) -> None:
    cases.check_skip_flag(name, FORM)


@pytest.mark.parametrize("name", ["lion"])
def test_stochastic_rounding(name: str) -> None:
    cases.check_stochastic_rounding(name, FORM)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    cases.check_sum_of_squares(numel, dtype, FORM)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("numel", [8, 1000, 4096 + 24])
def test_signs(numel: int, dtype: torch.dtype) -> None:
    cases.check_signs(numel, dtype, FORM)


def test_signs_with_padding() -> None:
    cases.check_signs_with_padding(FORM)


def test_elements_without_variance() -> None:
    cases.check_elements_without_variance(FORM)


@pytest.mark.parametrize(
    ("rows", "numel", "bits"),
    [
        *[(1, 8, 8), (2, 1000, 4), (2, 127, 8), (1, 4096 + 256, 4)],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_messages(rows: int, numel: int, bits: int) -> None:
    for dtype in cases.DTYPES:
        cases.check_messages(rows, numel, bits, dtype, FORM)
    cases.check_feedback(rows, numel, bits, torch.float32, FORM)
