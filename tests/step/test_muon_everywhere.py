"""Muon of ds.json for any offload of states and any partition of matrices: the same as Muon in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.muon import Muon, MuonUpdater
from tests.experts.training import VOCABULARY
from tests.experts.training import model_of as experts_of
from tests.support.models import Batch
from tests.support.one_process import CLIP, batches
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

STEPS = 3
OPTIONS: dict[str, Any] = {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1}
PLACES: dict[str, dict[str, Any]] = {
    "at hand": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "cpu, ratio": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "nvme": {"offload_optimizer": {"device": "nvme", "pipeline_write": True}},
    "all on nvme": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}
TOLERANCE = 1e-5


def data_for(kind: str, number: int) -> list[Batch]:
    """Token ids within the vocabulary of both models."""
    return [{name: ids % VOCABULARY for name, ids in batch.items()} for batch in batches(number)]


@functools.cache
def model_for(kind: str) -> nn.Module:
    return experts_of("mixtral") if kind == "experts" else model_of(kind)


@functools.cache
def alone(kind: str, together: int) -> dict[str, Tensor]:
    """The weights after Muon in plain PyTorch, with `together` batches per update."""
    model = copy.deepcopy(model_for(kind))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = Muon(Muon.groups_for([{"params": list(model.parameters())}], names), **OPTIONS)
    data = iter(data_for(kind, STEPS * together))
    for _ in range(STEPS):
        for _ in range(together):
            (model(**next(data)).loss / together).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _difference(kind: str, config: dict[str, Any]) -> float:
    """The largest difference of a weight from those of one process."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "Muon", "params": OPTIONS},
        **config,
    }
    model = copy.deepcopy(model_for(kind))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    data = engine.groups.data
    for batch in data_for(kind, STEPS * data.size)[data.rank :: data.size]:
        engine.backward(engine(**batch).loss)
        engine.step()
    if data.size < engine.groups.world.size or settings["zero_optimization"]["stage"]:
        assert isinstance(engine.optimizer.updater, MuonUpdater)
    found = engine.module_state_dict()
    engine.destroy()
    return max(float((found[name] - value).abs().max()) for name, value in alone(kind, data.size).items())


def run_everywhere(rank: int, kind: str, configs: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {name: _difference(kind, config) for name, config in configs.items()}


def _zero(stage: int, place: str, folder: Path) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100, "reduce_bucket_size": 4000}
    for section, keys in PLACES[place].items():
        at = {"nvme_path": str(folder)} if keys["device"] == "nvme" else {}
        zero[section] = {**keys, **at}
    return zero


def _check(world: int, kind: str, configs: dict[str, dict[str, Any]]) -> None:
    for found in run_ranks(run_everywhere, world, kind, configs, timeout_s=280):
        assert {name: worst for name, worst in found.items() if not worst <= TOLERANCE} == {}


def _places(stage: int) -> Iterator[str]:
    for place, sections in PLACES.items():
        is_on_drive = any(keys["device"] == "nvme" for keys in sections.values())
        if (stage or not is_on_drive) and (stage == 3 or "offload_param" not in sections):
            yield place


SOME = [(0, "cpu"), (1, "cpu, ratio"), (2, "nvme"), (3, "at hand"), (3, "all on nvme")]
ALL = [(stage, place) for stage in range(4) for place in _places(stage)]


@pytest.mark.lengthy
@pytest.mark.parametrize("places", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=len)
def test_offload_at_every_stage(places: list[tuple[int, str]], tmp_path: Path) -> None:
    configs = {f"{stage} {place}": {"zero_optimization": _zero(stage, place, tmp_path)} for stage, place in places}
    _check(2, "llama", configs)


@pytest.mark.lengthy
@pytest.mark.parametrize(("world", "kind"), [(2, "uneven"), pytest.param(4, "mixtral", marks=pytest.mark.slow)])
def test_parts_of_matrices(world: int, kind: str, tmp_path: Path) -> None:
    """Each rank holds a part of most matrices; updates must be those of the whole matrices."""
    configs = {
        f"{stage} {place}": {
            "zero_optimization": _zero(stage, place, tmp_path),
            "tensor_parallel": {"autotp_size": 2},
        }
        for stage, place in ((0, "at hand"), (0, "cpu"), (1, "cpu"), (2, "nvme"), (3, "at hand"), (3, "all on nvme"))
    }
    _check(world, kind, configs)


@pytest.mark.lengthy
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_over_ranks(world: int, tmp_path: Path) -> None:
    """Experts are a batch of matrices, of which each rank has some; everything else is sharded over all ranks."""
    configs = {
        f"{stage} {place}": {
            "zero_optimization": _zero(stage, place, tmp_path),
            "expert_parallel": {"enabled": True, "autoep_size": 2},
        }
        for stage, place in ((1, "at hand"), (2, "cpu"), (3, "at hand"), (3, "nvme"))
    }
    _check(world, "experts", configs)


@pytest.mark.lengthy
def test_parts_of_experts_over_ranks(tmp_path: Path) -> None:
    """Ranks of a tensor group put parts of some experts' matrices together, without those of other experts."""
    sizes = {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 4}}
    places = [(1, "at hand"), (3, "nvme")]
    _check(4, "experts", {f"{s} {p}": {"zero_optimization": _zero(s, p, tmp_path), **sizes} for s, p in places})


def run_refused(rank: int) -> list[str]:
    said = []
    for make in (
        lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1),
        lambda model: FusedLamb(model.parameters()),
        lambda model: Adafactor(model.parameters()),
    ):
        model = copy.deepcopy(model_for("llama"))
        config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
        with pytest.raises(ValueError, match="a rank holds parts of matrices") as refused:
            deepspeed.initialize(model=model, optimizer=make(model), config=config)
        said.append(str(refused.value))
    return said


def test_optimizers_that_cannot_join_parts_are_refused() -> None:
    """A user trained with torch's Muon: each rank silently orthogonalised its own part of the matrices."""
    for said in run_ranks(run_refused, 2):
        assert [message.split()[0] for message in said] == ["Muon", "FusedLamb", "Adafactor"]
        assert all('"Muon" in ds.json' in message and "AdamW" in message for message in said)
