"""Checkpointed calls with inputs stored elsewhere, compared with torch's: bitwise the same, with less memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.activations.kept import CheckpointedCalls
from hf_zero.config.schema.long_sequences import ActivationCheckpointing
from hf_zero.device.runtime import HOST, Memory, Runtime
from tests.support.late import Late, use
from tests.support.memory import most_allocated, profiled_memory, still_allocated

WIDTH, ROWS, LAYERS = 64, 16, 5
POLICIES = {
    "host": ActivationCheckpointing(cpu_checkpointing=True),
    "one buffer": ActivationCheckpointing(contiguous_memory_optimization=True, number_checkpoints=LAYERS),
    "one buffer on the host": ActivationCheckpointing(
        cpu_checkpointing=True, contiguous_memory_optimization=True, number_checkpoints=LAYERS - 2
    ),
    "watched": ActivationCheckpointing(synchronize_checkpoint_boundary=True, profile=True),
    "all": ActivationCheckpointing(
        cpu_checkpointing=True,
        contiguous_memory_optimization=True,
        number_checkpoints=LAYERS,
        synchronize_checkpoint_boundary=True,
        profile=True,
    ),
}


class OwnMemory(Runtime):
    """A device separate from the host, whose kept memory is not PyTorch's own."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.own = Memory(HOST, is_host=False)


class Layer(nn.Module):
    """A layer with dropout, a second input and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, scale: float = 1.0) -> Tensor:
        inside = nn.functional.dropout(nn.functional.gelu(self.up(x + other)), 0.2)
        output: Tensor = x + self.down(inside) * scale
        return output


def net() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS))


Run = Callable[..., Any]


def train(layers: nn.ModuleList, run: Run, *, transposed: bool = False, micro_batches: int = 2) -> list[Any]:
    """Losses, all gradients, and the next random number. Every layer gets `shared` in addition to its own input."""
    torch.manual_seed(1)
    losses: list[Any] = []
    first = torch.randn(WIDTH, ROWS).t() if transposed else torch.randn(ROWS, WIDTH)
    first.requires_grad_()
    for number in range(micro_batches):
        x, shared = first * (number + 1), first.sin()
        for layer in layers:
            x = run(layer, x, shared)
        loss = x.square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, first.grad, *(p.grad for p in layers.parameters()), torch.rand(1)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_bits(name: str, reentrant: bool) -> None:
    """On a device whose copies arrive as late as possible."""
    policy = POLICIES[name]
    for transposed in (False, True):
        expected = train(net(), lambda *args: checkpoint(*args, use_reentrant=reentrant), transposed=transposed)
        with use(Late()) if policy.cpu_checkpointing else nullcontext():
            calls = CheckpointedCalls(policy)

            def run(*args: Any, calls: CheckpointedCalls = calls) -> Any:
                return calls.run(checkpoint, *args, use_reentrant=reentrant)

            found = train(net(), run, transposed=transposed)
            calls.close()
        assert calls.num_calls == 2 * LAYERS
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_two_forwards_before_their_backwards() -> None:
    """With preference pairs, kept inputs of the second forward must not replace those of the first."""
    layers = net()
    with use(Late()):
        calls = CheckpointedCalls(POLICIES["one buffer on the host"])
        found = []
        for run in (calls.run, lambda function, *args, **more: function(*args, **more)):
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            torch.manual_seed(2)
            outputs = []
            for factor in (1, 2):
                y = x * factor
                for layer in layers:
                    y = run(checkpoint, layer, y, y * 2, use_reentrant=False)
                outputs.append(y)
            gradients = torch.autograd.grad(outputs[0].sum() - outputs[1].sum(), [x, *layers.parameters()])
            found.append(gradients)
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_a_graph_that_is_kept_can_be_walked_again() -> None:
    layers = net()
    with use(Late()):
        calls = CheckpointedCalls(POLICIES["host"])
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        y: Tensor = x * 2
        for layer in layers:
            y = calls.run(checkpoint, layer, y, x, use_reentrant=False)
        first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("policy", [ActivationCheckpointing(), ActivationCheckpointing(cpu_checkpointing=True)])
def test_memory_between_forward_and_backward(policy: ActivationCheckpointing) -> None:
    """On the host, all inputs except the last leave device memory, and backward fetches two at a time."""
    size = 512 * WIDTH * 4
    layers = net()
    with use(OwnMemory()):
        calls = CheckpointedCalls(policy)
        for measured in (False, True):
            x = torch.ones(512, WIDTH, requires_grad=True)
            gc.collect()
            with profiled_memory() if measured else nullcontext() as forward:
                y: Tensor = x * 1
                for layer in layers:
                    y = calls.run(checkpoint, layer, y, torch.zeros(1), use_reentrant=False)
            with profiled_memory() if measured else nullcontext() as backward:
                y.sum().backward()
            del y  # not counted
    kept = still_allocated(forward) / size
    assert kept == pytest.approx(2 if policy.cpu_checkpointing else LAYERS + 1, abs=0.25)  # and the output
    assert most_allocated(backward) < 12 * size
    if policy.cpu_checkpointing:  # all homes are free again without further action
        pool: Any = calls._buffers[HOST]
        assert len(pool._free) == LAYERS - 1


class Copies(OwnMemory):
    """Counts the copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def copy_out(self, buffer: Tensor, home: Tensor) -> Any:
        self.num += 1
        return super().copy_out(buffer, home)


def test_one_input_of_all_calls_is_kept_once() -> None:
    """An encoder's output goes to every layer of the decoder."""
    copies = Copies()
    with use(copies):
        calls = CheckpointedCalls(POLICIES["host"])
        train(net(), lambda *args: calls.run(checkpoint, *args, use_reentrant=False), micro_batches=1)
    assert copies.num == LAYERS  # the shared one, and those of all layers but the last


def test_an_input_that_is_changed_afterwards_is_an_error() -> None:
    """torch also raises; sent to the host later, the value would silently be wrong."""
    layer = nn.Linear(WIDTH, WIDTH)
    with use(OwnMemory()):
        calls = CheckpointedCalls(POLICIES["host"])
        x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1
        y = calls.run(checkpoint, layer, x, use_reentrant=False)
        x.add_(1)
        with pytest.raises(RuntimeError, match="was modified in place afterwards"):
            calls.run(checkpoint, layer, y, use_reentrant=False)


def test_what_others_offload_is_what_we_leave() -> None:
    """All calls are inside an offload of every activation, as in trl, which does not see the inputs kept by hf_zero."""
    seen: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    layers, expected = net(), train(net(), lambda *args: checkpoint(*args, use_reentrant=False))
    with use(Late()):
        calls = CheckpointedCalls(POLICIES["host"])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = train(layers, lambda *args: calls.run(checkpoint, *args, use_reentrant=False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert seen and len(seen) <= 2 * 6  # of the multiplication, the sine and the loss; of no layer


def test_times_are_said_when_the_next_forward_begins(caplog: pytest.LogCaptureFixture) -> None:
    calls = CheckpointedCalls(ActivationCheckpointing(profile=True))
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        train(net(), lambda *args: calls.run(checkpoint, *args, use_reentrant=False))
        calls.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all("5 checkpointed calls" in text and "5 recomputed" in text for text in texts)


def test_the_device_is_waited_for_at_each_boundary() -> None:
    class Counting(Runtime):
        num_waits = 0

        def synchronize(self) -> None:
            self.num_waits += 1

    runtime = Counting(HOST)
    with use(runtime):
        calls = CheckpointedCalls(ActivationCheckpointing(synchronize_checkpoint_boundary=True))
        train(net(), lambda *args: calls.run(checkpoint, *args, use_reentrant=False), micro_batches=1)
    assert runtime.num_waits == 2 * 2 * LAYERS


LARGE = torch.ones(ROWS, WIDTH)
MARKED = torch.ones(ROWS, WIDTH)
MARKED.no_checkpointing = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "goes"),
    [
        (LARGE, True),
        (LARGE.t(), True),
        (nn.Parameter(LARGE), False),
        (LARGE.long(), False),
        (LARGE[:1], False),
        (LARGE[:, ::2], False),
        (LARGE[:, None].expand(-1, 9, -1), False),
        (MARKED, False),
        (None, False),
    ],
    ids=["plain", "transposed", "weight", "mask", "small", "with gaps", "repeated", "marked", "none"],
)
def test_large_activations_go_to_the_host_and_nothing_else(given: Tensor | None, goes: bool) -> None:
    """They go when the next call begins."""
    copies, factor = Copies(), torch.ones(1, requires_grad=True)

    def layer(values: Tensor | None) -> Tensor:
        return factor * (1 if values is None else values)

    with use(copies):
        calls = CheckpointedCalls(POLICIES["host"])
        outputs = [calls.run(checkpoint, layer, values, use_reentrant=False) for values in (given, factor)]
        assert copies.num == int(goes) and len(outputs) == 2
