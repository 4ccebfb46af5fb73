"""Every kernel against its reference: shapes x dtypes x odd sizes x misaligned views."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch

from hf_zero.kernels import vectors as vectors_module
from hf_zero.kernels.accumulate import add_into, sum_parts, sum_parts_reference
from hf_zero.kernels.lion import LionRule, lion, lion_reference
from hf_zero.kernels.message import message_bytes
from hf_zero.kernels.quantize import new_messages, read_messages, write_messages
from hf_zero.kernels.signs import pack_signs_with_error
from hf_zero.kernels.vectors import CPU_CHUNK_NUMEL, Vectors, chunks
from tests.kernels import cases
from tests.kernels.cases import DTYPES, MIXTURES, NARROW, UPDATES, Form, Types, randn

SIZES = [1, 31, 1000, CPU_CHUNK_NUMEL, CPU_CHUNK_NUMEL + 17]
CPU = Form()


def test_chunks_cover_every_element_once() -> None:
    for numel in (0, *SIZES, 3 * CPU_CHUNK_NUMEL - 1):
        parts = list(chunks(numel, torch.device("cpu")))
        assert sum(length for _, length in parts) == numel
        assert [start for start, _ in parts] == [index * CPU_CHUNK_NUMEL for index in range(len(parts))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_sum_parts(numel: int, dtype: torch.dtype, num_parts: int) -> None:
    parts = [randn(numel, dtype, seed, shift=seed % 2) for seed in range(num_parts)]
    expected, out = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    sum_parts_reference(parts, expected)
    sum_parts(parts, out)
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out, expected)  # one rounding, for any number of parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overwritten", [0, 1, 2])
def test_sum_parts_may_write_over_one_of_its_parts(dtype: torch.dtype, overwritten: int) -> None:
    """The in-place all-reduce sums into its own piece, which from rank 2 on is not among the first two addends."""
    parts = [randn(100, dtype, seed) for seed in range(3)]
    expected = torch.empty(100, dtype=dtype)
    sum_parts_reference(parts, expected)
    sum_parts(parts, parts[overwritten])
    torch.testing.assert_close(parts[overwritten], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("part_dtype", DTYPES)
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", SIZES)
def test_add_into(numel: int, total_dtype: torch.dtype, part_dtype: torch.dtype) -> None:
    total, part = randn(numel, total_dtype, 1), randn(numel, part_dtype, 2, shift=1)
    expected = total + part.to(total_dtype)
    add_into(total, part)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("numel", SIZES)
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    cases.check_sum_of_squares(numel, dtype, CPU)


@pytest.mark.parametrize("numel", [1, 1000, CPU_CHUNK_NUMEL + 17])
@pytest.mark.parametrize("name", UPDATES)
def test_updates(name: str, numel: int) -> None:
    for types in (*MIXTURES, Types(torch.float64, None, weight=torch.float64)):
        cases.check_update(name, numel, types, 0.125, CPU)
    cases.check_update(name, numel, MIXTURES[0], torch.tensor(0.5), CPU)
    cases.check_update(name, numel, MIXTURES[0], 1.0, CPU)


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test_16_bit_masters(name: str, states: torch.dtype) -> None:
    for numel in (1, 1041):
        cases.check_narrow(name, numel, states, CPU)


@pytest.mark.parametrize("name", UPDATES)
def test_skip_flag(name: str) -> None:
    cases.check_skip_flag(name, CPU)


@pytest.mark.parametrize("name", UPDATES)
def test_skip_flag_that_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's form on an accelerator (fp64, or no Triton) restores what it has changed."""
    monkeypatch.setattr(vectors_module, "_is_at_hand", lambda _flag: False)
    cases.check_skip_flag(name, CPU)


@pytest.mark.parametrize("name", NARROW)
def test_stochastic_rounding(name: str) -> None:
    cases.check_stochastic_rounding(name, CPU)


@pytest.mark.parametrize("numel", [4, CPU_CHUNK_NUMEL + 4])
@pytest.mark.parametrize("run", [lion, lion_reference])
def test_lion_keeps_what_is_no_number(run: Callable[..., None], numel: int) -> None:
    """PyTorch's sign of NaN is 0, the Triton kernel's is NaN. On a CPU a gradient with NaN left the weight unchanged,
    but made its momentum NaN: the weight was silently never updated again."""
    weight, gradient = torch.ones(numel), torch.tensor([nan, inf, -1.0, 0.0]).repeat(numel // 4)
    run(Vectors(weight, gradient, (torch.zeros(numel),)), LionRule(lr=0.5, beta1=0.9, beta2=0.99, weight_decay=0.0))
    torch.testing.assert_close(weight[-4:], torch.tensor([nan, 0.5, 1.5, 1.0]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", UPDATES)
def test_the_gradient_is_left_alone(name: str) -> None:
    vectors = cases.vectors_for(UPDATES[name], 100, MIXTURES[0], "cpu")
    before = vectors.gradient.clone()
    UPDATES[name].run(vectors, 1)
    UPDATES[name].run(vectors, 2, scale=0.5)
    assert torch.equal(vectors.gradient, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [8, 1000, CPU_CHUNK_NUMEL + 24])
def test_signs(numel: int, dtype: torch.dtype) -> None:
    cases.check_signs(numel, dtype, CPU)


def test_signs_with_padding() -> None:
    cases.check_signs_with_padding(CPU)


def test_elements_without_variance() -> None:
    cases.check_elements_without_variance(CPU)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "numel"), [(1, 8), (3, 1000), (2, 127), (1, CPU_CHUNK_NUMEL + 4096)])
def test_messages(rows: int, numel: int, bits: int) -> None:
    for dtype in DTYPES:
        cases.check_messages(rows, numel, bits, dtype, CPU)
    cases.check_feedback(rows, numel, bits, torch.float32, CPU)


def test_tiny_and_large_values_in_messages() -> None:
    """A scale below bf16's smallest normal number would have few bits, and so a code of 127 a wrong value."""
    values = torch.tensor([[1e-38, -3e-39] + [0.0] * 126 + [3e38] * 128])
    for bits in (8, 4):
        messages = new_messages(1, 256, bits, values.device)
        write_messages(values, messages, bits)
        found = torch.empty_like(values)
        read_messages(messages, found, bits)
        assert not bool(found[:, :128].any())
        torch.testing.assert_close(found[:, 128:], values[:, 128:], rtol=4e-3, atol=0)


def test_message_sizes_and_what_does_not_fit() -> None:
    assert message_bytes(1024, 8) == 1024 + 16 and message_bytes(1024, 4) == 512 + 16
    assert message_bytes(130, 8) == 144 + 16 and message_bytes(0, 8) == 0
    with pytest.raises(ValueError, match="only 8 and 4 are supported"):
        message_bytes(8, 2)
    with pytest.raises(
        ValueError, match=r"messages for 2 rows of 10 elements in 8 bits must be uint8 of shape \(2, 32\)"
    ):
        read_messages(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 10), 8)


def test_what_does_not_fit_in_signs() -> None:
    with pytest.raises(ValueError, match="10 signs need 2 bytes and a length that is a multiple of 8"):
        pack_signs_with_error(torch.ones(10), torch.empty(1, dtype=torch.uint8))
