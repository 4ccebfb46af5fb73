"""The wheel and the editable install: pure Python, with the startup hook in both."""

from __future__ import annotations

import ast
import base64
import configparser
import csv
import hashlib
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.integration.sites import ROOT, Site, copy_of_the_tree, pip


def test_the_wheel_is_pure_python_and_carries_the_hook(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert names.count("hf_zero.pth") == 1
    folders = ("hf_zero/", "deepspeed-stubs/", "hf_zero-")
    outside = [name for name in names if not name.startswith(folders)]
    assert outside == ["hf_zero.pth"]
    stubs = {name for name in names if name.startswith("deepspeed-stubs/")}
    assert {Path(name).suffix for name in stubs} == {".pyi", ".typed"} and "deepspeed-stubs/zero.pyi" in stubs
    suffixes = {Path(name).suffix for name in names if name.startswith("hf_zero/")}
    assert suffixes == {".json", ".md", ".py", ".typed"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_zero").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_wheel_has_the_pages_for_users(bare: Site) -> None:
    """Messages named `docs/offload.md`, and whoever had installed a wheel had no such folder."""
    listed = bare.run_args("-I", "-m", "hf_zero", "docs")
    topics = {line.split()[0] for line in listed.stdout.splitlines()}
    assert not {"architecture", "step", "deepspeed_names", "published_runs"} & topics, "pages for developers"
    assert topics >= {"index", "api", "tutorial", "offload", "troubleshooting"}, listed.stderr
    named = set()
    for path in (ROOT / "hf_zero").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                named |= set(re.findall(r"docs/(\w+)\.md", node.value))
    named -= {"config"}  # of the command that writes it
    assert len(named) > 5 and named <= topics


def test_the_record_names_every_file_with_its_true_hash(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    rows = {name: (digest, size) for name, digest, size in csv.reader(archive.read(record).decode().splitlines())}
    assert set(rows) == set(archive.namelist())
    for name, (digest, size) in rows.items():
        if name == record:
            continue
        content = archive.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(content)), name


def test_the_metadata_promises_what_the_project_promises(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(archive.read(metadata).decode())
    assert (fields["Name"], fields["Requires-Python"]) == ("hf-zero", ">=3.10")
    needed = {line.split(";")[0].strip() for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line}
    asked = configparser.ConfigParser()
    asked.read(ROOT / "setup.cfg", encoding="utf-8")
    assert needed == {line.replace(" ", "") for line in asked["options"]["install_requires"].split("\n") if line}
    assert {line.partition(">")[0] for line in needed} == {
        "torch", "transformers", "accelerate", "safetensors", "pydantic", "rich", "psutil", "numpy",
    }  # fmt: skip


def test_the_hook_is_one_line_that_site_executes() -> None:
    # site.py executes a .pth line only if it starts with "import"; it would take a second line for a path.
    text = Path(ROOT, "packaging", "hf_zero.pth").read_text(encoding="utf-8")
    assert text.startswith("import ") and text.count("\n") == 1 and text.endswith("\n")


def test_the_wheel_installs_into_an_empty_environment_and_leaves_it_again(wheel: Path, tmp_path: Path) -> None:
    """What docs/faq.md says about uninstalling: no file is left, with those that Python has compiled meanwhile."""
    site = Site.empty(tmp_path / "site")
    before = files_of(tmp_path)
    pip("install", "--no-deps", str(wheel), python=site.python)
    assert site.ask("import deepspeed; answer = deepspeed.__version__") == "0.19.8+hf.zero"
    assert list(site.packages.glob("hf_zero/**/__pycache__/*.pyc"))
    pip("uninstall", "-y", "hf-zero", python=site.python)
    assert files_of(tmp_path) == before
    assert site.ask("import importlib.util as u; answer = u.find_spec('deepspeed') is None") is True


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("first", ["deepspeed", "hf-zero"])
def test_two_packages_with_one_command(wheel: Path, tmp_path: Path, first: str) -> None:
    """Both DeepSpeed and hf_zero install a command `deepspeed`. pip lets the second overwrite the first, and
    uninstalling either removes it: of the one that stays, the command has to be installed again (docs/faq.md)."""
    real = tmp_path / "deepspeed-0.17.5-py3-none-any.whl"
    with zipfile.ZipFile(real, "w") as archive:
        archive.writestr("deepspeed/__init__.py", "")
        archive.writestr("deepspeed-0.17.5.data/scripts/deepspeed", "#!python\nprint('the real one')\n")
        info = "deepspeed-0.17.5.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.5\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    site, wheels = Site.empty(tmp_path / "site"), {"deepspeed": real, "hf-zero": wheel}
    second = next(name for name in wheels if name != first)
    for name in (first, second):
        pip("install", "--no-deps", "--no-compile", str(wheels[name]), python=site.python)
    command = site.python.with_name("deepspeed")
    assert ("the real one" in command.read_text()) is (second == "deepspeed")
    pip("uninstall", "-y", second, python=site.python)
    assert not command.exists()
    assert site.python.with_name("hf-zero").exists() is (first == "hf-zero")
    pip("install", "--no-deps", "--no-compile", "--force-reinstall", str(wheels[first]), python=site.python)
    assert ("the real one" in command.read_text()) is (first == "deepspeed")


@pytest.mark.slow  # the test suite itself runs on such an install
def test_the_editable_install_has_the_hook_and_follows_the_sources(tmp_path: Path) -> None:
    site, tree = Site.empty(tmp_path / "site"), copy_of_the_tree(tmp_path)
    # pip would look for setuptools in the empty environment; call the backend as pip does and install its wheel.
    code = "import sys; sys.path.insert(0, 'packaging'); import backend; backend.build_editable(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    pip("install", "--no-deps", str(wheel), python=site.python)
    assert site.ask("import deepspeed; answer = deepspeed.__file__").startswith(str(tree))
    # A plain path line, not an import hook of setuptools, which would slow down every interpreter start.
    assert site.ask("import sys; answer = [n for n in sys.modules if n.startswith('__editable__')]") == []


@pytest.mark.slow
def test_a_source_archive_can_build_the_wheel(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "hf_zero.pth" in zipfile.ZipFile(wheel).namelist()


TRAIN = """
    import torch, deepspeed
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": STAGE},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x, losses = torch.ones(2, 8), []
    for _ in range(5):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    answer = losses
"""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_installed_wheel_trains_without_a_launcher(full: Site, stage: int) -> None:
    losses = full.ask(TRAIN.replace("STAGE", str(stage)))
    assert len(losses) == 5
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))
