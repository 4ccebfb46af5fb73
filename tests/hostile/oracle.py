"""The expected result of a hostile program: one process in plain PyTorch runs the batches of all ranks.

The gradient of an update is the mean over ranks of the sum over micro-batches and backwards, each divided by the number
of micro-batches. A parameter without gradient on some ranks counts as zero there; one without gradient on all ranks is
not changed: no weight decay, no momentum, no step of Adam's bias correction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.hostile.body import RankResult, TwoLosses, forward, make_optimizer, play
from tests.hostile.model import Root, build_model
from tests.hostile.spec import Forward, Program

# The allowed fp32 difference if sums over at most four ranks and a few hundred elements are computed in another order:
# a few units in the last place (6e-8), amplified by the number of updates and by EPS of Adam. Almost all programs stay
# ten times below; a wrong gradient is far above.
RELATIVE = 1e-5
ABSOLUTE = 1e-6
# Some programs amplify a rounding error with every update. The factor is measured in one process, in fp32 and in fp64:
# ranks may be off by this many times that.
CHAOS = 20.0


def expected(program: Program, dtype: torch.dtype = torch.float32) -> tuple[RankResult, ...]:
    """The expected observations of every rank."""
    model = build_model(program).to(dtype)
    optimizer = make_optimizer(program, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    driver = _Plain(model, program)
    losses: list[list[float]] = [[] for _ in range(program.world)]
    norms = []
    for step in program.steps:
        for micro in step:
            for rank, part in enumerate(micro.ranks):
                losses[rank] += play(part, micro.backward, driver)
        norms.append(float(nn.utils.clip_grad_norm_(trained, program.clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return tuple(RankResult(tuple(mine), tuple(norms), weights) for mine in losses)


class _Plain:
    """Forward, evaluation and backward without an engine."""

    read = staticmethod(Tensor.item)

    def __init__(self, model: Root, program: Program) -> None:
        self._model = model
        self._program = program
        self._share = 1.0 / (program.world * program.accumulation)

    def forward(self, batch: Forward) -> TwoLosses:
        return forward(self._model, self._model, self._program, batch)

    @torch.no_grad()
    def evaluate(self, batch: Forward) -> TwoLosses:
        return self.forward(batch)

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        (loss * self._share).backward(retain_graph=retain_graph)


def find_difference(results: tuple[RankResult, ...], wanted: tuple[RankResult, ...]) -> str | None:
    """The first difference on each rank; None if everything is correct."""
    found = [_difference(rank, *pair) for rank, pair in enumerate(zip(results, wanted, strict=True))]
    return "; ".join(text for text in found if text) or None


def is_chaotic(program: Program, results: tuple[RankResult, ...]) -> bool:
    """Whether the ranks' errors are within what fp32 alone explains in this program."""
    exact = expected(program, torch.float64)
    return largest_error(results, exact) <= CHAOS * largest_error(expected(program), exact)  # never if it is NaN


def _difference(rank: int, seen: RankResult, wanted: RankResult) -> str | None:
    for what in ("losses", "norms"):
        numbers, right = getattr(seen, what), getattr(wanted, what)
        if len(numbers) != len(right):
            return f"rank {rank} has {len(numbers)} {what}, expected {len(right)}"
        wrong = [place for place, (a, b) in enumerate(zip(numbers, right)) if not _close(a, b)]
        if wrong:
            place = wrong[0]
            text = f"rank {rank}: {what}[{place}] is {numbers[place]!r}, expected {right[place]!r}"
            return f"{text} ({len(wrong)} of {len(numbers)} are wrong)"
    if seen.weights.keys() != wanted.weights.keys():
        return f"rank {rank} has other parameters: {sorted(seen.weights.keys() ^ wanted.weights.keys())}"
    for name, value in wanted.weights.items():
        if not _same(seen.weights[name], value):
            return f"rank {rank}: {name} ends as {seen.weights[name].tolist()}, expected {value.tolist()}"
    return None


def _close(seen: float, wanted: float) -> bool:
    return abs(seen - wanted) <= RELATIVE * abs(wanted) + ABSOLUTE


def _same(seen: Tensor, wanted: Tensor) -> bool:
    """Relative to the largest element: the sums that give a small one had large summands."""
    if seen.shape != wanted.shape:
        return False
    if not wanted.numel():
        return True
    return bool(((seen - wanted).abs() <= RELATIVE * wanted.abs().max() + ABSOLUTE).all())  # never if it is NaN


def largest_error(results: tuple[RankResult, ...], wanted: tuple[RankResult, ...]) -> float:
    """The largest error relative to its tolerance; above 1 something is wrong."""
    errors = [0.0]
    for seen, right in zip(results, wanted, strict=True):
        for a, b in zip((*seen.losses, *seen.norms), (*right.losses, *right.norms), strict=True):
            errors.append(abs(a - b) / (RELATIVE * abs(b) + ABSOLUTE))
        for name, value in right.weights.items():
            if value.numel():
                allowed = float(RELATIVE * value.abs().max() + ABSOLUTE)
                errors.append(float((seen.weights[name] - value).abs().max()) / allowed)
    return float(torch.tensor(errors, dtype=torch.float64).max())  # NaN if any is
