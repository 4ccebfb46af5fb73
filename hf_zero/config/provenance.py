"""Provenance of every key: where its value came from, and whether it does what it says.

None is ignored in silence: each one set is supported, noted as without effect, or refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hf_zero.config.errors import FEATURES_PAGE, Edit, Problem, Remark
from hf_zero.config.policies import BatchPolicy, Provenance
from hf_zero.config.schema import Root, Section, Verdict
from hf_zero.config.schema.fields import ALL_STAGES, verdict_of
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


Finding = Problem | Remark
IsWritten = Callable[[str], bool]  # whether the value at a path is its author's, and not one filled in for an "auto"
Path = tuple[str, ...]


def judge(config: Root, stage: int, is_written: IsWritten) -> Iterator[Finding]:
    """One finding for every key that the user set and that does not simply do what it says."""
    # A stage that does not exist is a problem of its own; it must not excuse the other keys.
    yield from _judge(config, (), stage if stage in ALL_STAGES else max(ALL_STAGES), is_written)


def _judge(section: Section, around: Path, stage: int, is_written: IsWritten) -> Iterator[Finding]:
    for name, field in type(section).model_fields.items():
        if name not in section.model_fields_set:
            continue
        value, verdict, path = getattr(section, name), verdict_of(field), (*around, name)
        ignored = not verdict.met and is_written(".".join(path)) and _asks(value, field.default)
        if stage not in verdict.stages:
            # The name says for which stage it is: a config that serves several stages is not a mistake.
            ignored = ignored and not name.startswith("stage3_")
            yield _without_effect(path, value, _elsewhere(verdict, stage), ignored)
        elif verdict.kind == "ignored":
            yield _without_effect(path, value, f"no effect, {verdict.why}", ignored)
        elif verdict.kind == "unsupported":
            yield from _refusal(path, value, field.default, verdict)
        elif isinstance(value, Section):
            yield from _judge(value, path, stage, is_written)


def _without_effect(path: Path, value: object, text: str, ignored: bool) -> Remark:
    shown = value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
    return Remark(".".join(path), text, shown, ignored=ignored, edit=Edit(path))


def _elsewhere(verdict: Verdict, stage: int) -> str:
    why = f"; {verdict.why}" if verdict.kind == "supported" and verdict.why else ""
    return f"no effect at stage {stage} (used at {_stages(verdict)}){why}"


def _asks(value: object, default: object) -> bool:
    """Whether a value asks for anything that would not be so without it. A section that is switched off does not."""
    if not isinstance(value, Section):
        return value != default
    if getattr(value, "device", "") in (None, "none") or getattr(value, "enabled", None) is False:
        return False
    fields = type(value).model_fields
    return any(_asks(getattr(value, name), fields[name].default) for name in value.model_fields_set)


def _stages(verdict: Verdict) -> str:
    stages = [str(stage) for stage in verdict.stages]
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)}"


def _refusal(around: Path, value: object, default: object, verdict: Verdict) -> Iterator[Problem]:
    path, rule = ".".join(around), f"not available: {verdict.why}"
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True) or {}
    if isinstance(value, dict):
        if not _is_off(value, verdict.switch):
            off = f'set "{verdict.switch}": false in it' if verdict.switch else "leave it empty"
            yield Problem(path, value, rule, f"remove the section or {off}; see {FEATURES_PAGE}")
    elif value != default:
        keep = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
        yield Problem(path, value, rule, f"remove it or set {keep}; see {FEATURES_PAGE}")


def _is_off(section: dict[str, object], switch: str) -> bool:
    """Off when no switch in it, at any depth, is on; without a switch, only when nothing is in it."""
    return not any(_switches(section, switch)) if switch else not section


def _switches(value: object, switch: str) -> Iterator[bool]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == switch:
                yield not _says_off(inner)
            else:
                yield from _switches(inner, switch)
    elif isinstance(value, list):
        for inner in value:
            yield from _switches(inner, switch)


def _says_off(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in ("", "false")
    return value is None or (isinstance(value, (bool, int, float)) and not value)
