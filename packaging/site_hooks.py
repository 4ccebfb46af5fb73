"""mkdocs hooks: add a page of benchmark results and CONTRIBUTING as a page, and unlink files outside docs/.

The pages are written for the repository, where `../configs/zero2.json` is a valid link. The site has no such file, so
links to it become plain text.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_SHOWN = {"cpu_s": "CPU seconds per step and rank", "peak_mb": "peak MB per rank, above the imports"}


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=_SIBLINGS.sub(r"\1", contributing)))
    files.append(File.generated(config, "measured.md", content=measured()))
    for name, svg in plots().items():
        files.append(File.generated(config, f"plots/{name}.svg", content=svg))
    return files


# CONTRIBUTING.md links to siblings in the repository root; on the site, pages of docs/ are its siblings, too.
_SIBLINGS = re.compile(r"\[([^\]]+)\]\((?!https?:|#)(?!\w+\.md)[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside docs/ by their text; CONTRIBUTING is a page."""
    markdown = markdown.replace("](../CONTRIBUTING.md", "](contributing.md")
    markdown = re.sub(r"\]\(\.\./bench/results/[^)]+\)", "](measured.md)", markdown)
    return _OUTSIDE.sub(lambda match: match.group(1), markdown)


def results() -> list[Path]:
    """The reports under bench/results, newest first."""
    return sorted((ROOT / "bench" / "results").glob("*.md"), reverse=True)


def measured() -> str:
    """All reports on one page, below the plots."""
    parts = [
        "# Measured\n\nThe reports of `bench/`, newest first, each with its machine, versions and command. Those of "
        "CPUs say nothing about GPUs: their collectives go through shared memory.\n"
    ]
    parts += [f"![{name}](plots/{name}.svg)\n" for name in plots()]
    for path in results():
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE)
        parts.append(f"{text}\n")
    return "\n".join(parts)


def plots() -> dict[str, str]:
    """Name -> SVG, for every report of bench/engine.py: CPU time and memory of a step, compared with other engines."""
    found = {}
    for path in results():
        source = path.with_suffix(".json")
        report = json.loads(source.read_text(encoding="utf-8")) if source.exists() else None
        rounds = report.get("rounds") if isinstance(report, dict) and "variants" in report else None
        if rounds and all(_SHOWN.keys() <= case.keys() for one in rounds for case in one.values()):
            found[path.stem] = bars(path.stem, rounds)
    return found


def bars(title: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    """One bar per engine: the median over the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(rounds[0])[::-1]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 0.8 + 0.32 * len(names)), sharey=True)
    for axes, (key, label) in zip(panels, _SHOWN.items(), strict=True):
        values = [statistics.median(one[name][key] for one in rounds if name in one) for name in names]
        axes.barh(names, values, color=["#4051b5" if name.startswith("hf_zero") else "#9e9e9e" for name in names])
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()
