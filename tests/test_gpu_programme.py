"""The GPU programme: its parts, its table, and that a part which hangs or fails does not take the others with it.

A GPU is lent for a quarter of an hour. A programme that stops at its first hang, or that prints at its end what it had
measured until it was cut off, would waste it; so would one whose names do not exist.
"""

from __future__ import annotations

import importlib
import json
import re
from argparse import Namespace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_programme, gpu_report
from bench.gpu_programme import BLOCKS, MISS, NO_TIME, NOT_HERE, OK, Case, Part, Programme, main, parser, parts_of

BENCH = Path(gpu_programme.__file__).parent


def options(*words: str) -> Namespace:
    return parser().parse_args(list(words))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("block", sorted(BLOCKS))
def test_every_part_says_what_it_expects(block: int, kind: str) -> None:
    parts = parts_of(block, kind, options("--block", str(block), "--device", kind))
    names = [(part.name, case.name) for part in parts for case in part.cases]
    assert len(set(names)) == len(names) > 4 - 3 * (block == 3)
    for part in parts:
        module, _, name = part.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), part.function
        assert all(case.expected and case.look and case.limit_s < 400 for case in part.cases), part.name
        # A prediction names where it comes from.
        assert all("stored" in case.expected or "model" in case.expected for case in part.cases if case.predicted)


def test_what_only_cuda_has_is_at_one_place_and_exists() -> None:
    """These lines run for the first time on the day on which there is a GPU."""
    modules = ("gpu_programme", "gpu_nccl", "gpu_costs", "gpu_train")
    assert not [name for name in modules if "torch.cuda" in Path(f"{BENCH}/{name}.py").read_text(encoding="utf-8")]
    used = set(re.findall(r"torch\.(cuda[.\w]*)", Path(f"{BENCH}/gpu_device.py").read_text(encoding="utf-8")))
    assert len(used) > 10
    for name in used:
        assert attrgetter(name)(torch), name


def test_a_list_is_printed_and_an_unknown_part_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--block", "1", "--device", "cpu", "--list", "--parts", "alone"])
    assert "expected: alone, stage 3, far ahead: to the bit" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--parts alon: block 1 has .*'alone'"):
        main(["--block", "1", "--device", "cpu", "--list", "--parts", "alon"])
    with pytest.raises(SystemExit, match="--block"):
        main([])


def _run(tmp_path: Path, parts: list[Part], minutes: float = 1.0) -> dict[str, Any]:
    file = tmp_path / "found.json"
    Programme("cuda", minutes, file, {"block": 1}).run(parts)
    run: dict[str, Any] = json.loads(file.read_text())
    return run


def _part(*cases: Case, **more: Any) -> Part:
    return Part("planted", "tests.support.planted_parts:planted", cases, **more)


@pytest.mark.processes
def test_what_hangs_or_fails_is_cut_off_and_the_rest_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_programme, "STACKS_S", 1.0)
    names = ("runs", "differs", "hangs", "raises", "is not here", "dies", "goes on")
    predicted = Case("is predicted", "42 s", "the clock", 40.0, "s")
    late = Case("is late", "20 s", "the clock", 20.0, "s")
    cases = [Case(name, "42", f"the source of {name}", limit_s=1.0) for name in names]
    absent = Part("absent", "tests.support.planted_parts:planted", (Case("runs", "42"),), absent="no GPU")
    run = _run(tmp_path, [_part(*cases, predicted, late), absent])
    rows = {(row["part"], row["case"]): row for row in run["rows"]}
    verdicts = {name: row["verdict"] for (part, name), row in rows.items() if part == "planted"}
    wrong = dict.fromkeys(("differs", "hangs", "raises", "dies", "is late"), MISS)
    assert verdicts == {"runs": OK, "is not here": NOT_HERE, "goes on": OK, "is predicted": OK, **wrong}
    assert rows["absent", "runs"]["verdict"] == NOT_HERE and run["device"] == "a planted one"
    assert rows["planted", "hangs"]["measured"].startswith("no end within 1 s")
    look = rows["planted", "hangs"]["look"]
    assert "the source of hangs; logs " in look and "planted_parts.py" in look and "in planted" in look
    assert "a planted error" in rows["planted", "raises"]["measured"] and "-9" in rows["planted", "dies"]["measured"]
    assert "1.05 of the prediction" in rows["planted", "is predicted"]["measured"]
    stacks = [log.read_text() for log in tmp_path.glob("found.files/*.log")]
    assert any("planted_parts.py" in text and "Current thread" in text for text in stacks), "a hang shows its stack"
    capsys.readouterr()
    main(["--show", str(tmp_path / "found.json")])
    out = capsys.readouterr().out
    assert "| planted | hangs | 42 | no end within 1 s | MISS |" in out and "5 of 10 are not as expected" in out


@pytest.mark.processes
def test_a_rank_that_fails_ends_its_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_programme, "STACKS_S", 0.1)
    run = _run(tmp_path, [_part(Case("rank 1 raises", "42"), Case("goes on", "42"), ranks=2)])
    first, second = run["rows"]
    assert (first["verdict"], second["verdict"]) == (MISS, OK) and first["seconds"] < 30
    assert first["measured"] == "rank 1 ended with 1: ValueError: a planted error of rank 1"


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    run = _run(tmp_path, [_part(Case("runs", "42"))], minutes=0.01)
    assert [row["verdict"] for row in run["rows"]] == [NO_TIME]


def test_cases_are_chosen_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--block", "1", "--device", "cpu", "--list", "--parts", "four ranks", "--cases", "hpZ", "expert"])
    listed = [
        line.removeprefix("expected: four ranks, ").split(":")[0] for line in capsys.readouterr().out.splitlines()
    ]
    assert listed == ["first all-reduce", "hpZ, 2 x 2", "qwZ, qgZ, hpZ", "expert parallelism, 2 x 2"]


def test_a_result_becomes_a_table_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"part": "1.5B", "case": "x", "expected": "1 s", "measured": "2 s", "verdict": MISS, "look": "the trace"}
    rows = [{**row, "figures": {"value": 2.0}}, {**row, "case": "y", "measured": "wrong", "figures": {}}]
    file = tmp_path / "found.json"
    run = {"block": 2, "device": "a card", "torch": "2.11", "rows": rows, "notes": ["y was a mistake of the case."]}
    file.write_text(json.dumps(run))
    kept: dict[str, Any] = {}
    monkeypatch.setattr(gpu_programme, "keep", lambda run, text, name: kept.update(name=name, text=text, **run))
    main(["--show", str(file), "--keep", "h100-block2"])
    assert kept["name"] == "programme-h100-block2" and kept["text"] in capsys.readouterr().out
    (tmp_path / "2026-11-27-programme-h100-block2.json").write_text(json.dumps({**kept, "date": "2026-11-27"}))
    lines = list(gpu_report.programme(tmp_path))
    assert lines[0] == "### What offload costs" and "| x | 1 s | 2 s |" in lines
    assert "2 cases," in lines[2] and lines[3].startswith("1 as expected")
    assert "- y was a mistake of the case." in lines and not any("| y |" in line for line in lines)
    assert "- 1.5B, x: look at the trace" in kept["text"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_missing_wait_is_found(tmp_path: Path) -> None:
    """Collectives that go through groups of one rank and end late: without waits the losses are others."""
    cases = [Case("stage 2", "equal"), Case("stage 3, far ahead", "equal")]
    faulty = Part("faulty", "tests.support.planted_parts:without_waits", tuple(cases))
    sound = Part("sound", "bench.gpu_nccl:alone", tuple(cases))
    programme = Programme("cpu", 4.0, tmp_path / "found.json", {"block": 1})
    programme.run([sound, faulty])
    assert [row.verdict for row in programme.rows] == [OK, OK, MISS, MISS], programme.rows


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_block_1_over_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of block 1 as on a GPU, tiny, with the collectives that NCCL's ranks use."""
    file = tmp_path / "block1.json"
    with pytest.raises(SystemExit):
        main(["--block", "1", "--device", "cpu", "--minutes", "12", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert {(row["part"], row["case"]): row["measured"] for row in rows if row["verdict"] in (MISS, NO_TIME)} == {}
    assert sum(row["verdict"] == OK for row in rows) > 40
    assert "0 of " in capsys.readouterr().out
