"""ms-swift's command with hf_zero, with its own ds.json files: the same model as with DDP, saved and resumed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.frameworks.environments import interpreter, run
from tests.frameworks.material import write_instructions, write_language_model
from tests.frameworks.runs import STEPS, assert_same_runs, flags, left_by
from tests.support.launch import a_port

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]
LAST = f"checkpoint-{STEPS}"
METHODS: dict[str, dict[str, object]] = {
    "full": {"tuner_type": "full"},
    "lora": {"tuner_type": "lora", "lora_rank": 4, "lora_dropout": 0, "target_modules": "q_proj v_proj"},
}
FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


def train(folder: Path, method: str, deepspeed: str | None, resume: Path | None = None) -> Path:
    """`swift sft` on two ranks; `deepspeed` names one of ms-swift's files. Returns the folder that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {
        "model": write_language_model(folder / "model"),
        "model_type": "llama",
        "template": "dummy",
        "check_model": False,
        "dataset": write_instructions(folder / "rows.json"),
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "fp16": False,  # otherwise it trains an fp32 model with autocast
        "bf16": False,
        "add_version": False,
        **METHODS[method],
        **flags(folder, None, resume),
    }
    if deepspeed is not None:
        settings["deepspeed"] = deepspeed
    words = [word for name, value in settings.items() for word in (f"--{name}", *str(value).split())]
    launcher = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(a_port())}
    command = Path(interpreter("swift")).with_name("swift")
    run("swift", command, ["sft", *words], ranks=None, environment=launcher)
    return folder / "out"


@cache
def with_ddp(method: str) -> Path:
    return train(Path(mkdtemp(prefix="swift_ddp_")), method, None)


@pytest.mark.parametrize(("deepspeed", "method"), [("zero2", "full"), ("zero3", "full"), ("zero3", "lora")])
def test_same_as_ddp(deepspeed: str, method: str, tmp_path: Path) -> None:
    zero, expected = train(tmp_path / "zero", method, deepspeed), with_ddp(method)
    assert_same_runs(left_by(zero / LAST, FILES[method]), left_by(expected / LAST, FILES[method]))

    resumed = train(tmp_path / "resumed", method, deepspeed, resume=zero / f"checkpoint-{STEPS // 2}")
    assert_same_runs(left_by(resumed / LAST, FILES[method]), left_by(zero / LAST, FILES[method]), 0.0)
