"""diffusers' training loop with hf_zero: the same UNet and averaged weights as with DDP, and resumed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file

from tests.frameworks.environments import RANKS, run
from tests.frameworks.runs import EPS, TOLERANCE, ds_config
from tests.support.launch import accelerate
from tests.support.reference import assert_same_numbers, assert_same_weights

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
EPOCHS, STEPS = 2, 8
CLIP = 0.5
MODELS = ("unet", "unet_ema")


def train(folder: Path, stage: int | None, resume: Path | None = None) -> Path:
    """A run of the script, for which only the launcher selects the engine; returns the folder that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--output_dir", folder, "--epochs", EPOCHS, "--adam_epsilon", EPS, "--max_grad_norm", CLIP]
    words += [] if resume is None else ["--resume_from_checkpoint", resume]
    if stage is None:
        run("diffusers", "diffusers_script.py", words, environment={"ACCELERATE_USE_CPU": "true"})
        return folder
    config = folder / "ds.json"
    config.write_text(json.dumps({**ds_config(stage), "gradient_clipping": CLIP}))
    flags = ["--cpu", "--use_hf_zero", "--num_processes", RANKS, "--deepspeed_config_file", config]
    run("diffusers", "diffusers_script.py", words, ranks=None, launcher=accelerate(*flags))
    return folder


@cache
def with_ddp() -> Path:
    return train(Path(mkdtemp(prefix="diffusers_ddp_")), None)


def numbers(folder: Path) -> dict[str, list[float]]:
    return json.loads((folder / "numbers.json").read_text())


def assert_same_models(folder: Path, expected: Path, tolerance: float) -> None:
    for name in MODELS:
        here, there = (load_file(path / name / "diffusion_pytorch_model.safetensors") for path in (folder, expected))
        assert_same_weights(here, there, tolerance)


@pytest.mark.parametrize("stage", [2, 3])
def test_same_as_ddp_and_goes_on_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    expected = with_ddp()
    zero = train(tmp_path / "zero", stage)
    assert len(numbers(zero)["losses"]) == STEPS
    assert max(numbers(zero)["norms"]) > CLIP  # otherwise clipping would not be tested
    for key, values in numbers(zero).items():
        assert_same_numbers(values, numbers(expected)[key], TOLERANCE, key)
    assert_same_models(zero, expected, TOLERANCE)

    resumed = train(tmp_path / "resumed", stage, resume=zero / f"checkpoint-{STEPS // 2}")
    assert numbers(resumed) == {key: values[STEPS // 2 :] for key, values in numbers(zero).items()}
    assert_same_models(resumed, zero, 0.0)
