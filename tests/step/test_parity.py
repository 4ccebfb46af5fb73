"""The engine compared with plain PyTorch, on a model with odd sizes and frozen, tied and unused parameters."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.grads.reducer import GradientReducer
from tests.support.models import AwkwardMLP, Batch, mlp_batches
from tests.support.ranks import run_each
from tests.support.reference import Recipe, Trace, assert_same_numbers, assert_same_weights, train

ROWS = 12  # divisible by 1, 2, 3 and 4 ranks
STEPS = 4
NO_DECAY = ("bias", "scale")
WAYS = [(1, 0.0), (1, 0.05), (3, 0.05)]  # accumulation, clip
# Small models are below every threshold: with the defaults nothing of them would be sharded.
SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def config(stage: int, world: int, **sections: Any) -> dict[str, Any]:
    """A config with buckets so small that the model has several."""
    return {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **(SHARDED if stage == 3 else {})},
        **sections,
    }


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def groups_of(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for name, p in model.named_parameters() if not any(part in name for part in NO_DECAY)]
    spared = [p for name, p in model.named_parameters() if any(part in name for part in NO_DECAY)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


def split(batch: Batch, rank: int, world: int) -> Batch:
    return {key: value.chunk(world)[rank] for key, value in batch.items()}


def run_engine(rank: int, world: int, stage: int, accumulation: int, clip: float) -> Trace:
    model = AwkwardMLP()
    optimizer = torch.optim.AdamW(groups_of(model, 0.1), lr=1e-2)
    settings = config(stage, world, gradient_accumulation_steps=accumulation, gradient_clipping=clip)
    engine, _, _, _ = initialize(model=model, optimizer=optimizer, config=settings)
    losses, norms = [], []
    batches = iter(mlp_batches(STEPS * accumulation, ROWS))
    for _ in range(STEPS):
        total = 0.0
        for position in range(accumulation):
            # The flag differs between ranks: only rank 0 uses `sometimes`, and only in the first micro-batch.
            flag = rank == 0 and position == 0
            loss = engine(**split(next(batches), rank, world), flag=flag)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
        norm = engine.get_global_grad_norm()
        assert norm is not None
        norms.append(norm)
    return Trace(losses, norms, weights_of(engine))


@functools.cache
def reference(world: int, accumulation: int, clip: float) -> Trace:
    """The same mathematics in one process: every rank's part of the batch is a micro-batch."""
    batches = iter(mlp_batches(STEPS * accumulation, ROWS))
    steps: list[list[Batch]] = []
    for _ in range(STEPS):
        parts: list[Batch] = []
        for position in range(accumulation):
            batch = next(batches)
            for rank in range(world):
                parts.append({**split(batch, rank, world), "flag": torch.tensor(rank == 0 and position == 0)})
        steps.append(parts)
    recipe = Recipe(learning_rate=1e-2, weight_decay=0.1, no_decay=NO_DECAY, clip_norm=clip)
    return train(AwkwardMLP(), steps, recipe)


def run_every_way(rank: int, world: int, stage: int) -> list[Trace]:
    """One engine after the other."""
    return [run_engine(rank, world, stage, accumulation, clip) for accumulation, clip in WAYS]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_same_losses_norms_and_weights_as_plain_pytorch(world: int) -> None:
    for stage, by_rank in enumerate(run_each(run_every_way, world, [(world, stage) for stage in range(4)])):
        check_every_way(stage, world, by_rank)


def check_every_way(stage: int, world: int, by_rank: list[list[Trace]]) -> None:
    for (accumulation, clip), traces in zip(WAYS, zip(*by_rank, strict=True), strict=True):
        expected, way = reference(world, accumulation, clip), f"stage {stage}, accumulation {accumulation}, clip {clip}"
        mean_losses = [sum(values) / world for values in zip(*(trace.losses for trace in traces), strict=True)]
        assert_same_numbers(mean_losses, expected.losses, 1e-5, f"loss ({way})")
        for trace in traces:
            assert_same_numbers(trace.norms, expected.norms, 1e-5, f"norm ({way})")
            assert_same_weights(trace.weights, expected.weights, 1e-5)
        untouched = AwkwardMLP().state_dict()
        assert torch.equal(traces[0].weights["lonely"], untouched["lonely"]), (
            "no gradient anywhere: no update, no decay"
        )


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
