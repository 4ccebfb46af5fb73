"""The commands `deepspeed` and `ds_report` belong to hf_zero, unless a real DeepSpeed is installed."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero
from tests.integration.sites import Site

COMMANDS = {
    "deepspeed": "hf_zero.launch.executables:deepspeed",
    "ds_report": "hf_zero.launch.executables:ds_report",
}


def run(name: str, *words: str) -> str:
    """The code of the script that pip creates for an entry point."""
    module, _, function = COMMANDS[name].partition(":")
    return f"import sys; sys.argv = {[name, *words]!r}; from {module} import {function}; {function}()"


@pytest.fixture
def with_real_programs(wheel: Path, tmp_path: Path) -> Site:
    site = Site.empty(tmp_path / "site").unpack(wheel).borrow_libraries().add_real_deepspeed()
    package = site.packages / "deepspeed"
    (package / "launcher").mkdir(exist_ok=True)
    (package / "launcher" / "__init__.py").touch()
    (package / "launcher" / "runner.py").write_text("def main():\n    print('REAL launcher')\n", encoding="utf-8")
    (package / "env_report.py").write_text("def cli_main():\n    print('REAL report')\n", encoding="utf-8")
    return site


def test_installing_makes_both_commands(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    text = archive.read(name).decode()
    assert all(f"{command} = {home}" in text for command, home in COMMANDS.items())


def test_the_launcher_is_ours_where_no_real_one_is(full: Site) -> None:
    done = full.run(run("deepspeed", "--help"))
    assert done.returncode == 0 and "--hostfile" in done.stdout and "--num_gpus" in done.stdout, done.stderr
    wrong = full.run(run("deepspeed", "--include", "a", "--exclude", "b", "train.py"))
    assert wrong.returncode == 2 and "mutually exclusive" in wrong.stderr


def test_the_report_is_ours_where_no_real_one_is(full: Site) -> None:
    done = full.run(run("ds_report"))
    assert done.returncode == 0 and "answers as deepspeed ..." in done.stdout, done.stderr


@pytest.mark.parametrize(("name", "says"), [("deepspeed", "REAL launcher"), ("ds_report", "REAL report")])
def test_a_real_deepspeed_keeps_its_programs(with_real_programs: Site, name: str, says: str) -> None:
    assert with_real_programs.run(run(name)).stdout.strip() == says


def test_asked_for_by_name_we_answer_beside_a_real_one(with_real_programs: Site) -> None:
    assert "--hostfile" in with_real_programs.run(run("deepspeed", "--help"), HF_ZERO="1").stdout


def test_the_log_announces_the_engine_as_tools_look_for_it(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("hf_zero").propagate = True
    with caplog.at_level(logging.INFO, logger="hf_zero"):
        model = nn.Linear(1, 1)
        hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config={"train_batch_size": 1})
    (found,) = [record.message for record in caplog.records if "DeepSpeed info" in record.message]
    assert "DeepSpeed info: version=0.19.8+hf.zero, git-hash=hf_zero, git-branch=hf_zero" in found
