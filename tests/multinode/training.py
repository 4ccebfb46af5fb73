"""A short training run with examples/train_clm.py, small enough for four processes on two cores."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pytest

from tests.multinode.cluster import ROOT, Node, launch_words

SCRIPT = ROOT / "examples/train_clm.py"
STEPS = 5
GLOBAL_BATCH = 8
_CONFIG = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
_MODEL = "--hidden_size 48 --num_heads 4 --num_layers 2 --vocab_size 512 --block_size 32 --max_train_samples 64"
_RUN = "--do_train --use_cpu --learning_rate 1e-3 --seed 1 --logging_steps 1 --report_to none --disable_tqdm true"


class Training:
    """One model, its data and its losses on a single node; every run has its own folder."""

    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number, source in enumerate(sorted((ROOT / "hf_zero/step").glob("*.py"))[:12]):
            (folder / f"text{number}.py").write_text(source.read_text())

    def words(
        self, output: Path, ranks: int, steps: int = STEPS, config: dict[str, object] | None = None
    ) -> list[object]:
        """The script and its arguments for a run on `ranks` ranks, with a constant global batch.

        Args:
            config: changed values in ds.json.
        """
        settings = self.folder / f"{output.name}.json"
        settings.write_text(json.dumps(_CONFIG | (config or {})))
        text = sorted(self.folder.glob("text*.py"))
        places = ["--tokenizer_cache", self.folder / "tokenizer", "--output_dir", output]
        batch = ["--save_strategy", "no", "--max_steps", steps, "--per_device_train_batch_size", GLOBAL_BATCH // ranks]
        zero = ["--deepspeed", settings]
        return [SCRIPT, *_MODEL.split(), *_RUN.split(), *places, *batch, *zero, "--train_files", *text]

    @cached_property
    def losses(self) -> list[float]:
        """Losses of one node with two ranks."""
        return self.on_one_node(STEPS)

    @contextmanager
    def as_on_one_node(self, output: Path, sender: Node) -> Iterator[None]:
        """The run has the losses of one node, and `sender` sends at least one copy of the gradients meanwhile."""
        before = sender.sent_bytes()
        yield
        losses = losses_in(output)
        assert len(losses) == STEPS
        assert losses == pytest.approx(self.losses, rel=1e-5)
        assert sender.sent_bytes() - before > STEPS * 100_000, "gradients have not gone over the network"

    def on_one_node(self, steps: int) -> list[float]:
        """Losses of two ranks."""
        output = self.folder / f"one_node_{steps}"
        words = launch_words("--num_gpus", 2, "--master_port", 29621, *self.words(output, 2, steps))
        environment = {**os.environ, **self.environment}
        done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        return losses_in(output)


def losses_in(output: Path) -> list[float]:
    """The losses logged by Trainer, step by step."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
