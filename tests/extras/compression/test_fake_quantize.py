"""Fake quantization compared with a value-by-value reference, worked vectors and torchao, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_zero.extras.compression.pruning import quantized, quantized_in_range
from hf_zero.extras.compression.schedule import straight_through

VALUES = [-1, -0.5, -0.1, 0, 0.2, 0.45, 0.9, 1]
SYMMETRIC_8 = [-1, -0.5, -0.1015625, 0, 0.203125, 0.453125, 0.8984375, 0.9921875]


def f32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def reference(values: list[float], bits: int, symmetric: bool) -> list[float]:
    """One group, line by line, every operation in fp32; Python's round is half to even."""
    if bits == 1:
        mean = f32(sum(torch.tensor([abs(v) for v in values]).tolist()) / len(values))
        return [math.copysign(mean, v) if v else 0.0 for v in values]
    if bits == 2 and symmetric:
        mean = float(torch.tensor(values).abs().mean())
        large = [abs(v) for v in values if abs(v) > f32(f32(0.7) * mean)]
        alpha = float(torch.tensor(large).sum() / len(large)) if large else 0.0
        return [math.copysign(alpha, v) if abs(v) > f32(f32(0.7) * mean) else 0.0 for v in values]
    found = []
    if symmetric:
        scale = f32(2 * max(abs(v) for v in values) / 2**bits)
        for v in values:
            code = min(max(round(f32(v / scale)), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1) if scale else 0
            found.append(f32(code * scale) if scale else v)
        return found
    low, high = min(values), max(values)
    scale = f32(f32(high - low) / 2**bits)
    for v in values:
        if not scale:
            found.append(v)
            continue
        zero = f32(round(f32(low / scale)) * scale)
        code = min(max(round(f32(f32(v - zero) / scale)), 0), 2**bits - 1)
        found.append(f32(f32(code * scale) + zero))
    return found


numbers = st.floats(-8, 8, width=32, allow_subnormal=False)


given_groups = given(
    groups=st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=4),
    bits=st.integers(1, 12),
    symmetric=st.booleans(),
)


@pytest.mark.lengthy
@settings(max_examples=250, deadline=None)
@given_groups
def test_equals_the_reference(groups: list[list[float]], bits: int, symmetric: bool) -> None:
    check_against_the_reference(groups, bits, symmetric)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given_groups
def test_equals_the_reference_often(groups: list[list[float]], bits: int, symmetric: bool) -> None:
    check_against_the_reference(groups, bits, symmetric)


def check_against_the_reference(groups: list[list[float]], bits: int, symmetric: bool) -> None:
    symmetric = symmetric or bits < 3
    found = quantized(torch.tensor(groups), bits, len(groups), symmetric=symmetric)
    expected = torch.tensor([reference(group, bits, symmetric) for group in groups])
    # Means are summed in another order; everything else is bitwise equal.
    torch.testing.assert_close(found, expected, rtol=1e-6 if bits < 3 else 0, atol=1e-6 if bits < 3 else 0)


def test_worked_values() -> None:
    values = torch.tensor(VALUES)
    torch.testing.assert_close(quantized(values, 8, 1), torch.tensor(SYMMETRIC_8))
    four = torch.tensor([-1, -0.5, -0.125, 0, 0.25, 0.5, 0.875, 0.875])
    torch.testing.assert_close(quantized(values, 4, 1), four)
    two = torch.tensor([-0.77, -0.77, 0, 0, 0, 0.77, 0.77, 0.77])
    torch.testing.assert_close(quantized(values, 2, 1), two)
    one = values.sign() * 0.51875
    torch.testing.assert_close(quantized(values, 1, 1), one)
    found = quantized(torch.tensor([0.3, 0.5, 0.9, 1.1]), 4, 1, symmetric=False)
    torch.testing.assert_close(found, torch.tensor([0.3, 0.5, 0.9, 1.05]))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_without_extent_stays(bits: int, symmetric: bool) -> None:
    """DeepSpeed's scale was 0 for a row of zeros, and its quantized weights NaN."""
    for value in (0.0, 0.25):
        same = torch.full((2, 4), value)
        found = quantized(same, bits, 2, symmetric=symmetric)
        assert found.isfinite().all()
        if value == 0 or (not symmetric and bits > 2):
            torch.testing.assert_close(found, same)


def test_gradients_pass_straight_through() -> None:
    values = torch.randn(3, 4, requires_grad=True)
    weights = torch.randn(3, 4)
    (straight_through(values, lambda w: quantized(w, 3, 1)) * weights).sum().backward()
    torch.testing.assert_close(values.grad, weights, rtol=0, atol=0)


def test_stochastic_rounding_is_right_on_average() -> None:
    values = torch.linspace(-1, 1, 257)
    torch.manual_seed(0)
    noise = (torch.rand(1, 257) - 0.5 for _ in range(400))
    mean = torch.stack([quantized(values, 4, 1, noise=one) for one in noise]).mean(0)
    inside = values <= 0.875
    torch.testing.assert_close(mean[inside], values[inside], rtol=0, atol=0.02)


def test_low_precision_keeps_its_dtype() -> None:
    values = torch.tensor(VALUES, dtype=torch.bfloat16)
    found = quantized(values, 8, 1)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), quantized(values.float(), 8, 1).bfloat16().float())


def test_a_given_range_cuts() -> None:
    values = torch.tensor([-3.0, -1.0, 0.5, 3.0])
    found = quantized_in_range(values, torch.tensor(-1.0), torch.tensor(1.0), 8, symmetric=True)
    torch.testing.assert_close(found, torch.tensor([-1.0, -1.0, 0.5, 127 / 128]))


@pytest.mark.parametrize("num_groups", [1, 4, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_equals_torchao(bits: int, num_groups: int) -> None:
    """Where both define it: torchao's affine primitive with our scale, symmetric, to nearest."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    torch.manual_seed(bits)
    weight = torch.randn(16, 32)
    groups = weight.view(num_groups, -1)
    scale: Tensor = 2 * groups.abs().amax(1) / 2**bits
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    block, zero = (1, groups.shape[1]), torch.zeros(num_groups, dtype=torch.int32)
    codes = primitives.quantize_affine(groups, block, scale, zero, torch.int8, low, high)
    theirs = primitives.dequantize_affine(codes, block, scale, zero, torch.int8, low, high)
    torch.testing.assert_close(quantized(weight, bits, num_groups), theirs.view(16, 32))
