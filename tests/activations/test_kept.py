"""Every wait and every reference of a kept input is necessary: without it, a late device gives wrong results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.activations.kept import CheckpointedCalls, InputStorage, KeptInput, Times, can_be_flat, watched
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.config.schema.long_sequences import ActivationCheckpointing
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import HOST, Clock
from tests.activations.test_calls import ROWS, WIDTH, net, train
from tests.support.late import Late, LateError, use


class Deaf(Late):
    """Omits one of the orderings that `kept.py` requests."""

    def __init__(self, deaf_at: str = "") -> None:
        super().__init__(early=0.0)
        self.deaf_at = deaf_at
        self.sites: set[str] = set()

    def skips(self, site: str) -> bool:
        if "activations/kept.py" in site:
            self.sites.add(site)
        return bool(self.deaf_at) and site == self.deaf_at


def run_of(calls: CheckpointedCalls) -> Callable[..., Any]:
    return lambda *args: calls.run(checkpoint, *args, use_reentrant=False)


def training(calls: CheckpointedCalls) -> list[Any]:
    return train(net(), run_of(calls))


def outputs_of(calls: CheckpointedCalls, layers: nn.ModuleList) -> list[Tensor]:
    outputs = [torch.ones(ROWS, WIDTH, requires_grad=True) * 1]
    for layer in layers:
        outputs.append(run_of(calls)(layer, outputs[-1], torch.zeros(1)))
    return outputs


def forward_alone(calls: CheckpointedCalls) -> list[Any]:
    """Evaluation with gradients enabled, without a backward."""
    for _ in range(2):
        outputs_of(calls, net())
        calls.release()
    return training(calls)


def half_a_backward(calls: CheckpointedCalls) -> list[Any]:
    """A prefetched input is never used, and its home is soon reused."""
    for _ in range(2):
        layers = net()
        outputs = outputs_of(calls, layers)
        torch.autograd.grad(outputs[-1].sum(), [*layers[-2].parameters()])
        del outputs
    return training(calls)


PROGRAMS = (training, forward_alone, half_a_backward)


def found_by(program: Callable[[CheckpointedCalls], list[Any]], runtime: Late) -> list[Any]:
    with use(runtime):
        return program(CheckpointedCalls(ActivationCheckpointing(cpu_checkpointing=True)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_asked_for_in_vain() -> None:
    expected = train(net(), lambda *args: checkpoint(*args, use_reentrant=False))
    sites: set[str] = set()
    for program in PROGRAMS:
        runtime = Deaf()
        found = found_by(program, runtime)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        sites |= runtime.sites
    assert len(sites) >= 4
    unnoticed = []
    for site in sorted(sites):
        noticed = False
        for program in PROGRAMS:
            with suppress(LateError):
                found = found_by(program, Deaf(site))
                noticed |= any(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))
                continue
            noticed = True
        if not noticed:
            unnoticed.append(site)
    assert not unnoticed


@pytest.mark.parametrize(
    ("tensor", "flat"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4).transpose(1, 2), True),
        (torch.ones(3, 1, 4), True),
        (torch.ones(3, 4)[:, :2], False),
        (torch.ones(4).expand(3, 4), False),
        (torch.ones(0, 4), False),
    ],
)
def test_what_lies_side_by_side(tensor: Tensor, flat: bool) -> None:
    assert can_be_flat(tensor) == flat


def test_one_that_stays_where_it_is() -> None:
    place = InputStorage(runtime=runtime_of(HOST), buffers=None, on_host=False, group=LoneCollectives())
    x = torch.arange(12.0).view(3, 4).t()
    kept = KeptInput(x.detach(), place, position=0, owner=x)
    kept.send()
    kept.fetch_ahead()
    assert torch.equal(kept.take(), x) and kept.take().stride() == x.stride()
    assert kept.is_of(x) and not kept.is_of(x.clone())
    x.mul_(2)
    assert not kept.is_of(x)
    with pytest.raises(RuntimeError, match="was modified in place afterwards"):
        kept.take()


def test_a_run_that_ends_early_has_its_time(caplog: pytest.LogCaptureFixture) -> None:
    """torch ends a recomputation by an exception as soon as it has what it needs."""

    def fails() -> None:
        raise StopIteration

    times = Times(Clock())
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        for function, num_runs in ((lambda: None, 3), (fails, 1)):
            run = watched(function, None, times)
            for _ in range(num_runs):
                with suppress(StopIteration):
                    run()
        times.tell()
        times.tell()
    texts = [record.getMessage() for record in caplog.records]
    assert ["1 checkpointed calls" in text for text in texts] == [True, True]
    assert "2 recomputed" in texts[0] and "0 recomputed" in texts[1]
