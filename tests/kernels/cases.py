"""Tests of every kernel for any device: run on a CPU, under Triton's interpreter, and on a GPU.

Needs only torch and hf_zero.kernels, so that it runs on a fresh machine with a GPU (bench/gpu_suite.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.adagrad import AdagradRule, adagrad, adagrad_reference
from hf_zero.kernels.adam import AdamRule, adam, adam_reference
from hf_zero.kernels.frozen_adam import frozen_adam, frozen_adam_reference
from hf_zero.kernels.lamb import LambRule, lamb_apply, lamb_moments, lamb_reference
from hf_zero.kernels.lion import LionRule, lion, lion_reference
from hf_zero.kernels.message import BLOCK, message_bytes
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.kernels.quantize import (
    Feedback,
    dequantize_reference,
    quantize_reference,
    read_messages,
    split_message,
    sum_messages,
    write_messages,
)
from hf_zero.kernels.sgd import SgdRule, sgd, sgd_reference
from hf_zero.kernels.signs import pack_signs_reference, pack_signs_with_error, unpack_signs, unpack_signs_reference
from hf_zero.kernels.vectors import Applied, Vectors

STEPS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative to the largest value: the error of one rounding in that dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Form:
    """Where a kernel runs, and which of its implementations is used.

    `interpreted`: Triton's form on CPU tensors, in its interpreter or, if `truncates` is false, as compiled code
    (tests.support.executed). `truncates`: Triton's interpreter truncates to bf16 instead of rounding; a GPU rounds.
    """

    device: str = "cpu"
    interpreted: bool = False
    truncates: bool = False


def randn(numel: int, dtype: torch.dtype, seed: int, shift: int = 0) -> Tensor:
    """Values of one dtype in a view that starts `shift` elements into its storage."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel + shift, generator=generator).to(dtype)[shift:]


@dataclass(frozen=True)
class Update:
    """One optimizer kernel: its number of states, its forms, and its reference."""

    states: int
    run: Callable[..., None]
    interpreted: Callable[..., None]
    reference: Callable[..., None]


def _gpu(name: str) -> Any:
    """Triton's forms, imported on demand."""
    import importlib

    return importlib.import_module(f"hf_zero.kernels.gpu.{name}")


def _adam(rule: AdamRule) -> Update:
    return Update(
        states=2,
        run=lambda vectors, step, **options: adam(vectors, rule, step, Applied(**options)),
        interpreted=lambda vectors, step, **options: _gpu("adam").adam_on_gpu(vectors, rule, step, Applied(**options)),
        reference=lambda vectors, step, scale: adam_reference(vectors, rule, step, scale),
    )


def _lion(rule: LionRule) -> Update:
    return Update(
        states=1,
        run=lambda vectors, step, **options: lion(vectors, rule, Applied(**options)),
        interpreted=lambda vectors, step, **options: _gpu("lion").lion_on_gpu(vectors, rule, Applied(**options)),
        reference=lambda vectors, step, scale: lion_reference(vectors, rule, scale),
    )


def _adagrad(rule: AdagradRule) -> Update:
    return Update(
        states=1,
        run=lambda vectors, step, **options: adagrad(vectors, rule, step, Applied(**options)),
        interpreted=lambda vectors, step, **options: _gpu("adagrad").adagrad_on_gpu(
            vectors, rule, step, Applied(**options)
        ),
        reference=lambda vectors, step, scale: adagrad_reference(vectors, rule, step, scale),
    )


def _sgd(rule: SgdRule) -> Update:
    return Update(
        states=1 if rule.momentum else 0,
        run=lambda vectors, step, **options: sgd(vectors, rule, Applied(**options)),
        interpreted=lambda vectors, step, **options: _gpu("sgd").sgd_on_gpu(vectors, rule, Applied(**options)),
        reference=lambda vectors, step, scale: sgd_reference(vectors, rule, scale),
    )


def _frozen(lr: float, eps: float, weight_decay: float) -> Update:
    """Here the factor on the gradient scales the learning rate: the update is linear, except for the decay."""
    return Update(
        states=1,
        run=lambda vectors, step, scale=1.0, **options: frozen_adam(vectors, lr * scale, eps, weight_decay, **options),
        interpreted=lambda vectors, step, scale=1.0, skip=None: _gpu("frozen_adam").frozen_adam_on_gpu(
            vectors, lr * scale, eps, weight_decay, skip
        ),
        reference=lambda vectors, step, scale: frozen_adam_reference(vectors, lr * scale, eps, weight_decay),
    )


def segments_of(numel: int) -> list[tuple[int, int]]:
    """Three tensors with a gap of padding before the last, if there is room."""
    if numel < 10:
        return [(0, numel)]
    third = numel // 3
    return [(0, third), (third, third), (2 * third + 2, numel - 2 * third - 2)]


def _lamb(rule: LambRule) -> Update:
    def run(vectors: Vectors, step: int, scale: Any = 1.0, skip: Tensor | None = None) -> None:
        segments = segments_of(vectors.weight.numel())
        squares = lamb_moments(vectors, rule, segments, scale, skip)
        lamb_apply(vectors, rule, rule.rate(step) * rule.trust_ratios(squares), segments, skip)

    def interpreted(vectors: Vectors, step: int, scale: Any = 1.0, skip: Tensor | None = None) -> None:
        segments = segments_of(vectors.weight.numel())
        squares = _gpu("lamb").lamb_moments_on_gpu(vectors, rule, segments, scale, skip)
        factors = rule.rate(step) * rule.trust_ratios(squares)
        _gpu("lamb").lamb_apply_on_gpu(vectors, rule, factors, segments, skip)

    def reference(vectors: Vectors, step: int, scale: Any) -> None:
        lamb_reference(vectors, rule, step, segments_of(vectors.weight.numel()), scale)

    return Update(2, run, interpreted, reference)


UPDATES: dict[str, Update] = {
    "adamw": _adam(AdamRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)),
    # A larger eps: where decay and gradient cancel, m / sqrt(v) is as inaccurate as the few remaining bits of g.
    "adam": _adam(AdamRule(lr=1e-2, beta1=0.8, beta2=0.999, eps=1e-3, weight_decay=0.1, decoupled=False)),
    "adam without bias correction": _adam(
        AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True, bias_correction=False)
    ),
    "lion": _lion(LionRule(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1)),
    "adagrad": _adagrad(AdagradRule(lr=1e-2, eps=1e-10, weight_decay=0.0, lr_decay=0.1)),
    "adagrad with L2": _adagrad(AdagradRule(lr=1e-2, eps=1e-3, weight_decay=0.1)),
    "sgd": _sgd(SgdRule(lr=1e-2, momentum=0.0, weight_decay=0.1, nesterov=False)),
    "sgd with momentum": _sgd(SgdRule(lr=1e-2, momentum=0.9, weight_decay=0.0, nesterov=False)),
    "sgd with nesterov": _sgd(SgdRule(lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True)),
    "frozen adam": _frozen(lr=1e-2, eps=1e-2, weight_decay=0.1),
    "lamb": _lamb(LambRule(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)),
    "lamb with eps inside": _lamb(
        LambRule(
            lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.0, bias_correction=False, eps_inside_sqrt=True
        )
    ),
}


@dataclass(frozen=True)
class Types:
    """The dtypes of one run of an optimizer kernel."""

    gradient: torch.dtype
    lp_param: torch.dtype | None
    weight: torch.dtype = torch.float32
    states: torch.dtype | None = None  # None: as wide as updates are computed


NARROW = [name for name in UPDATES if not name.startswith(("lamb", "frozen"))]  # kernels of 16-bit masters
MIXTURES = [
    Types(torch.float32, None),
    Types(torch.bfloat16, torch.bfloat16),
    Types(torch.float16, torch.float16),
    Types(torch.float32, torch.bfloat16),
    Types(torch.bfloat16, None),
]


def vectors_for(update: Update, numel: int, types: Types, device: str) -> Vectors:
    """Misaligned views with random content, and states as after a long run."""
    wide = types.states or torch.promote_types(types.weight, torch.float32)
    states = [randn(numel, wide, 10 + index, shift=index).abs() * 0.1 for index in range(update.states)]
    return Vectors(
        weight=randn(numel + 1, types.weight, 4).to(device)[1:],
        gradient=randn(numel + 3, types.gradient, 5).to(device)[3:],
        states=tuple(state.to(device) for state in states),
        lp_param=None if types.lp_param is None else torch.zeros(numel + 1, dtype=types.lp_param, device=device)[1:],
    )


def _in_double(vectors: Vectors) -> Vectors:
    return Vectors(
        weight=vectors.weight.cpu().double().clone(),
        gradient=vectors.gradient.cpu().double(),
        states=tuple(state.cpu().double().clone() for state in vectors.states),
    )


def check_update(name: str, numel: int, types: Types, scale: Tensor | float, form: Form) -> None:
    """Three steps against the reference in fp64; the low-precision weight is the master, rounded once."""
    update = UPDATES[name]
    fast = vectors_for(update, numel, types, form.device)
    exact = _in_double(fast)
    run = update.interpreted if form.interpreted else update.run
    for step in range(1, STEPS + 1):
        run(fast, step, scale=scale)
        update.reference(exact, step, float(scale))
    tolerance = 10 * TOLERANCE[torch.float32]
    torch.testing.assert_close(fast.weight.cpu().double(), exact.weight, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(fast.states, exact.states, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=tolerance, atol=tolerance)
    if fast.lp_param is not None:
        for start, length in segments_of(numel) if name.startswith("lamb") else [(0, numel)]:
            ours, theirs = (vector.narrow(0, start, length) for vector in (fast.lp_param, fast.weight))
            if form.truncates and types.lp_param == torch.bfloat16:
                torch.testing.assert_close(ours.float(), theirs.float(), rtol=TOLERANCE[torch.bfloat16], atol=0)
            else:
                assert torch.equal(ours, theirs.to(ours.dtype)), "rounded once, to nearest"


def check_narrow(name: str, numel: int, states: torch.dtype, form: Form) -> None:
    """bf16 weights without masters, states in bf16 or not: one step equals that of fp64, rounded once."""
    update, types = UPDATES[name], Types(torch.bfloat16, None, weight=torch.bfloat16, states=states)
    vectors = vectors_for(update, numel, types, form.device)
    exact = _in_double(vectors)
    (update.interpreted if form.interpreted else update.run)(vectors, 1, scale=0.125)
    update.reference(exact, 1, 0.125)
    for ours, theirs in zip((vectors.weight, *vectors.states), (exact.weight, *exact.states), strict=True):
        tolerance = TOLERANCE[ours.dtype] if ours.dtype == torch.bfloat16 else 10 * TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=tolerance, atol=1e-6)
    assert vectors.weight.dtype == torch.bfloat16 and all(state.dtype == states for state in vectors.states)


def check_skip_flag(name: str, form: Form) -> None:
    """A set flag makes the kernel a no-op, a cleared one does not."""
    update = UPDATES[name]
    run = update.interpreted if form.interpreted else update.run
    vectors = vectors_for(update, 100, MIXTURES[1], form.device)
    assert vectors.lp_param is not None
    before = [tensor.clone() for tensor in (vectors.weight, *vectors.states, vectors.lp_param)]
    run(vectors, 1, skip=torch.ones(1, dtype=torch.int32, device=form.device))
    after = (vectors.weight, *vectors.states, vectors.lp_param)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    run(vectors, 1, skip=torch.zeros(1, dtype=torch.int32, device=form.device))
    assert not torch.equal(before[0], vectors.weight)


def check_stochastic_rounding(name: str, form: Form) -> None:
    """bf16 weights without masters: every result is one of the two neighbours, and their mean is the exact value."""
    update, numel, draws = UPDATES[name], 64, 60 if form.interpreted else 400
    types = Types(torch.float32, None, weight=torch.bfloat16)
    run = update.interpreted if form.interpreted else update.run
    start = vectors_for(update, numel, types, form.device)
    exact = _in_double(start)
    update.reference(exact, 1, 1.0)
    total = torch.zeros(numel, dtype=torch.float64)
    spacing = exact.weight.abs().clamp(min=1e-3) * 2**-7
    for seed in range(draws):
        vectors = vectors_for(update, numel, types, form.device)
        run(vectors, 1, seed=seed)
        rounded = vectors.weight.cpu().double()
        assert bool(((rounded - exact.weight).abs() <= spacing * 1.01).all())
        total += rounded
    error = (total / draws - exact.weight).abs() / spacing
    # One draw deviates by at most half a spacing (standard deviation), and the mean by that over the root of `draws`.
    assert float(error.max()) < 5 * 0.5 / draws**0.5, "the rounding has a bias"


def check_sum_of_squares(numel: int, dtype: torch.dtype, form: Form) -> None:
    flat = randn(numel + 1, dtype, 3).to(form.device)[1:]
    run = _gpu("norm").sum_of_squares_on_gpu if form.interpreted else sum_of_squares
    expected = flat.cpu().double().square().sum()
    torch.testing.assert_close(run(flat).cpu(), expected, rtol=1e-5, atol=0)
    for bad in (float("nan"), float("inf")):
        flat[-1] = bad
        assert not torch.isfinite(run(flat))


def _packed(form: Form, value: Tensor, error: Tensor, packed: Tensor) -> Tensor:
    error.add_(value)
    if not form.interpreted:
        return pack_signs_with_error(error, packed)
    scale = (sum_of_squares(error) / error.numel()).sqrt().to(error.dtype)
    _gpu("signs").pack_signs_on_gpu(error, scale, packed)
    return scale


def check_signs(numel: int, dtype: torch.dtype, form: Form) -> None:
    value = randn(numel + 3, dtype, 6).to(form.device)[3:]
    value[::7] = 0.0  # sign(0) is +1
    error = randn(numel, torch.float32, 7).to(form.device) * 0.1
    error[::7] = 0.0
    ours = SimpleNamespace(
        error=torch.cat([error[:1], error])[1:],  # misaligned
        packed=torch.empty(numel // 8 + 1, dtype=torch.uint8, device=form.device)[1:],
    )
    theirs = SimpleNamespace(error=error.cpu().clone(), packed=torch.empty(numel // 8, dtype=torch.uint8))
    scale = _packed(form, value, ours.error, ours.packed)
    expected = pack_signs_reference(value.cpu(), theirs.error, theirs.packed)
    torch.testing.assert_close(scale.cpu(), expected, rtol=1e-6, atol=0)
    assert torch.equal(ours.packed.cpu(), theirs.packed)
    torch.testing.assert_close(ours.error.cpu(), theirs.error, rtol=1e-5, atol=1e-6)
    for add in (False, True):
        out, reference = torch.ones(numel + 1, device=form.device)[1:], torch.ones(numel)
        if form.interpreted:
            _gpu("signs").unpack_signs_on_gpu(ours.packed, scale, out, add=add)
        else:
            unpack_signs(ours.packed, scale, out, add=add)
        unpack_signs_reference(theirs.packed, float(expected), reference, add=add)
        torch.testing.assert_close(out.cpu(), reference, rtol=1e-6, atol=1e-6)
    sent = out.cpu() - 1.0
    torch.testing.assert_close(sent + ours.error.cpu(), value.cpu().float() + error.cpu(), rtol=1e-5, atol=1e-5)


def check_signs_with_padding(form: Form) -> None:
    """The last elements are padding: they do not count in the scale, and have no error feedback."""
    numel, padded = 27, 32
    value = torch.zeros(padded)
    value[:numel] = randn(numel, torch.float32, 6)
    value, error = value.to(form.device), torch.zeros(padded, device=form.device)
    packed = torch.empty(padded // 8, dtype=torch.uint8, device=form.device)
    scale = pack_signs_with_error(error.add_(value), packed, numel)
    torch.testing.assert_close(float(scale), float(value.norm()) / numel**0.5, rtol=1e-5, atol=0)
    assert not error[numel:].any() and bool(error[:numel].any())


def check_elements_without_variance(form: Form) -> None:
    """Frozen Adam only decays them."""
    vectors = vectors_for(UPDATES["frozen adam"], 100, MIXTURES[0], form.device)
    vectors.states[0][10:20] = 0.0
    before, decayed = vectors.weight.clone(), vectors.weight[10:20] * (1 - 1e-2 * 0.1)
    run = UPDATES["frozen adam"].interpreted if form.interpreted else UPDATES["frozen adam"].run
    run(vectors, 1)
    torch.testing.assert_close(vectors.weight[10:20], decayed)
    assert not bool((vectors.weight[20:] == before[20:] * (1 - 1e-2 * 0.1)).any())


def check_messages(rows: int, numel: int, bits: int, dtype: torch.dtype, form: Form) -> None:
    """Written, read and summed: bitwise as the reference, within half a step of the values."""
    values = randn(rows * numel + 8, dtype, 8).to(form.device)[8:].view(rows, numel)
    values[0, :BLOCK] = 0.0
    values[-1, -1] = 100.0  # the others of its block are negligible beside it
    messages = torch.zeros(rows, message_bytes(numel, bits), dtype=torch.uint8, device=form.device)
    _messages(form, "write_messages")(values, messages, bits, None)
    found = torch.empty(rows, numel, device=form.device)
    _messages(form, "read_messages")(messages, found, bits)
    codes, scales = split_message(messages.cpu(), numel, bits)
    for row in range(rows):
        expected_codes, expected_scales = quantize_reference(values[row].cpu(), bits)
        stored = codes[row].view(torch.int8)
        if bits == 4:
            pairs = torch.stack([(codes[row] & 15).to(torch.int8) - 8, (codes[row] >> 4).to(torch.int8) - 8], dim=1)
            stored = pairs.view(-1)[:numel]
        assert torch.equal(stored, expected_codes) and torch.equal(scales[row], expected_scales)
        expected = dequantize_reference(expected_codes, expected_scales)
        assert torch.equal(found[row].cpu(), expected)
        half_step = (expected_scales.float() / 2).repeat_interleave(BLOCK)[:numel]
        assert bool(((expected - values[row].cpu().float()).abs() <= half_step * 1.0001).all())
    total = torch.empty(rows, numel, dtype=dtype, device=form.device)
    parts = torch.stack([messages, torch.zeros_like(messages), messages, messages])
    _messages(form, "sum_messages")(parts, total, bits)
    tolerance = TOLERANCE[dtype] if form.truncates else 0.0
    torch.testing.assert_close(total, (found + found + found).to(dtype), rtol=tolerance, atol=0)
    values[-1, -1] = float("inf")
    _messages(form, "write_messages")(values, messages, bits, None)
    _messages(form, "read_messages")(messages, found, bits)
    last = (numel - 1) // BLOCK * BLOCK
    assert bool(found[-1, last:].isnan().all()) and bool(found[:-1].isfinite().all())
    assert bool(found[-1, :last].isfinite().all())


def check_feedback(rows: int, numel: int, bits: int, dtype: torch.dtype, form: Form) -> None:
    """LoCo's formulas, line by line, over three messages; nonfinite values leave no error feedback."""
    beta, errors = 0.8, torch.zeros(rows, message_bytes(numel, 8), dtype=torch.uint8, device=form.device)
    messages = torch.empty(rows, message_bytes(numel, bits), dtype=torch.uint8, device=form.device)
    kept = torch.zeros(rows, numel)
    for step in range(3):
        values = randn(rows * numel, dtype, 20 + step).to(form.device).view(rows, numel)
        _messages(form, "write_messages")(values, messages, bits, Feedback(errors, beta))
        sent, left = (torch.empty(rows, numel, device=form.device) for _ in range(2))
        _messages(form, "read_messages")(messages, sent, bits)
        _messages(form, "read_messages")(errors, left, 8)
        for row in range(rows):
            h = values[row].cpu().float() + kept[row]
            expected = dequantize_reference(*quantize_reference(h, bits))
            torch.testing.assert_close(sent[row].cpu(), expected, rtol=0, atol=0)
            e = beta * kept[row] + (1 - beta) * (h - expected)
            step_of_e = quantize_reference(e, 8)[1].float().repeat_interleave(BLOCK)[:numel]
            # With one intermediate rounding more or less, a value in the middle of two codes may go either way.
            assert bool(((left[row].cpu() - e).abs() <= step_of_e * 0.51).all())
        kept = left.cpu()
    values[0, 0] = float("nan")
    _messages(form, "write_messages")(values, messages, bits, Feedback(errors, beta))
    _messages(form, "read_messages")(errors, left, 8)
    assert bool(left.isfinite().all()) and not bool(left[0, :BLOCK].any())


def _messages(form: Form, name: str) -> Any:
    return getattr(_gpu("quantize"), f"{name}_on_gpu") if form.interpreted else _cpu_or_gpu[name]


_cpu_or_gpu = {"write_messages": write_messages, "read_messages": read_messages, "sum_messages": sum_messages}
