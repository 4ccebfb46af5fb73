"""`hf-zero docs TOPIC` shows a page of the documentation in the terminal."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_zero.quantities import parse_all

# In a wheel (packaging/backend.py puts them there), and in a checkout.
FOLDERS = (Path(__file__).with_name("docs"), Path(__file__).resolve().parents[1] / "docs")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="hf-zero docs", description=__doc__)
    parser.add_argument(
        "topic", nargs="?", metavar="TOPIC", help="offload, or as messages have it docs/offload.md; default: list them"
    )
    topic: str | None = parse_all(parser, sys.argv[1:] if words is None else words).topic
    pages = all_pages()
    if not pages:
        sys.stderr.write(f"hf-zero docs: no pages in {' or '.join(map(str, FOLDERS))}; install hf_zero again\n")
        return 2
    if topic is None:
        width = max(map(len, pages))
        sys.stdout.writelines(f"{name.ljust(width)}  {title_of(path)}\n" for name, path in pages.items())
        return 0
    name = topic.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        close = difflib.get_close_matches(name, pages, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        sys.stderr.write(f"hf-zero docs: no page {topic!r}. {meant}`hf-zero docs` lists them\n")
        return 2
    from rich.console import Console
    from rich.markdown import Markdown

    # Links as text, because they lead to other pages, which the next command shows.
    Console().print(Markdown(pages[name].read_text(encoding="utf-8"), hyperlinks=False))
    return 0


def all_pages() -> dict[str, Path]:
    """Topic -> file of each page, sorted; empty if there are none."""
    folder = next((each for each in FOLDERS if each.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.md"))} if folder else {}


def title_of(path: Path) -> str:
    """The first heading."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
