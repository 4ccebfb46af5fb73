"""python -m hf_zero explain: rows, problems, exit status, and that it needs neither torch nor transformers."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_zero.__main__ import main
from hf_zero.config import ConfigDict, ConfigError, Views, examine, load_config
from hf_zero.config.rules import Rule
from hf_zero.config.schema.fields import rules_of
from hf_zero.config.schema.whole import whole_schema
from hf_zero.explain.command import mend, report_on, show
from tests.config import messages
from tests.support.launch import ROOT

GOOD = """{
  // a comment
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5,
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto",
    "contiguous_gradients": true, "sub_group_size": 1e9}
}"""


@pytest.fixture
def ds_json(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(GOOD)
    return path


def explained(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["explain", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def rows(content: dict[str, Any]) -> dict[str, tuple[Any, str, str]]:
    return {row["key"]: (row["value"], row["source"], row["effect"]) for row in content["settings"]}


def test_every_key_with_value_source_and_effect(
    ds_json: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"n_embd": 10}')
    flags = ("--gradient_accumulation_steps", 2, "--max_grad_norm=0.5", "--bf16", "--my_own_flag", 7)
    code, content = explained(capsys, ds_json, *flags, "--model", tmp_path, "--world-size", 4)
    table = rows(content)
    assert code == 0 and content["problems"] == [] and content["stage"] == 2
    assert table["train_batch_size"][:2] == (64, "--gradient_accumulation_steps")
    assert table["gradient_clipping"][:2] == (0.5, f"{ds_json}:6")
    assert table["bf16.enabled"][:2] == (True, "--bf16")
    assert table["optimizer.params.lr"] == (5e-5, "TrainingArguments.learning_rate (its default)", "argument of AdamW")
    assert table["zero_optimization.reduce_bucket_size"][:2] == (100, "model.config.n_embd = 10")
    assert table["zero_optimization.overlap_comm"][:2] == ("auto", "not filled in: the default")
    assert table["zero_optimization.contiguous_gradients"][2].startswith("no effect: gradients always go")
    assert table["zero_optimization.sub_group_size"][2].startswith("Size of the sub-groups of an offloaded update")
    assert table["gradient_allreduce_op"][:2] == ("mean", "default")
    assert "zero_optimization.stage3_prefetch_bucket_size" not in table
    assert content["notes"][-1] == "--my_own_flag: not a flag of TrainingArguments, ignored"


def test_without_flags_and_model_the_rest_is_still_open(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = explained(capsys, ds_json)
    table = rows(content)
    assert code == 0
    assert table["train_batch_size"][:2] == ("auto", "filled when training starts (or give Trainer's flags)")
    assert table["zero_optimization.reduce_bucket_size"][1] == "filled when training starts (or give --model)"


def test_all_shows_what_does_nothing_at_this_stage(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, content = explained(capsys, ds_json, "--all")
    effect = rows(content)["zero_optimization.stage3_max_live_parameters"][2]
    assert effect == "no effect at stage 2 (works at 3)"


def test_problems_come_together_with_status_1(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds_json.write_text(GOOD.replace("2,", "3,", 1))
    code, content = explained(capsys, ds_json, "--gradient_accumulation_steps", 2)
    assert code == 1
    found = {problem["key"]: problem for problem in content["problems"]}
    assert set(found) == {"gradient_accumulation_steps", "gradient_clipping"}
    clash = found["gradient_accumulation_steps"]
    assert clash["value"] == 3 and clash["source"] == f"{ds_json}:5"
    assert clash["other"] == {
        "name": "gradient_accumulation_steps", "value": 2, "source": "--gradient_accumulation_steps",
    }  # fmt: skip
    assert clash["rule"] and clash["fix"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.json"], "there is no such file"),
        (['{"a": 1'], "a comma or } must follow"),
        (["{}", "--model", "absent/config.json"], "its configuration cannot be read"),
        (["{}", "--learning_rate", "fast"], "invalid float value"),
    ],
)
def test_what_cannot_be_read_is_a_problem_too(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, content = explained(capsys, *words)
    assert code == 1 and message in json.dumps(content["problems"])


def test_the_table_for_people(ds_json: Path) -> None:
    report = report_on(examine(load_config(ds_json), Views(world_size=1), complete=False), name="ds.json")
    page = io.StringIO()
    show(report, Console(file=page, width=400))  # wide enough for any path of the file
    text = page.getvalue()
    for words in ("key", "value", "source", "effect", "zero_optimization.stage", "1_000_000_000", "no problems"):
        assert words in text


def test_problems_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", '{"train_batch_size": [1], "zero_optimisation": {}}']) == 1
    text = capsys.readouterr().out
    assert "problem 1: train_batch_size = [1]  [line 1 of the config text]" in text
    assert 'did you mean "zero_optimization"?' in text and "2 problems" in text


WITHOUT = """
import sys
from hf_zero.__main__ import main
code = main(["explain", "configs/zero2.json"])
assert code == 0
heavy = [name for name in ("torch", "transformers", "accelerate", "numpy") if name in sys.modules]
assert not heavy, heavy
"""


def test_it_needs_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no problems" in done.stdout


def test_the_door(ds_json: Path) -> None:
    words = [sys.executable, "-m", "hf_zero", "explain", str(ds_json), "--world-size", "0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "world_size = 0" in done.stdout


def on_paper(ds_json: Path, width: int | None = None) -> list[str]:
    environment = {**os.environ, **({} if width is None else {"COLUMNS": str(width)})}
    if width is None:
        environment.pop("COLUMNS", None)
    words = [sys.executable, "-m", "hf_zero", "explain", str(ds_json), "--world-size", "2"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("width", [80, 200])
def test_keys_and_sources_are_never_broken(width: int, ds_json: Path) -> None:
    """`COLUMNS=80 explain` through a pipe was 150 wide; on a terminal four equal columns broke keys in the middle."""
    lines = on_paper(ds_json, width)
    page = "\n".join(lines)
    for key in ("zero_optimization.stage", "zero_optimization.reduce_bucket_size", "optimizer.params.lr"):
        assert key in page
    assert f"{ds_json}:9" in page
    assert all(len(line) <= width for line in lines if str(ds_json) not in line and "note: " not in line)
    assert any(line.startswith("    Size of a bucket of gradients") for line in lines) == (width == 80)


def test_a_pipe_without_a_width_is_as_wide_as_it_reads_well(ds_json: Path) -> None:
    assert max(map(len, on_paper(ds_json))) >= 100


BROKEN = """{
  // five things that need no decision
  "train_micro_batch_size_per_gpu": 1,
  "gradient_clippping": 0.5,
  "my_note": 1,
  "optimizer": {"type": "AdamWW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_param": {"device": "cpu"},
    "contiguous_gradients": true},
  "bf16": {"enabled": "perhaps"}
}"""


def test_fix_writes_the_mended_file(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds_json.write_text(BROKEN)
    code, content = explained(capsys, ds_json, "--fix")
    target = ds_json.with_name("ds.fixed.json")
    assert json.loads(target.read_text()) == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True},
        "bf16": {"enabled": "perhaps"},
    }
    # A problem that needs a decision remains, with its place in the new file, and determines the exit status.
    assert code == 1 and [(x["key"], x["source"]) for x in content["problems"]] == [("bf16.enabled", f"{target}:17")]
    assert content["warnings"] == [] and ds_json.read_text() == BROKEN
    assert {note.partition(" ")[2] for note in content["notes"] if note.startswith("--fix: ")} == {
        "gradient_clippping becomes gradient_clipping",
        "my_note is removed",
        "optimizer.type becomes 'AdamW'",
        "zero_optimization.cpu_offload becomes zero_optimization.offload_optimizer = {'device': 'cpu'}",
        "zero_optimization.offload_param is removed",
    }
    code, content = explained(capsys, ds_json, "--fix")
    assert code == 1 and content["problems"][0]["rule"] == "it already exists" and target.exists()


def test_fix_opens_what_contradicts_the_flags(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ds_json.with_name("other.json")
    flags = ("--gradient_accumulation_steps", 4, "--max_grad_norm", 0.5)
    code, _ = explained(capsys, ds_json, "--fix-to", target, *flags)
    assert code == 0 and json.loads(target.read_text())["gradient_accumulation_steps"] == "auto"


# Fixes that name a key and its value, or a removal.
LITERAL = re.compile(
    r"""did\ you\ mean\ ["\w.]+\? | write\ (?:\{".*|"auto") | add\ "type":.* | keep\ (?:only|bf16\ and\ set)\ .*
    | remove\ (?:it|the\ (?:key|section)|train_batch_size|tensor_parallel)\b(?!;\ there|,\ or\ write\ one).*
    | set\ (?:it|[\w.]+)(?::\ \S+\ at|\ to\ (?:\d$|"\w+"|true|false))\b.* | set\ it\ to\ "\w+" """,
    re.VERBOSE,
)


def test_fix_mends_every_message_whose_fix_is_literal() -> None:
    """`explain --fix` mended one of the three errors in README: "did you mean" was applied to keys of sections, but not
    to arguments of an optimizer, and neither were "set fp16.enabled to false" and 'write {"enabled": true}'."""
    number = 0
    for given in messages.CONFIGS:
        try:
            config = messages.with_batch(given)
        except ConfigError:
            continue  # not JSON
        before = examine(config, messages.VIEWS, complete=False).problems
        mended, changes = mend(config, messages.VIEWS)
        after = {(problem.path, problem.rule) for problem in examine(mended, messages.VIEWS, complete=False).problems}
        for problem in before:
            is_literal = LITERAL.fullmatch(problem.fix) is not None
            assert is_literal == (problem.edit is not None), problem
            if is_literal:
                number += 1
                assert changes and (problem.path, problem.rule) not in after, problem
    assert number > 20


def test_every_rule_with_a_literal_fix_has_its_edit() -> None:
    rules = [rule for rule in rules_of(whole_schema()) if isinstance(rule, Rule) and "{" not in rule.fix]
    assert len(rules) > 20
    assert [rule.fix for rule in rules if LITERAL.fullmatch(rule.fix) and rule.edit is None] == []


def test_fix_mends_the_example_of_the_readme(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ds_json.write_text(readme.partition("```jsonc\n")[2].partition("```")[0])
    code, content = explained(capsys, ds_json, "--fix")
    assert code == 0 and content["problems"] == []
    assert json.loads(ds_json.with_name("ds.fixed.json").read_text()) == {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bf16": True}, {"bf16": {"enabled": True}}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": "cpu", "cpu_offload": True, "offload_optimizer": {}}},
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {}}},
        ),
        ({"optimizer": {"params": {"lr": 1}}}, {"optimizer": {"params": {"lr": 1}, "type": "AdamW"}}),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1, "max_grad_norm": 2.0}}},
            {"optimizer": {"type": "AdamW", "params": {"lr": 1}}, "gradient_clipping": 2.0},
        ),
        (
            {"zero_optimization": {"stage": 1}, "hf_zero": {"streaming": {"enabled": True}}},
            {
                "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
                "hf_zero": {"streaming": {"enabled": True}},
            },
        ),
        ({"compile": {"deepcompile": True}}, {}),
    ],
)
def test_fix_writes_what_the_message_says(given: dict[str, Any], expected: dict[str, Any]) -> None:
    batch = {"train_batch_size": 2}
    assert mend(ConfigDict({**batch, **given}), messages.VIEWS)[0] == {**batch, **expected}


def test_a_drive_that_this_machine_lacks_is_a_warning(ds_json: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` did not look at nvme_path; the error came when the model had been built. It may run on another machine
    than the training, so that it is no problem of the config."""
    offload = {"device": "nvme", "nvme_path": "/nowhere/at/all"}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": {**offload, "nvme_path": str(ds_json.parent)}}
    ds_json.write_text(json.dumps({"train_batch_size": 2, "zero_optimization": zero}))
    code, content = explained(capsys, ds_json)
    assert code == 0 and content["warnings"] == [
        "zero_optimization.offload_optimizer.nvme_path = '/nowhere/at/all' is not an existing folder of this machine: "
        "mount the drive, or create the folder"
    ]


VALID = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


@pytest.mark.parametrize("words", [["--fix", "new.json"], ["--fix-to=new.json"], ["--fix", "new.json", "--bf16"]])
def test_fix_leaves_valid_values_and_then_writes_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--fix mended.json` took the name for a flag of TrainingArguments. It wrote ds.fixed.json instead, and replaced
    lr 0.001 and the batch sizes by "auto", because they differ from Trainer's defaults. Similarly, without --world-size
    a total for 4 ranks contradicts one rank, and was removed. Later it wrote a copy without the comments, in which
    nothing was mended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(VALID))
    _, content = explained(capsys, "ds.json", *words)
    assert "--fix: nothing to fix that needs no decision; no file was written" in content["notes"]
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]
    code, content = explained(capsys, "ds.json", "--world-size", 4)
    assert code == 0 and not content["problems"]
    code, content = explained(capsys, "ds.json")
    assert code == 1 and "--world-size N" in content["notes"][-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mended.json"], "neither a flag nor the value of one"),
        (["--bf16", "true", "mended.json"], "neither a flag nor the value of one"),
        (["--fixx", "mended.json"], "did you mean --fix?"),
        (["--word-size", "2"], "did you mean --world-size?"),
        (["--learning_ratee=3"], "did you mean --learning_rate?"),
    ],
)
def test_words_that_are_not_understood_are_errors(
    words: list[str], message: str, ds_json: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, content = explained(capsys, ds_json, *words, "--fix")
    assert code == 1 and message in json.dumps(content["problems"])
    assert not ds_json.with_name("ds.fixed.json").exists()
