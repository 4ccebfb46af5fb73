"""`python -m hf_zero report`: the information it shows about a machine, and what it omits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_zero.__main__ import main
from hf_zero.offload.vector import StorageError
from hf_zero.report import environment
from hf_zero.report.command import cli_main
from hf_zero.report.environment import features, probe

pytestmark = pytest.mark.processes  # the report asks commands of the system


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert main(["report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hf_zero environment"]["torch"] in text and found["host"]["CPU cores"] in text
    assert found["variables"]["NCCL_DEBUG"] == "INFO" and "NCCL_DEBUG ." in text
    assert "a secret" not in text + json.dumps(found)
    assert all(("[yes] " if each["is_available"] else "[ NO] ") + each["name"] in text for each in found["features"])


def test_ds_report_takes_deepspeeds_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli_main(["--hide_operator_status", "--hide_errors_and_warnings"])
    assert capsys.readouterr().out.startswith("hf_zero environment\n")


def test_a_drive_is_probed_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "PROBE_BYTES", 1 << 22)
    found = probe(str(tmp_path), num_bytes=1 << 22)
    assert found.read > 0 and found.write > 0 and "GiB/s" in str(found) and not list(tmp_path.iterdir())
    with pytest.raises(StorageError, match="are free, the probe takes"):
        probe(str(tmp_path), num_bytes=1 << 60)
    assert main(["report", "--probe", "/no/such/folder"]) == 1
    assert "/no/such/folder" in capsys.readouterr().out


def test_what_is_not_there_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    found = list(features())
    assert all(each.note for each in found if not each.is_available)
    missing = {each.name: each.note for each in found if not each.is_available}
    assert missing["monitor wandb"] == "pip install wandb" and "C compiler" in missing["torch.compile"]


def test_ports_are_listed_without_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert ("mlx5_0 port 1", "400 Gb/sec (4X NDR), 4: ACTIVE") in list(environment.networks(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.between_devices() == ""


def test_a_program_that_hangs_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi does not return while a driver hangs, which is when one writes a report."""
    monkeypatch.setattr(environment, "_PATIENCE_S", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    smi, toolkit = tmp_path / "nvidia-smi", tmp_path / "nvcc"
    smi.write_text("#!/bin/sh\necho '| NVIDIA-SMI 580.82  Driver Version: 580.82.07  CUDA Version: 13.0 |'\n")
    toolkit.write_text("#!/bin/sh\nexec sleep 60\n")
    for program in (smi, toolkit):
        program.chmod(0o755)
    found = dict(environment.software())
    assert found["driver"] == "580.82.07" and "CUDA toolkit" not in found
    assert environment.between_devices().startswith("| NVIDIA-SMI")
