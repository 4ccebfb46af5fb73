"""A user's script is type-checked against DeepSpeed's engine, as `hf_zero` and as `deepspeed`.

Names of DeepSpeed's engine were looked up in tables, so that editors and mypy took each of them for `Any`. And to
`import deepspeed` they found nothing at all: the package is not on disk, but made by the import hook.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.sites import Site

SCRIPT = """
import torch
import hf_zero

engine, optimizer, loader, schedule = hf_zero.initialize(model=torch.nn.Linear(2, 2), config="ds.json")
reveal_type(engine)
reveal_type(engine.zero_optimization_stage())
reveal_type(engine.get_global_grad_norm())
reveal_type(engine.dp_world_size)
reveal_type(engine.optimizer_name())
reveal_type(engine.save_16bit_model("folder"))
engine.set_train_batch_size("many")
engine.mpu = None
"""
REVEALED = ["DeepSpeedEngine", "int", "float | None", "int", "str | None", "bool"]


DEEPSPEED = """
import torch
import deepspeed
import deepspeed.comm as dist
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_grad

model = torch.nn.Linear(2, 2)
engine, *_ = deepspeed.initialize(model=model, config="ds.json")
reveal_type(engine)
reveal_type(engine.backward(engine(torch.ones(2)).sum()))
engine.step()
with deepspeed.zero.Init(), deepspeed.zero.GatheredParameters(model.weight, modifier_rank=0):
    reveal_type(safe_get_full_grad(model.weight))
reveal_type(FusedAdam(model.parameters()))
reveal_type(dist.get_rank())
reveal_type(deepspeed.__version__)
PipelineModule(of="a real DeepSpeed")
engine.backward(1)
"""
REVEALED_AS_DEEPSPEED = ["DeepSpeedEngine", "Tensor", "Tensor | None", "FusedAdam", "int", "str"]


def checked(script: str, folder: Path, *options: str) -> tuple[list[str], list[str]]:
    """(types that mypy reveals, errors) in `script`."""
    file = folder / "train.py"
    file.write_text(script, encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(folder), "--config-file="]
    done = subprocess.run([*mypy, *options, str(file)], cwd=folder, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1].rpartition(".")[2] for line in lines if "Revealed type" in line]
    return revealed, [line for line in lines if line.startswith("train.py") and "error:" in line]


@pytest.mark.slow  # mypy reads torch's annotations
def test_names_of_the_engine_have_types(tmp_path: Path) -> None:
    revealed, errors = checked(SCRIPT, tmp_path)
    assert revealed == REVEALED, errors
    assert [line for line in errors if "set_train_batch_size" in line], errors


@pytest.mark.slow
def test_the_wheel_has_types_for_deepspeed(full: Site, tmp_path: Path) -> None:
    revealed, errors = checked(DEEPSPEED, tmp_path, "--python-executable", str(full.python))
    assert revealed == REVEALED_AS_DEEPSPEED, errors
    assert len(errors) == 1 and 'Argument 1 to "backward"' in errors[0], errors
