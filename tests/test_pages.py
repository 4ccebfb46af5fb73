"""`hf-zero docs`: the pages in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero import pages
from hf_zero.__main__ import main


def test_topics_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["offload"] == "Offload"
    assert lines.keys() == {path.stem for path in (Path(pages.__file__).parents[1] / "docs").glob("*.md")}


@pytest.mark.parametrize("topic", ["choosing", "choosing.md", "docs/choosing.md", "docs/choosing.md#next"])
def test_a_page_is_shown_by_any_spelling_of_its_name(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", topic]) == 0
    shown = capsys.readouterr().out
    assert "Choosing a config" in shown and "offload (offload.md)" in shown
    assert "#" not in shown.split("\n")[0] and "<svg" not in shown


def test_an_unknown_topic_is_an_error_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "ofload"]) == 2
    assert (
        capsys.readouterr().err == "hf-zero docs: no page 'ofload'. Did you mean offload? `hf-zero docs` lists them\n"
    )


def test_without_pages_the_command_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "FOLDERS", (tmp_path / "docs",))
    assert main(["docs", "offload"]) == 2
    assert f"no pages in {tmp_path / 'docs'}" in capsys.readouterr().err
