"""`accelerate launch --use_deepspeed` with a script that mentions neither hf_zero nor deepspeed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.sites import Site

SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.utils.data.DataLoader(torch.ones(48, 8), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for x in data:
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print("ENGINE", type(model).__module__, type(accelerator.unwrap_model(model)).__name__)
print("LOSSES", *losses)
"""


# By default test_launch_flag.py tests training under `--use_hf_zero`, and scenario 3 of test_launch_scenarios.py the
# flag for DeepSpeed.
@pytest.mark.slow
def test_the_launcher_starts_a_script_on_our_engine(full: Site, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = full.run_args(
        "-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "2", "--num_processes", "1",
        "--gradient_accumulation_steps", "2", "--gradient_clipping", "0.5", "--mixed_precision", "no",
        str(script), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert words["ENGINE"] == ["hf_zero.integration.engine.engine", "Linear"]
    losses = [float(word) for word in words["LOSSES"]]
    assert losses == pytest.approx(plain_losses(), rel=1e-5)


def plain_losses() -> list[float]:
    """The same training in plain PyTorch: two micro-batches per step, gradients clipped at 0.5."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(12):
        loss = model(torch.ones(4, 8)).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if step % 2 == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses
