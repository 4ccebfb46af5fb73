"""The engine compared with plain PyTorch, on a model with odd sizes and frozen, tied and unused parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.grads.reducer import GradientReducer
from tests.step.training import ROWS, adamw, assert_same, config, reference, split, train, weights_of
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_each
from tests.support.reference import Trace, assert_same_weights

STEPS = 4
WAYS = [(1, 0.0), (1, 0.05), (3, 0.05)]  # accumulation, clip


def run_every_way(rank: int, world: int, stage: int) -> list[Trace]:
    """One engine after the other."""
    traces = []
    for accumulation, clip in WAYS:
        model = AwkwardMLP()
        settings = config(stage, world, gradient_accumulation_steps=accumulation, gradient_clipping=clip)
        engine, _, _, _ = initialize(model=model, optimizer=adamw(model), config=settings)
        traces.append(train(engine, rank, world, mlp_batches(STEPS * accumulation, ROWS), accumulation))
    return traces


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_same_losses_norms_and_weights_as_plain_pytorch(world: int) -> None:
    untouched = AwkwardMLP().state_dict()["lonely"]
    for stage, by_rank in enumerate(run_each(run_every_way, world, [(world, stage) for stage in range(4)])):
        for (accumulation, clip), traces in zip(WAYS, zip(*by_rank, strict=True), strict=True):
            what = f"stage {stage}, accumulation {accumulation}, clip {clip}"
            assert_same(traces, reference(world, accumulation, clip, STEPS), 1e-5, what)
            assert torch.equal(traces[0].weights["lonely"], untouched), "no gradient anywhere: no update, no decay"


OTHERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}


def run_client_optimizers(rank: int, world: int, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, (kind, options) in OTHERS.items():
        model = AwkwardMLP()
        used = [p for key, p in model.named_parameters() if key not in ("lonely",) and "sometimes" not in key]
        engine, _, _, _ = initialize(model=model, optimizer=kind(used, **options), config=config(stage, world))
        for batch in mlp_batches(STEPS, ROWS):
            engine.backward(engine(**split(batch, rank, world)))
            engine.step()
        found[name] = weights_of(engine)
    return found


def test_any_elementwise_torch_optimizer_runs_as_itself() -> None:
    found = itertools.chain(*run_each(run_client_optimizers, 2, [(2, stage) for stage in (0, 2, 3)]))
    by_rank = list(found)  # of every stage
    for name, (kind, options) in OTHERS.items():
        model = AwkwardMLP()
        optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
        for batch in mlp_batches(STEPS, ROWS):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
        expected = {key: value.detach() for key, value in model.state_dict().items()}
        for weights in by_rank:
            assert_same_weights(weights[name], expected, 1e-5)


def run_muon(rank: int, stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=config(stage, 2))
    for batch in mlp_batches(3, ROWS):
        engine.backward(engine(split(batch, rank, 2)["x"][:, :6]).square().mean())
        engine.step()
    return weights_of(engine)


def test_an_optimizer_of_whole_matrices_gets_them_at_every_stage() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for batch in mlp_batches(3, ROWS):
        optimizer.zero_grad()
        model(batch["x"][:, :6]).square().mean().backward()
        optimizer.step()
    # Muon orthogonalises in bf16, so that gradients that differ in the last bit give updates that differ by a percent.
    for ranks in run_each(run_muon, 2, [(stage,) for stage in range(4)]):
        for weights in ranks:
            assert_same_weights(weights, {"weight": model.weight.detach()}, 2e-3)


def run_bucket_sizes(rank: int, bucket_numel: int, overlap: bool) -> dict[str, torch.Tensor]:
    model = AwkwardMLP()
    settings = config(2, 2)
    settings["zero_optimization"] = {"stage": 2, "reduce_bucket_size": bucket_numel, "overlap_comm": overlap}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=settings)
    for batch in mlp_batches(STEPS, ROWS):
        engine.backward(engine(**split(batch, rank, 2)))
        engine.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_bucket_size_and_overlap_change_nothing_at_all() -> None:
    ways = [(10_000, True), (1, True), (150, True), (150, False)]
    (expected, _), *others = run_each(run_bucket_sizes, 2, ways)
    for weights, _ in others:
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def run_late_gradients(rank: int, stage: int) -> tuple[dict[str, torch.Tensor], int]:
    model, rounds = SharedLayer(), list[None]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = config(stage, 2)
    settings["zero_optimization"]["reduce_bucket_size"] = 1
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=settings)
    reduce_late = GradientReducer.reduce_late

    def counting(self: GradientReducer) -> None:
        rounds.append(None)
        reduce_late(self)

    GradientReducer.reduce_late = counting  # type: ignore[method-assign]
    for batch in mlp_batches(4, ROWS):
        engine.backward(engine(split(batch, rank, 2)["x"]).square().mean())
        engine.step()
    return weights_of(engine), len(rounds)


class SharedLayer(nn.Module):
    """One layer used twice, each time under reentrant checkpointing: its gradient arrives in two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
        output: torch.Tensor = self.last(x)
        return output


def test_a_layer_shared_under_reentrant_checkpointing_keeps_both_gradients() -> None:
    """The bucket is being reduced after the first part; the second raised "gradient computed twice"."""
    model = SharedLayer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in mlp_batches(4, ROWS):
        optimizer.zero_grad()
        model(batch["x"]).square().mean().backward()
        optimizer.step()
    expected = {key: value.detach() for key, value in model.state_dict().items()}
    for weights, rounds in itertools.chain(*run_each(run_late_gradients, 2, [(stage,) for stage in range(4)])):
        assert rounds == 4, "this test is about late gradients, and there were none"
        assert_same_weights(weights, expected, 1e-5)
