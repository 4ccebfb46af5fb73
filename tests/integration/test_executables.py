"""The commands `deepspeed` and `ds_report` belong to hf_zero, unless a real DeepSpeed is installed."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from hf_zero.__main__ import main
from hf_zero.launch import restore
from tests.integration.sites import Site
from tests.support.launch import ROOT

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


def test_programs_that_a_real_deepspeed_took_along_are_restored(tmp_path: Path) -> None:
    """pip installed DeepSpeed over bin/deepspeed and bin/ds_report, and removed both with it. `deepspeed train.py` was
    "command not found" from then on, although hf_zero was still installed."""
    folder = tmp_path / "with a space" / "bin"
    folder.mkdir(parents=True)
    (folder / "ds_report").write_text("#!/bin/sh\necho of somebody else\n")
    assert list(restore.restore(folder)) == [
        (f"{folder}/deepspeed: restored", False),
        (f"{folder}/ds_report: left alone, as it is not hf_zero's", False),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([folder / "deepspeed", "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "--hostfile" in done.stdout, done.stderr
    assert list(restore.restore(folder))[0] == (f"{folder}/deepspeed: in place", False)
    assert [failed for _, failed in restore.restore(tmp_path / "none")] == [True, True]


def test_the_programs_of_a_real_deepspeed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "_real_deepspeed", lambda: "0.19.8")
    assert list(restore.restore(tmp_path))[0] == (
        f"{tmp_path}/deepspeed: left to DeepSpeed 0.19.8, which is installed",
        False,
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_beside_its_own_program(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(restore, "restore", lambda folder: iter([(str(folder), False)])):
        assert main(["commands"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "hf-zero").exists()
