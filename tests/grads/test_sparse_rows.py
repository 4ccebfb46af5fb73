"""Embedding gradients reduced by the rows that batches use: the same weights, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.comm import ledger
from hf_zero.grads.reducer import parameters_of_embeddings
from hf_zero.grads.sparse_rows import SparseRowSum
from tests.support.ranks import run_ranks
from tests.support.traffic import payloads

WORDS, PLACES, WIDTH = 1000, 12, 16


class Reader(nn.Module):
    """Looks up words in a table of which few rows are used, and positions in one of which all are used."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.places = nn.Embedding(PLACES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH + 1)  # an odd number of elements
        self.head = nn.Linear(WIDTH + 1, 7)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places.weight[: ids.shape[1]]
        return self.head(torch.tanh(self.middle(hidden))).square().mean()


def trained(
    rank: int, *, asked: bool, sparse: bool = False, dtype: str = "fp32"
) -> tuple[list[Tensor], dict[str, int]]:
    """Weights after three updates of two micro-batches each, and bytes by kind of exchange."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "sparse_gradients": asked,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = initialize(model=Reader(sparse=sparse), config=config)[0]
    assert any(isinstance(one.sparse_rows, SparseRowSum) for one in engine.gradients.assembly.reducer.buckets) is (
        asked or sparse
    )
    generator = torch.Generator().manual_seed(rank)
    ledger.reset()
    for step in range(6):
        rows = 2 if rank else 1 + step % 2  # ranks have different numbers of rows, and one rank has none
        ids = torch.randint(0, WORDS, (rows, PLACES), generator=generator)
        loss = engine(ids) if (rank, step // 2) != (1, 2) else 0 * engine(ids)
        engine.backward(loss)
        engine.step()
    return [parameter.detach().clone() for parameter in engine.module.parameters()], payloads()


def run_both(rank: int, dtype: str) -> tuple[list[list[Tensor]], list[dict[str, int]]]:
    forms = [{"asked": False}, {"asked": True}, {"asked": False, "sparse": True}]
    results = [trained(rank, dtype=dtype, **form) for form in forms]
    return [weights for weights, _ in results], [counted for _, counted in results]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_ranks_end_with_the_same_bits_and_send_rows_alone() -> None:
    results = run_ranks(run_both, 2, "fp32")
    for weights, counted in results:
        assert same(weights[0], weights[1]), "by ds.json"
        assert same(weights[0], weights[2]), "a layer made with sparse=True"
        assert same(weights[0], results[0][0][0]), "both ranks"
        dense, by_rows, of_a_layer = counted
        table = 3 * 4 * WORDS * WIDTH
        places = 3 * 4 * PLACES * WIDTH  # every row of it has a gradient
        assert dense["backward all_reduce"] - by_rows["backward all_reduce"] == table
        assert dense["backward all_reduce"] - of_a_layer["backward all_reduce"] == table
        assert places < by_rows["backward all_reduce"] < 3 * 4 * 1000
        # At most 48 rows of 64 bytes, with an index of 4 bytes each, from two ranks, in three updates.
        assert 0 < by_rows["backward all_gather"] <= 3 * 2 * 48 * 68
        assert by_rows["backward all_gather"] == of_a_layer["backward all_gather"]
        assert "backward all_gather" not in dense


def test_three_ranks_in_16_bits_add_as_dense_reductions_do() -> None:
    results = run_ranks(run_both, 3, "bf16")
    for weights, _ in results:
        assert same(weights[0], weights[1]) and same(weights[0], weights[2])
        assert same(weights[1], results[0][0][1])


def test_a_table_is_summed_by_rows_only_where_nothing_else_uses_its_weight() -> None:
    model = Reader()
    assert parameters_of_embeddings(model, all_of_them=True) == {id(model.words.weight), id(model.places.weight)}
    assert parameters_of_embeddings(model, all_of_them=False) == set()
    model.head.weight = model.words.weight
    assert parameters_of_embeddings(model, all_of_them=True) == {id(model.places.weight)}
    assert parameters_of_embeddings(Reader(sparse=True), all_of_them=False) != set()


def test_asked_for_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sparse_gradients": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    with caplog.at_level("WARNING", logger="hf_zero"):
        initialize(model=nn.Linear(2, 2), config=config)
    assert any("no embedding whose weight is its own" in record.getMessage() for record in caplog.records)
