"""docs/tutorial.md: its files are written and its commands typed, in its order, with a tiny model on CPU ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.planning.candidates import Training
from tests.planning.material import planned
from tests.support.launch import a_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
TINY = {  # as the page itself says, and a hundredth of the updates
    "meta-llama/Llama-3.1-8B": "tiny",
    "--num_gpus 8": "--num_gpus 2",
    "--bf16 true": "--bf16 true --use_cpu true",
    r"(?<=[- ]\d)00\b": "",
}
PROGRAMS = {"python": [sys.executable], "hf-zero": [sys.executable, "-m", "hf_zero"]}


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every block of the page, in its order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # seven processes that load transformers, and three trainings
def test_the_tutorial_works_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    """Pages had single commands, each parsed by its own test; nobody had tried that they work one after the other: that
    the ds.json of `plan` trains, that its checkpoint resumes elsewhere, and that the export loads."""
    said = {}
    for language, text in blocks():
        if language == "python":
            (tmp_path / text.split(":")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
            continue
        for tiny, ours in TINY.items():
            text = re.sub(tiny, ours, text)
        for command in text.splitlines():
            program, *words = command.split()
            if program == "pip":
                continue
            if words[0] == "launch":  # other tests on this machine launch, too
                words[1:1] = ["--master_port", str(a_port())]
            done = subprocess.run(
                [*PROGRAMS[program], *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=280,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            said[command] = done.stdout + done.stderr
    trained = [text for command, text in said.items() if "finetune.py" in command]
    assert [re.findall(r"(?m)^.*stage (\d)", text)[0] for text in trained] == ["1", "3", "3"]
    weights = {}
    for name in ("tiny", "exported"):
        weights[name] = load_file(next((tmp_path / name).glob("*.safetensors")))
    assert weights["tiny"].keys() == weights["exported"].keys()
    assert {values.dtype for values in weights["exported"].values()} == {torch.bfloat16}
    assert not torch.equal(weights["tiny"]["lm_head.weight"].bfloat16(), weights["exported"]["lm_head.weight"])
    assert "def train(" in list(said.values())[-1]


@pytest.mark.parametrize("number", [1, 2, 8])
def test_plan_chooses_what_the_tutorial_says(number: int) -> None:
    chosen = planned("8b", Training(length=2048), gpus_per_node=number, host_memory=None).chosen
    assert chosen is not None
    name = re.sub(r"\d+% of", "part of", chosen.candidate.name)
    assert f"| {number} | {name} |" in PAGE
