"""A dimension that hf_zero does not have: ranks that train adapters (LoRA) for different tasks on a shared base model.

This file has everything it needs: properties of its ranks, the preparation of a model, and one line to register it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.comm import ParallelGroups, ProgramGroups
from hf_zero.comm.parts import HeldPart, keep_part
from hf_zero.features import DIMENSIONS
from hf_zero.layout import Interval
from hf_zero.layout.cuts import Cut
from tests.support.ranks import run_ranks

TASKS, WORLD, WIDTH, RANK, STEPS = 2, 4, 6, 2, 5
RATE, CLIP, TOLERANCE = 0.1, 0.05, 1e-6


class Adapted(nn.Module):
    """A frozen base and an adapter for each task: A [tasks, rank, width], B [tasks, width, rank]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(TASKS, RANK, WIDTH))
        self.b = nn.Parameter(torch.randn(TASKS, WIDTH, RANK))

    def forward(self, inputs: Tensor, task: int) -> Tensor:
        """Mean loss of one task; a rank with a single adapter always uses that."""
        index = task if len(self.a) > 1 else 0
        found: Tensor = (self.base(inputs) + inputs @ self.a[index].T @ self.b[index].T).square().mean()
        return found


class AdapterGroups(ProgramGroups):
    """world 4, 2 tasks     ranks 0 and 2 train the first one's adapter, ranks 1 and 3 the second one's."""

    name = "adapter"
    samples = "own"
    weights = "parts"
    group_name = "set of adapters"
    size_name = "tasks"

    @classmethod
    def given(cls, model: Any, mpu: Any, mesh_param: Any) -> AdapterGroups | None:
        return cls.of_size(TASKS) if isinstance(model, Adapted) else None

    @classmethod
    def prepare(cls, model: Any, groups: ParallelGroups, asked: AdapterGroups | None) -> None:
        if asked is not None:
            group, intervals = groups.along(cls.name), tuple((Interval(task, task + 1),) for task in range(TASKS))
            group.broadcast([parameter.data for parameter in model.parameters()])
            for parameter in (model.a, model.b):
                keep_part(parameter, HeldPart(group, Cut(tuple(parameter.shape), 0, intervals)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def in_one_process(first: int, last: int, model: Adapted, optimizer: Any) -> list[float]:
    """Norms. Each adapter is trained on the mean over its own samples."""
    norms = []
    for step in range(first, last):
        for rank in range(WORLD):
            (model(batch(step, rank), rank % TASKS) / (WORLD // TASKS)).backward()
        norms.append(float(nn.utils.clip_grad_norm_([model.a, model.b], CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)


def engine_of(stage: int, rank: int) -> Any:
    model = Adapted()
    with torch.no_grad():  # initial values of other ranks than the first must not matter
        for parameter in model.parameters():
            parameter.add_(rank)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return initialize(model=model, optimizer=optimizer_of(model), config=config)[0]


def train(engine: Any, rank: int, first: int, last: int) -> list[float]:
    norms = []
    for step in range(first, last):
        engine.backward(engine(batch(step, rank), rank % TASKS))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def on_a_mesh(rank: int, stage: int, folder: str) -> dict[str, Any]:
    DIMENSIONS.append("tests.mesh.test_invented_dimension:AdapterGroups")
    engine = engine_of(stage, rank)
    groups = engine.groups
    told = {
        "same weights": groups.same_weights.ranks,
        "shard": groups.shard.ranks,
        "data": groups.data.size,
        "along": groups.along("adapter").ranks,
        "batch": engine.train_batch_size(),
        "held": tuple(engine.module.a.ds_shape if stage == 3 else engine.module.a.shape),
        "norms": train(engine, rank, 0, STEPS),
    }
    engine.save_checkpoint(folder, f"stage {stage}")
    told["norms"] += train(engine, rank, STEPS, 2 * STEPS)
    told["weights"] = engine.module_state_dict()
    engine.destroy()
    engine = engine_of(stage, rank)
    engine.load_checkpoint(folder, f"stage {stage}")
    told["norms again"] = train(engine, rank, STEPS, 2 * STEPS)
    DIMENSIONS.pop()
    return told


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_invented_dimension_trains_and_resumes(stage: int, tmp_path: Any) -> None:
    plain = Adapted()
    before = copy.deepcopy(plain)
    norms = in_one_process(0, 2 * STEPS, plain, optimizer_of(plain))
    assert min(norms) > CLIP and not torch.equal(plain.a[0], before.a[0])
    for rank, told in enumerate(run_ranks(on_a_mesh, WORLD, stage, str(tmp_path))):
        assert told["same weights"] == told["shard"] == (rank % 2, rank % 2 + 2)
        assert told["along"] == (rank // 2 * 2, rank // 2 * 2 + 1) and told["data"] == WORLD
        assert told["batch"] == 3 * WORLD and told["held"] == (1, RANK, WIDTH)
        assert told["norms"] == pytest.approx(norms, abs=TOLERANCE)
        assert told["norms again"] == pytest.approx(norms[STEPS:], abs=TOLERANCE)
        for name, value in plain.state_dict().items():
            assert (told["weights"][name] - value).abs().max() <= TOLERANCE, name
