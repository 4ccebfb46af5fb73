"""Block-sparse attention by gathering equals dense attention with the same mask, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from hf_zero.extras.sparse_attention import gathered
from hf_zero.extras.sparse_attention.gathered import Rules, gathered_attention, make_plan
from hf_zero.extras.sparse_attention.registered import SparseMask, causal
from tests.extras.sparse_attention.test_layouts import configs

pytestmark = pytest.mark.lengthy

TOLERANCE = 1e-5


def inputs(batch: int, heads: int, kv_heads: int, length: int, size: int = 8, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = [(batch, number, length, size) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def token_mask(layouts: Any, heads: int, block: int, length: int) -> Tensor:
    """bool [1, H, S, S] of a layout, cell by cell."""
    mask = torch.zeros((1, heads, length, length), dtype=torch.bool)
    for head in range(heads):
        for row, seen in enumerate(layouts[head % len(layouts)]):
            for key in seen:
                mask[0, head, row * block : (row + 1) * block, key * block : (key + 1) * block] = True
    return mask


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, added: Tensor | float = 0.0) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + added
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ value


def gradients(output: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(9)
    return list(torch.autograd.grad((output * torch.randn_like(output)).sum(), tensors))


@settings(max_examples=60, deadline=None)
@given(
    case=configs,
    extra=st.integers(0, 6),
    cut=st.integers(0, 3),
    repeat=st.integers(1, 2),
    rule=st.sampled_from(["none", "causal", "padding"]),
)
def test_equals_dense_attention_under_the_same_mask(case: Any, extra: int, cut: int, repeat: int, rule: str) -> None:
    config, _ = case
    heads = config.num_heads * repeat if not config.different_layout_per_head else config.num_heads
    kv_heads = heads // repeat if heads % repeat == 0 else heads
    length = max(1, (config.least_blocks() + extra) * config.block - min(cut, config.block - 1))
    padding = torch.ones((2, length), dtype=torch.bool)
    padding[1, : length // 3] = False
    functions: dict[str, Any] = {
        "none": None,
        "causal": causal,
        "padding": lambda b, h, q, k: (k <= q) & padding[b, k],
    }
    sparse = SparseMask(functions[rule], 2, length, torch.device("cpu"))
    tensors = inputs(2, heads, kv_heads, length)
    plan = sparse.plan(config, heads)
    found = gathered_attention(*tensors, plan, Rules(allowed=sparse.allowed, kept=sparse.kept))
    whole = config.head_rows(-(-length // config.block))
    mask = token_mask(whole, heads, config.block, length) & sparse.dense()
    expected = dense(*tensors, mask)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    if found.requires_grad and mask.any():
        pairs = zip(gradients(found, tensors), gradients(expected, tensors))
        for mine, reference in pairs:
            torch.testing.assert_close(mine, reference, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rule", [None, causal])
def test_flex_masks_are_the_same(rule: Any, per_head: bool) -> None:
    """The BlockMask that accelerators use, here without their compiler (and so without gradients)."""
    from hf_zero.extras.sparse_attention.sparsity import FixedSparsityConfig

    config = FixedSparsityConfig(4, 64, per_head, num_different_global_patterns=4 if per_head else 1)
    length = 64 * 9 - 7
    mask = SparseMask(rule, 2, length, torch.device("cpu"))
    tensors = inputs(2, 4, 2, length)
    with torch.no_grad():
        found = gathered.flex(*(t.detach() for t in tensors), mask.flex(config, 4), None, compiles=False)
    plan = mask.plan(config, 4)
    expected = gathered_attention(*tensors, plan, Rules(allowed=mask.allowed))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_tiles() -> None:
    """Small blocks fill the tiles that they are in; large ones consist of several tiles."""
    assert gathered.tiled(((0,), (1,), (0, 2)), 128) == ((0,), (1,), (0, 2))
    assert gathered.tiled(((0,), (0, 1)), 256) == ((0, 1), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3))
    assert gathered.tiled(((0,), (3,), (2,)), 64) == ((0, 1), (1,))
    assert gathered.fits(16) and gathered.fits(256) and not gathered.fits(48)


def test_nobody_sees_what_is_left_out() -> None:
    """No gradient reaches a key that no query may attend to."""
    plan = make_plan([((0,), (0,), (0, 1))], 1, 4)
    query, key, value = inputs(1, 1, 1, 12)
    gathered_attention(query, key, value, plan, Rules()).sum().backward()
    assert key.grad is not None and value.grad is not None
    assert key.grad[0, 0, 8:].abs().max() == 0 and value.grad[0, 0, 8:].abs().max() == 0
    assert (value.grad[0, 0, :8].abs().sum(-1) > 0).all()


def test_added_scores_and_dropout() -> None:
    plan, (query, key, value) = make_plan([((0, 1), (1,))], 2, 3), inputs(2, 2, 2, 6)
    table = torch.randn(6, 6)
    mask = token_mask([((0, 1), (1,))], 2, 3, 6)
    rules = Rules(added=lambda q, k, heads: table[q, k][None, None])
    found = gathered_attention(query, key, value, plan, rules)
    torch.testing.assert_close(found, dense(query, key, value, mask, table), rtol=TOLERANCE, atol=TOLERANCE)
    torch.manual_seed(0)
    many = [each.repeat(2000, 1, 1, 1) for each in (query, key, value)]
    noisy = gathered_attention(*many, plan, Rules(dropout=0.5)).unflatten(0, (2000, 2))
    plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(noisy.mean(0), plain, rtol=0, atol=0.15)
    assert noisy.std(0).max() > 0.1
