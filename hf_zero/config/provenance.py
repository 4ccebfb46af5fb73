"""The record of every key: the value it has in the end, and where that came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hf_zero.config.errors import Problem
from hf_zero.config.policies import BatchPolicy, Provenance
from hf_zero.config.schema import Root, Section
from hf_zero.config.schema.names import verdict_of
from hf_zero.config.sources import DEFAULT, Source, source_in

BATCH_FIELDS = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
}
_WITH_DEFAULT = ("supported", "check")


@dataclass(frozen=True, slots=True)
class Origins:
    """Answers where the value at a path came from."""

    raw: Mapping[str, object]
    filled: Mapping[str, Source]
    renamed: Mapping[str, str]  # present path -> the path that the file has

    def of(self, path: str) -> Source:
        for new, old in self.renamed.items():
            if path == new or path.startswith(f"{new}."):
                written = old + path[len(new) :]
                path = written if source_in(self.raw, written).kind != "dict" else old
        return self.filled.get(path) or source_in(self.raw, path)

    def is_written(self, path: str) -> bool:
        """Whether the author of the config wrote this value, and it was not filled in for an "auto"."""
        return self.of(path).kind in ("file", "text", "dict")

    def words(self, path: str) -> str:
        """For a message; several paths may be named at once. A plain dict has nothing to tell."""
        sources = [self.of(part.partition("[")[0]) for part in path.split(", ")]
        return ", ".join(str(source) for source in sources if source.kind not in ("dict", "default"))


def with_origins(problems: Iterable[Problem], origins: Origins) -> list[Problem]:
    """The problems, each with the place that its value came from."""
    return [
        problem if problem.origin else dataclasses.replace(problem, origin=origins.words(problem.path))
        for problem in problems
    ]


def record(config: Root, batch: BatchPolicy | None, origins: Origins) -> dict[str, Provenance]:
    """By path, in the order of the schema: all that was set, and the defaults of what the engine supports."""
    entries = {entry.path: entry for entry in _entries(config, "", origins)}
    for path, field in BATCH_FIELDS.items():
        if batch is not None and getattr(config, path) is None:
            derived = Source("derived", "train_batch_size = micro batch x accumulation steps x world size")
            entries[path] = Provenance(path=path, value=getattr(batch, field), source=derived)
    return entries


def _entries(section: Section, prefix: str, origins: Origins) -> Iterator[Provenance]:
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from _entries(value, f"{path}.", origins)
        elif name not in section.model_fields_set:
            if verdict_of(field).kind in _WITH_DEFAULT:
                yield Provenance(path=path, value=value, source=DEFAULT)
        elif isinstance(value, dict) and value:
            for key, inner in value.items():
                shown = inner.model_dump(exclude_unset=True) if isinstance(inner, Section) else inner
                yield Provenance(path=f"{path}.{key}", value=shown, source=origins.of(f"{path}.{key}"))
        else:
            yield Provenance(path=path, value=value, source=origins.of(path))
