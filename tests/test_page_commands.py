"""Commands in the docs: each is run, or parsed by its own parser, or listed here with the reason why not."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_zero
from bench import plan_plot, readme_figure
from hf_zero.__main__ import main
from hf_zero.config import ConfigError
from hf_zero.launch import LaunchError
from hf_zero.launch.command_line import parse as parse_launch
from hf_zero.planning.show import batch_of
from tests.config.deepspeed_answers import ask_deepspeed
from tests.support.models import stack, tiny_llama, token_rows
from tests.support.requirements import requires

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md", "bench/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PROGRAM = re.compile(r"(\S*/)?(python3?|hf-zero|deepspeed|ds_report|make|torchrun|accelerate|pip|sbatch|trl|swift)$")
NEITHER = {  # first word, or module: why the command is neither run nor parsed
    "pip": "installs something",
    "trl": "its parsers are those of TRL's trainers; tests/trl starts it",
    "swift": "ms-swift is not installed; make test-frameworks runs it",
    "axolotl": "axolotl is not installed; make test-frameworks runs it",
    "llamafactory-cli": "LLaMA-Factory is not installed; make test-frameworks runs it",
    "sbatch": "Slurm is not installed; tests/examples reads the script",
    "./zero_to_fp32.py": "stands in a checkpoint; tests/checkpoint runs it",
    "examples/clusters/ray_train.py": "imports Ray, which is not installed; make test-all runs it",
    "tiny_model.py": "stands on its page; tests/examples/test_tutorial.py runs it",
    "generate.py": "stands on its page; tests/examples/test_tutorial.py runs it",
    "docs/api.py": "reads sys.argv; tests/api/test_surfaces.py calls it",
    "docs/deepspeed_names.py": "reads sys.argv; tests/api/test_surfaces.py calls it",
}
# Pages with blocks that show files, states or output, which are not commands.
SHOWN = {"architecture.md", "checkpoints.md", "profiling.md", "step.md", "versions.md"}
STANDS_FOR = {"N": "2", "MODEL": "model", "FOLDER": "model", "...": ""}  # placeholders; "": further arguments


def commands() -> Iterator[tuple[str, str, bool]]:
    """(page, command, whether it is complete) of commands in blocks and in sentences."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines() if language in ("", "bash") else []
            for line in lines if page.name not in SHOWN or any(map(is_command, lines)) else []:
                if line.strip() and (is_command(line) or page.name not in SHOWN):
                    yield page.name, " ".join(line.partition("  #")[0].split()), True
        for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if len(code.split()) > 1 and is_command(code) and not re.search(r"[\[>]|^deepspeed \d", code):
                yield page.name, " ".join(code.split()), False


def is_command(line: str) -> bool:
    words = without_variables(line.split())
    return bool(words) and (PROGRAM.match(words[0]) is not None or words[0] in NEITHER)


def without_variables(words: list[str]) -> list[str]:
    return words[1:] if words and re.match(r"[A-Z_]+=", words[0]) else words


class Understood(BaseException):
    """The arguments have been parsed; other tests check what the program does with them."""


Read = Callable[[Callable[[], object], list[str]], None]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Starts a program and stops it once its parser has accepted all words; AssertionError if it rejects them."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        _, unknown = original(self, *args, **kwargs)
        assert not unknown, f"no such arguments: {unknown}"
        raise Understood

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise AssertionError(message)

    def start(program: Callable[[], object], words: list[str]) -> None:
        with monkeypatch.context() as patch, pytest.raises(Understood):
            patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
            patch.setattr(argparse.ArgumentParser, "error", refuse)
            patch.setattr(sys, "argv", words)
            program()

    return start


def check(words: list[str], read: Read) -> None:
    """Runs a command, or has its parser read it."""
    program, *more = words
    program = program if program in NEITHER else program.rpartition("/")[2]
    if program in NEITHER or (program == "python" and more[0] in NEITHER):
        return
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert {word for word in more if "=" not in word} <= {*re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE)}
        if more[0] == "bench" and len(more) > 1:
            check(["python", "-m", "bench.engine", *more[1].partition("=")[2].split()], read)
        return
    if program == "python" and more[0] == "-m":
        module, more = more[1], more[2:]
        if module not in ("hf_zero", "torch.distributed.run"):
            with pytest.MonkeyPatch.context() as patch:
                patch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that a test has imported
                read(lambda: runpy.run_module(module, run_name="__main__"), [module, *more])
            return
        program = {"hf_zero": "hf-zero"}.get(module, "torchrun")
    ours = {"hf-zero": more, "ds_report": ["report", *more], "deepspeed": ["launch", *more]}.get(program)
    if ours is not None and ours[0] == "explain":
        assert main(ours) == 0
    elif ours is not None and ours[0] == "launch":
        parse_launch(ours[1:])
    elif ours is not None:
        read(lambda: main(ours), ["hf-zero", *ours])
    elif program == "torchrun":
        read(importlib.import_module("torch.distributed.run").main, [program, *more])
    elif program == "accelerate" and more[0] == "launch":
        words = [program, *(word for word in more[1:] if word != "--help")]
        read(importlib.import_module("accelerate.commands.launch").main, words)
    else:
        assert words == ["accelerate", "config"], "neither run nor read: give it a place in check(), or in NEITHER"


DS_JSON = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "stage3_gather_fp16_weights_on_model_save": True},  # an old name
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that pages name."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "ds.json").write_text(json.dumps(DS_JSON))
    (tmp_path / "ds_8.json").symlink_to(ROOT / "configs" / "zero3.json")  # as docs/tutorial.md has `plan` write it
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # torchrun's, for output that pytest captures
def test_commands_on_pages_can_be_typed(folder: Path, read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    """The troubleshooting page had `explain ds.json --fix mended.json`, which did not write mended.json: --fix took no
    path, and the word counted as a flag of TrainingArguments. So valid values contradicted those defaults and became
    "auto" in another file. Nobody had tried the commands of the docs."""
    seen, wrong = set(), []
    for page, command, complete in commands():
        if command in seen:
            continue
        seen.add(command)
        words = without_variables([STANDS_FOR.get(word, word) for word in shlex.split(command, comments=True)])
        try:
            check([word for word in words if word], read)
        except (AssertionError, ImportError, LaunchError) as error:
            if complete or not re.search("are required|expected one argument", str(error)):
                wrong.append(f"{page}: {command}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) > 90
    mended = json.loads((folder / "mended.json").read_text())
    assert mended == {
        **DS_JSON,
        "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
    }


def python_blocks() -> Iterator[tuple[str, str]]:
    """(page, code) of every block of Python."""
    for page in PAGES:
        for block in re.findall(
            r"^ *```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            yield page.name, textwrap.dedent(block)


def test_python_on_pages_can_be_read_and_imports_what_is_there() -> None:
    for page, block in python_blocks():
        for node in ast.walk(ast.parse(block, filename=page)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), f"{page}: {ast.unparse(node)}"


def test_the_code_of_the_readme_trains_as_it_stands(folder: Path) -> None:
    """README's own loop used configs/zero2.json, which is for Trainer: its batch size is "auto" and it has no
    optimizer. Pasted, the loop raised a ConfigError."""
    script, own_loop = (code for page, code in python_blocks() if page == "README.md" and "train" in code)
    assert script.count("max_steps=50, ") == 1
    names: dict[str, Any] = {}
    try:
        exec(script.replace("max_steps=50, ", "max_steps=2, use_cpu=True, "), names)
    finally:
        unset_hf_deepspeed_config()  # otherwise the next model of this process is partitioned on creation
    assert names["trainer"].state.global_step == 2
    assert load_file(folder / "out" / "model" / "model.safetensors")["lm_head.weight"].shape == (256, 256)
    model, rows = tiny_llama(), token_rows(8)
    before = model.lm_head.weight.detach().clone()
    exec(own_loop, {"model": model, "loader": [stack(rows[:4]), stack(rows[4:])]})
    assert not torch.equal(before, model.lm_head.weight)


def the_error_of_the_readme() -> list[str]:
    """A ds.json, DeepSpeed's error for it, and hf_zero's."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```(?:jsonc|text)\n(.*?)\n```", readme, flags=re.DOTALL | re.MULTILINE)


def test_the_error_of_the_readme_is_what_its_config_gives(folder: Path) -> None:
    config, _, error = the_error_of_the_readme()
    (folder / "ds.json").write_text(config)
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        hf_zero.initialize(model=torch.nn.Linear(4, 4), config="ds.json")


THREE_RUNS = """
import os, torch, deepspeed
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
answer = []
for old, new in ("", ""), ("offload_optimiser", "offload_optimizer"), ('"fp16": {"enabled": true}', '"fp16": {}'):
    given = given.replace(old, new)
    try:
        deepspeed.initialize(model=torch.nn.Linear(4, 4), config=json.loads(given))
    except Exception as error:
        answer.append(f"{type(error).__name__}: {error}")
"""


@pytest.mark.oracle
@requires(oracle=True)
def test_deepspeed_needs_three_runs_for_it(folder: Path) -> None:
    """Each with the previous run's error fixed."""
    config, said, _ = the_error_of_the_readme()
    answers = [answer.partition(" [type=")[0] for answer in ask_deepspeed(THREE_RUNS, config, folder)]
    assert answers == re.split(r"\n(?=\S+Error: )", said)


def test_the_figures_of_the_readme_are_those_of_its_result() -> None:
    for page in readme_figure.PAGES:
        text = page.read_text(encoding="utf-8")
        assert readme_figure.with_table(text) == text
        assert readme_figure.RESULT.with_suffix(".md").relative_to(ROOT).as_posix() in text


@pytest.mark.lengthy
def test_the_picture_of_a_plan_is_of_this_plan() -> None:
    """README's picture showed 12 samples as the best batch and 74.6 GB, when `plan` had long said 8, and 55.9 GB."""
    found = plan_plot.example()
    rows = plan_plot.described(found)
    assert f"\0{rows}".encode() in plan_plot.FILE.read_bytes(), "python -m bench.plan_plot draws it again"
    assert found.chosen is not None
    assert f"`{batch_of(found.chosen)}`" in (ROOT / "README.md").read_text(encoding="utf-8")
