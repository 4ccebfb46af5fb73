"""DeepSpeed's functions for tiled compute against plain autograd: values, gradients, hooks, dropout, precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.tiling.compute import chunk_rows
from hf_zero.tiling.functions import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

HIDDEN, CLASSES = 8, 31


def mlp(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(HIDDEN, 20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, HIDDEN))


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=dtype).requires_grad_(True)


def gradients(compute: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, factor: float = 1.0) -> list[Any]:
    """Gradients of x and all parameters; each parameter is reported once."""
    module.zero_grad()
    x.grad = None
    told: list[int] = []
    trained = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: told.append(id(p))) for p in trained]
    (compute(x).sin().sum() * factor).backward()
    for hook in hooks:
        hook.remove()
    assert len(told) == len(set(told))
    return [x.grad, *(p.grad for p in module.parameters())]


def assert_same(found: list[Any], expected: list[Any], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize(
    ("length", "tiles", "rows"), [(10, 4, (3, 3, 3, 1)), (10, 3, (4, 4, 2)), (3, 9, (1, 1, 1)), (4, 1, (4,))]
)
def test_tiles_are_those_of_chunk(length: int, tiles: int, rows: tuple[int, ...]) -> None:
    assert chunk_rows(length, tiles) == rows == tuple(len(part) for part in torch.zeros(length).chunk(tiles))


@pytest.mark.parametrize("listed", ["all", "some", "none", "owner"])
@pytest.mark.parametrize("shape", [(11, HIDDEN), (2, 11, HIDDEN)])
def test_an_mlp_in_tiles_is_the_mlp(listed: str, shape: tuple[int, ...]) -> None:
    module, x = mlp(), inputs(*shape)
    every = list(module.parameters())
    params = {"all": every, "some": every[:2], "none": [], "owner": None}[listed]
    owner = module if listed == "owner" else None
    found = gradients(lambda x: TiledMLP.apply(lambda _, tile: module(tile), owner, x, 4, params), module, x)
    assert_same(found, gradients(module, module, x))
    with torch.no_grad():
        torch.testing.assert_close(TiledMLP.apply(lambda _, tile: module(tile), owner, x, 99, params), module(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    """Recomputation ends once the input has been recomputed, if the checkpoint supports that."""
    module, x, runs = mlp(), inputs(2, 12, HIDDEN), []

    def once(owner: Any, tile: Tensor) -> Tensor:
        runs.append(1)
        output: Tensor = owner(tile)
        return output

    def layer(x: Tensor) -> Tensor:
        return x + TiledMLP.apply(once, module, x * 2, 4)

    found = gradients(lambda x: checkpoint(layer, x, use_reentrant=reentrant), module, x)
    assert_same(found, gradients(lambda x: x + module(x * 2), module, x))
    assert len(runs) == (12 if reentrant else 8)


def test_dropout_is_the_same_in_both_forwards() -> None:
    """The output's gradient with respect to the input is zero exactly where the forward dropped."""
    drop, x = nn.Dropout(0.5), inputs(1, 40, HIDDEN)
    torch.manual_seed(3)
    output = TiledMLP.apply(lambda owner, tile: owner(tile), drop, x, 5)
    after = torch.rand(1)
    output.sum().backward()
    assert x.grad is not None and torch.equal(x.grad == 0, output == 0)
    torch.manual_seed(3)
    TiledMLP.apply(lambda owner, tile: owner(tile), drop, x, 5)
    assert torch.equal(torch.rand(1), after)


def test_frozen_parameters_and_hooks_on_gradients() -> None:
    module, x = mlp(), inputs(2, 11, HIDDEN)
    module[0].requires_grad_(False)
    expected = gradients(module, module, x)
    assert_same(gradients(lambda x: TiledMLP.apply(lambda m, t: m(t), module, x, 3), module, x), expected)
    module[3].weight.register_hook(lambda gradient: gradient * 0.5)  # once, not once per tile
    expected[3] = expected[3] * 0.5
    assert_same(gradients(lambda x: TiledMLP.apply(lambda m, t: m(t), module, x, 3), module, x), expected)


def test_16_bit_sums_are_made_in_fp32() -> None:
    """With many tiles bf16 would stop counting at 256."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    x = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    TiledMLP.apply(lambda owner, tile: owner(tile), module, x, 1024).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.item() == 1024.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    module, x = mlp(), inputs(2, 12, HIDDEN)

    def under(compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                output = compute(x)
                assert output.dtype == dtype
                return (output + compute(x)).float()

        return run

    found = gradients(under(lambda x: TiledMLP.apply(lambda m, t: m(t), module, x, 3)), module, x)
    assert_same(found, gradients(under(module), module, x), rtol=2e-2, atol=2e-2)


# --- losses ------------------------------------------------------------------------------------------------------


def summed(head: nn.Module, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    losses = nn.functional.cross_entropy(head(x).float(), y, reduction="none")
    return (losses if mask is None else losses * mask).sum()


@pytest.mark.parametrize("params", ["head", "none", "owner"])
@pytest.mark.parametrize("afterwards", ["nothing", "halved", "averaged", "accumulated"])
def test_gradients_of_the_head_follow_what_becomes_of_the_loss(params: str, afterwards: str) -> None:
    """In DeepSpeed 0.19.8 a loss that is halved afterwards gives the head twice its gradient (and x the right one)."""
    head, x = nn.Linear(HIDDEN, CLASSES), inputs(2, 11, HIDDEN)
    y, mask = torch.randint(CLASSES, (2, 11)), torch.randint(2, (2, 11)).float()
    listed = {"head": [head.weight], "none": [], "owner": None}[params]

    def train(tiles: int) -> list[Any]:
        head.zero_grad()
        x.grad = None
        for _ in range(2 if afterwards == "accumulated" else 1):
            if tiles:
                loss = TiledFusedLogitsLoss.apply(summed, head, x, y, mask, tiles, listed, "sum")
            else:
                loss = summed(head, x.flatten(0, 1), y.flatten(), mask.flatten())
            if afterwards == "averaged":
                loss = loss / mask.sum()
            (loss * (1.0 if afterwards == "nothing" else 0.5)).backward()
        return [loss, x.grad, head.weight.grad, head.bias.grad]

    assert_same(train(3), train(0), rtol=1e-5, atol=1e-5)


def test_the_mean_is_that_of_tiles_and_shapes_are_checked() -> None:
    head, x, y = nn.Linear(HIDDEN, CLASSES), inputs(2, 12, HIDDEN), torch.randint(CLASSES, (2, 12))

    def mean(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(x), y)

    found = TiledFusedLogitsLoss.apply(mean, head, x, y, None, 4, [head.weight], "mean")
    expected = mean(head, x.flatten(0, 1), y.flatten())
    wanted = [x, head.weight]
    assert_same(list(torch.autograd.grad(found, wanted)), list(torch.autograd.grad(expected, wanted)))
    torch.testing.assert_close(found, expected)
    for wrong in ((x, y[:, 1:], None, "sum"), (x, y, y[0], "sum"), (x, y, None, "max"), (x[0, 0], y, None, "sum")):
        with pytest.raises(ValueError):
            TiledFusedLogitsLoss.apply(mean, head, wrong[0], wrong[1], wrong[2], 4, [], wrong[3])


def test_fp16_losses_are_differentiated_with_their_scale() -> None:
    """The gradient of a mean over many tokens underflows in fp16; a loss scale prevents it."""
    head = nn.Linear(HIDDEN, CLASSES, dtype=torch.float16)
    x, y = inputs(1, 64, HIDDEN, dtype=torch.float16), torch.randint(CLASSES, (1, 64))
    scale = 2.0**12

    def tiny(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(x).float(), y, reduction="sum") * 1e-7

    (TiledFusedLogitsLoss.apply(tiny, head, x, y, None, 4, [head.weight], "sum") * scale).backward()
    found = [x.grad, head.weight.grad]
    x.grad, head.weight.grad = None, None
    (tiny(head, x[0], y[0]) * scale).backward()
    assert_same(found, [x.grad, head.weight.grad], rtol=2e-2, atol=1e-6)
    assert x.grad.count_nonzero() > x.numel() // 2


# --- any function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("by_class", [False, True])
def test_any_function_over_a_sequence(reduction: str | None, dim: int, by_class: bool) -> None:
    module, x, scale = mlp(), inputs(2, 12, HIDDEN), torch.tensor([2.0], requires_grad=True)

    def fn(x: Tensor, y: Tensor, scale: Tensor, name: str) -> Tensor:
        assert name == "given"
        output = module(x) * scale + y
        return output.mean() if dim == 0 else output

    y = torch.randn(2, 12, HIDDEN)
    cut, whole = {"x": x, "y": y}, {"scale": scale, "name": "given"}

    def in_tiles() -> Tensor:
        if by_class:
            more = ("x", list(module.parameters()), dim, reduction)
            return SequenceTiledCompute.apply(fn, 12, 3, list(cut), list(whole), *more, *cut.values(), *whole.values())
        return sequence_tiled_compute(fn, 12, 3, cut, whole, "x", None, dim, reduction)

    def plain() -> Tensor:
        parts = [fn(x[:, i : i + 4], y[:, i : i + 4], scale, "given") for i in (0, 4, 8)]
        joined = torch.stack(parts) if dim == 0 else torch.cat(parts, dim)
        return joined if reduction is None else getattr(joined, reduction)()

    torch.testing.assert_close(in_tiles(), plain())
    wanted = [x, scale, *module.parameters()]
    expected = torch.autograd.grad(plain().square().sum(), wanted)
    if by_class:
        assert_same(list(torch.autograd.grad(in_tiles().square().sum(), wanted)), list(expected), rtol=1e-4, atol=1e-5)
        return
    copied = copy.copy(wanted)
    for tensor in copied:
        tensor.grad = None
    in_tiles().square().sum().backward()
    assert_same([tensor.grad for tensor in copied], list(expected), rtol=1e-4, atol=1e-5)


def test_tensors_in_a_dict_have_gradients() -> None:
    """A user passed a dict with a scale that other layers had computed: the second tile's backward failed.

    "Trying to backward through the graph a second time": every tile walked through the graph behind the scale.
    """

    def results(run: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x, weight, scale = (torch.randn(*shape, requires_grad=True) for shape in ((2, 8, 3), (3, 3), (3,)))
        run(
            lambda x, more: (x @ weight) * more["all"][0], x, {"all": [(scale * 2).tanh(), 1]}
        ).square().sum().backward()
        return [tensor.grad for tensor in (x, weight, scale) if tensor.grad is not None]

    expected = results(lambda function, x, more: function(x, more))
    found = results(lambda fn, x, more: sequence_tiled_compute(fn, 8, 4, {"x": x}, {"more": more}, "x", None, 1, None))
    assert len(found) == 3
    torch.testing.assert_close(found, expected)


def test_what_cannot_be_is_said() -> None:
    x = inputs(1, 4, HIDDEN)
    with pytest.raises(ValueError, match="there is no argument 'z'"):
        sequence_tiled_compute(lambda x: x, 4, 2, {"x": x}, {}, "z")
    with pytest.raises(ValueError, match="output_reduction is 'max'"):
        sequence_tiled_compute(lambda x: x, 4, 2, {"x": x}, {}, "x", output_reduction="max")
    with pytest.raises(TypeError, match="must return one tensor, not tuple"):
        TiledMLP.apply(lambda _, tile: (tile,), None, x, 2)
