"""Operating systems other than Linux: an error or a warning when the engine is imported."""

from __future__ import annotations

import runpy
import sys

import pytest

import hf_zero.api


def test_windows_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows failed at `import resource`, deep inside the package."""
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="WSL2"):
        runpy.run_path(hf_zero.api.__file__)


def test_other_systems_are_untried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    runpy.run_path(hf_zero.api.__file__)
    assert "it is untested on darwin" in caplog.text
