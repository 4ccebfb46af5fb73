"""One TRL run: its command line, its ranks, and its results."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from tests.support.launch import alone_is_not_distributed
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same_numbers, assert_same_weights
from tests.trl import material

SCRIPT = Path(__file__).parent / "trl_script.py"
STAGES = (0, 1, 2, 3)
STEPS = 6
GLOBAL_BATCH = 8
EVALUATION_BATCH = 4
LEARNING_RATE = 5e-3
EPS = 1e-6  # as in Trainer's parity tests: with less, gradients that are zero except for rounding decide
TOLERANCE = 1e-5
LORA: dict[str, object] = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "q_proj v_proj"}
ADAPTERS: dict[str, dict[str, object]] = {
    "full": {},
    "lora": LORA,
    "dora": {**LORA, "use_dora": True},
    "lora_and_modules": {**LORA, "lora_modules_to_save": "lm_head"},
}


GENERATING: dict[str, object] = {"num_generations": 4, "max_completion_length": 12, "max_steps": 3, "save_steps": 3}
WAYS = {"save_steps": "checkpoint-*", "save_model": "saved", "save_pretrained": "pretrained"}


def on_every_stage(names: Iterable[str], quick: str) -> list[Any]:
    """(stage, name) of all; only `quick` at stage 3 is not slow."""
    return [
        pytest.param(
            stage, name, marks=[] if (stage, name) == (3, quick) else [pytest.mark.slow], id=f"stage{stage}-{name}"
        )
        for stage in STAGES
        for name in names
    ]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One test case: a method, the trained parameters, and the engine."""

    method: str = "sft"
    adapter: str = "full"
    stage: int | None = 2  # None: no deepspeed config at all
    processes: int = 2
    options: dict[str, object] = field(default_factory=dict)  # of the command line
    ds: dict[str, Any] = field(default_factory=dict)  # of ds.json

    @property
    def ds_config(self) -> dict[str, Any]:
        """A user's ds.json, with "auto" wherever possible."""
        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": self.stage, "stage3_gather_16bit_weights_on_model_save": True},
            **self.ds,
        }

    def words(self, folder: Path) -> list[str]:
        """The command line; writes the files that it names."""
        material.write(folder, self.method, GLOBAL_BATCH * STEPS)
        options: dict[str, object] = {
            "model_name_or_path": folder / ("reward_model" if self.method == "reward" else "model"),
            "folder": folder,
            "output_dir": folder / "out",
            "max_steps": STEPS,
            "per_device_train_batch_size": GLOBAL_BATCH // self.processes,
            "per_device_eval_batch_size": EVALUATION_BATCH,
            "learning_rate": LEARNING_RATE,
            "adam_epsilon": EPS,
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": STEPS,
            "save_only_model": True,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            **(GENERATING if self.method in ("grpo", "rloo") else {}),
            **ADAPTERS[self.adapter],
            **self.options,
        }
        if self.stage is not None:
            (folder / "ds.json").write_text(json.dumps(self.ds_config))
            options["deepspeed"] = folder / "ds.json"
        return [self.method, *(word for key, value in options.items() for word in (f"--{key}", *str(value).split()))]


@dataclass(frozen=True)
class Outcome:
    """The results of a run of the script; `saved` has the bytes of the weights by method of saving."""

    log: list[dict[str, float]]
    evaluation: dict[str, float]
    saved: dict[str, bytes]

    def column(self, name: str) -> list[float]:
        """One logged quantity, step by step."""
        return [entry[name] for entry in self.log if name in entry]

    @property
    def losses(self) -> list[float]:
        return self.column("loss")

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load(self.saved["save_model"])


def run_script(rank: int, words: list[str]) -> None:
    """Runs a rank as a launcher would, without the time for imports."""
    alone_is_not_distributed()
    from tests.trl import trl_script

    trl_script.main(words)


def run(case: Run, folder: Path) -> Outcome:
    """Run the script on the case's ranks."""
    run_ranks(run_script, case.processes, case.words(folder), init=False)
    return outcome(folder / "out")


def outcome(folder: Path) -> Outcome:
    """Read what the script wrote into its output folder."""
    numbers = json.loads((folder / "numbers.json").read_text())
    found = {way: sorted(folder.glob(name)) for way, name in WAYS.items()}
    saved = {way: _weights_file(places[-1]).read_bytes() for way, places in found.items() if places}
    return Outcome(numbers["log"], numbers["eval"], saved)


def _weights_file(folder: Path) -> Path:
    names = [name for name in ("adapter_model.safetensors", "model.safetensors") if (folder / name).exists()]
    assert len(names) == 1, f"{folder} holds {sorted(path.name for path in folder.iterdir())}"
    return folder / names[0]


_PLAIN: dict[str, Outcome] = {}


def without_engine(case: Run, processes: int = 1) -> Outcome:
    """The same run in plain PyTorch: by default one process with whole global batches."""
    plain = replace(case, stage=None, processes=processes, ds={})
    if repr(plain) not in _PLAIN:
        with tempfile.TemporaryDirectory(prefix="trl-") as folder:
            _PLAIN[repr(plain)] = run(plain, Path(folder))
    return _PLAIN[repr(plain)]


def assert_same_training(result: Outcome, expected: Outcome) -> None:
    """Compares losses of training and evaluation, and every saved tensor."""
    assert_same_numbers(result.losses, expected.losses, TOLERANCE, "losses")
    evaluations = [[outcome.evaluation["eval_loss"]] for outcome in (result, expected)]
    assert_same_numbers(*evaluations, TOLERANCE, "evaluation losses")
    assert_same_weights(result.weights, expected.weights, TOLERANCE)
