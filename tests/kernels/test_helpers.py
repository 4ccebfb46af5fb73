"""Shared parts of kernels: numbers on a device, rounding, and the choice between forms."""

from __future__ import annotations

import torch

from hf_zero.kernels.gpu.devices import on_device, runs_on_gpu
from hf_zero.kernels.vectors import generator_for, stochastic_reference, store

CPU = torch.device("cpu")
STEP = 2.0**-7  # of bf16 between 1 and 2


def test_numbers_come_in_the_dtype_that_is_asked_for() -> None:
    numbers = on_device([1, 2.5], torch.float64, CPU)
    assert numbers.dtype == torch.float64 and numbers.tolist() == [1, 2.5]


def test_vectors_in_host_memory_take_the_form_for_cpus() -> None:
    assert not runs_on_gpu(torch.zeros(3))


def test_stochastic_rounding_takes_the_upper_neighbour_as_often_as_the_value_is_near_it() -> None:
    target = torch.empty(40_000, dtype=torch.bfloat16)
    store(target, torch.full((40_000,), 1 + STEP / 4), generator_for(CPU, 3))
    assert set(target.tolist()) == {1.0, 1 + STEP}
    assert abs((target > 1).float().mean().item() - 0.25) < 0.02


def test_without_a_generator_rounding_is_to_nearest() -> None:
    target = torch.empty(2, dtype=torch.bfloat16)
    store(target, torch.tensor([1 + STEP / 4, 1 + STEP * 3 / 4]))
    assert target.tolist() == [1.0, 1 + STEP]


def test_rounding_keeps_what_is_exact_and_what_is_not_finite() -> None:
    values = torch.tensor([1.0, -2.0, float("inf"), float("-inf"), float("nan")])
    rounded = stochastic_reference(values, torch.full((5,), (1 << 16) - 1, dtype=torch.int32))
    assert rounded[:4].tolist() == values[:4].tolist() and rounded[4].isnan()


def test_rounding_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    store(torch.empty(8, dtype=torch.bfloat16), torch.rand(8, generator=generator_for(CPU, 1)), generator_for(CPU, 2))
    assert torch.equal(torch.get_rng_state(), before)
