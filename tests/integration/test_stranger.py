"""A new user's first ten minutes: the wheel, README's script, and the next commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.sites import ROOT, Site, pip

STEPS = 50  # of README's script
TIMEOUT_S = 900


def script_of_readme() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if block.startswith("# train.py"))


def run(site: Site, folder: Path, *words: str) -> str:
    """The output of a command in the environment, which must succeed."""
    kept = {key: value for key, value in os.environ.items() if key not in ("HF_ZERO", "PYTHONPATH", "PYTHONHOME")}
    command = [str(site.python), *words]
    environment = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_the_first_ten_minutes(wheel: Path, tmp_path: Path) -> None:
    site = Site.empty(tmp_path / "site").borrow_libraries()
    pip("install", "--no-deps", str(wheel), python=site.python)
    folder = tmp_path / "work"
    folder.mkdir()
    script = script_of_readme()
    (folder / "train.py").write_text(script, encoding="utf-8")

    said = run(site, folder, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py")
    assert "ZeRO stage 3, fp32, 2 ranks, 8 x 1 x 2 = 16 samples per update" in said
    assert f"{STEPS} updates in " in said and "[WARNING] [hf_zero]" not in said
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", said)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    saved = load_file(folder / "out" / "model" / "model.safetensors")

    resumed = script.replace(f"max_steps={STEPS}", f"max_steps={STEPS + 5}").replace(
        "train()", "train(resume_from_checkpoint=True)"
    )
    assert resumed.count("resume_from_checkpoint") == 1 and str(STEPS + 5) in resumed
    (folder / "train.py").write_text(resumed, encoding="utf-8")
    launch = ("-m", "accelerate.commands.launch", "--use_hf_zero", "--cpu", "--num_processes", "2", "train.py")
    assert "5 updates in " in run(site, folder, *launch)
    trained = load_file(folder / "out" / "model" / "model.safetensors")
    assert not trained["lm_head.weight"].equal(saved["lm_head.weight"])

    checkpoint = f"out/checkpoint-{STEPS + 5}"
    said = run(site, folder, "-m", "hf_zero", "zero_to_fp32", checkpoint, "weights.safetensors")
    assert "Wrote weights.safetensors (" in said
    whole = load_file(folder / "weights.safetensors")
    assert all(whole[name].equal(values) for name, values in trained.items())

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "ds.json").write_text(re.findall(r"```jsonc\n(.*?)```", readme, re.DOTALL)[0], encoding="utf-8")
    assert "ds.fixed.json: no problems" in run(site, folder, "-m", "hf_zero", "explain", "ds.json", "--fix")
    (planned,) = re.findall(r"`python -m hf_zero (plan [^`]+)`", readme)
    said = run(site, folder, "-m", "hf_zero", *planned.split(), "--write", "planned.json")
    assert "; chosen" in said and (folder / "plan.html").exists()
    given = re.search(r"--per_device_train_batch_size \d+", said)
    assert given is not None
    run(site, folder, "-m", "hf_zero", "explain", "planned.json", "--world-size", "8", *given[0].split())

    frozen = pip("freeze", python=site.python)
    assert "hf-zero" in frozen.lower().replace("_", "-") and "deepspeed" not in frozen.lower()
