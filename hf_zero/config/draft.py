"""A config on its way: each stage of the pipeline makes a new draft from the last one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config.errors import ABSENT, ConfigError, Finding, Problem
from hf_zero.config.schema.root import Root
from hf_zero.config.sources import Source, source_in
from hf_zero.config.views import Views

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The values of a config, where they come from, and what has been found about them.

    Attributes:
        raw: the config as it was given, which no stage changes.
        views: what surrounds it.
        tree: the values by their current names. A stage that changes some copies the sections around them.
        renamed: by current path, the path in `raw`.
        filled: by current path, what `fill` has written, and its source; without a source, an "auto" for later.
        autos: the keys that are still "auto", which `tree` does not have after `fill`.
        config: the typed sections, after `validate`.
    """

    raw: Mapping[str, Any]
    views: Views
    tree: dict[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    filled: Mapping[Path, tuple[object, Source | None]] = field(default_factory=dict)
    autos: frozenset[str] = frozenset()
    findings: tuple[Finding, ...] = ()
    config: Root = Root()

    def plus(self, findings: Iterable[Finding], **changes: Any) -> Draft:
        """Return a draft with more findings, and other changes."""
        return dataclasses.replace(self, findings=(*self.findings, *findings), **changes)

    def written(self, path: str) -> str:
        """Return the path in `raw` of the value at a current path."""
        for new, old in self.renamed.items():
            if path == new or path.startswith(f"{new}."):
                return old + path[len(new) :]
        return path

    def source(self, path: str) -> Source:
        """Return the source of the value at a current path."""
        filled = self.filled.get(tuple(path.split(".")), (None, None))[1]
        source = filled or source_in(self.raw, self.written(path))
        # A shorthand stands for a whole section.
        olds = (old for new, old in self.renamed.items() if source.kind == "dict" and path.startswith(f"{new}."))
        return next((source_in(self.raw, old) for old in olds), source)

    def is_written(self, path: str) -> bool:
        """Whether the author of the config wrote this value, as opposed to a filled "auto"."""
        return self.source(path).kind in ("file", "text", "dict")

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems, each with the source of its value; nothing for a plain dict."""
        problems = []
        for problem in self.findings:
            if isinstance(problem, Problem):
                sources = [self.source(part.partition("[")[0]) for part in problem.path.split(", ")]
                origin = ", ".join(str(source) for source in sources if source.kind not in ("dict", "default"))
                problems.append(dataclasses.replace(problem, origin=problem.origin or origin))
        return tuple(problems)

    def without_problems(self) -> Draft:
        """Return the draft, or raise ConfigError with all of its problems."""
        problems = self.problems()
        if problems:
            raise ConfigError(problems)
        return self


def value_in(tree: Mapping[str, Any], path: Path) -> Any:
    """Return the value at a path; ABSENT if there is none, or no section around it."""
    value: Any = tree
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return value


def with_value(tree: Mapping[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a tree with a value at a path; a null section counts as absent."""
    key, *below = path
    return {**tree, key: with_value(tree.get(key) or {}, tuple(below), value) if below else value}
