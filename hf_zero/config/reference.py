"""Renders docs/config.md from the schema: `python -m hf_zero.config.reference > docs/config.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

from pydantic.fields import FieldInfo

from hf_zero.config.schema.batch import BatchSizes
from hf_zero.config.schema.fields import ALL_STAGES, Section, Verdict, subsection, verdict_of
from hf_zero.config.schema.root import HfZero, Root
from hf_zero.config.schema.whole import whole_schema

_HEAD = """\
# Every key of ds.json

This page is rendered from the schema (`python -m hf_zero.config.reference > docs/config.md`); a test checks that they
agree. A key of `zero_optimization` named `stage3_...` may also be written without the prefix, as in DeepSpeed's fields.
Unlisted keys are ignored with a warning where DeepSpeed ignores them (at the top level and in sections that it does not
check), unless they resemble a listed key. In that case, and in all other sections, they are errors.

The literal `"auto"` is replaced by a value from Trainer's arguments, from Accelerate or from the model, or else by the
default. Keys that are absent but stated by TrainingArguments (or DummyOptim, DummyScheduler) also mean `"auto"`.
`python -m hf_zero explain ds.json` shows the values; [differences.md](differences.md) lists where they differ from
DeepSpeed's.

- **works**: the engine does what the key says.
- **no effect**: accepted, but ignored for the given reason. If the config requests something that does not happen, the
  engine warns once at the start; with `"hf_zero": {"strict": true}`, this is an error.
- **refused**: an error that names the key, unless it has its default value (for a section: unless it is switched off).
"""


def render() -> str:
    """Render the page, with one table per section."""
    return "\n".join([_HEAD, *_section("Top level", "", whole_schema())]) + "\n"


def _section(title: str, prefix: str, section: type[Section]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| key | default | status | meaning |\n|---|---|---|---|"
    below: list[tuple[str, type[Section]]] = []
    for name in sorted(section.model_fields, key=_place(section)):
        field = section.model_fields[name]
        yield _row(prefix + name, field)
        inner = subsection(field)
        if inner is not None and inner.model_fields:
            below.append((f"{prefix}{name}", inner))
    yield ""
    for path, inner in below:
        yield from _section(f"`{path}`", f"{path}.", inner)


def _place(section: type[Section]) -> Callable[[str], int]:
    """Return the sort key: a section's own keys, then those added by features, then those added by extras."""
    core = next((kind for kind in (Root, HfZero) if issubclass(section, kind)), section)
    own = {*vars(core).get("__annotations__", {}), *BatchSizes.model_fields}
    return lambda name: 0 if name in own else 1 if name in core.model_fields else 2


def _row(path: str, field: FieldInfo) -> str:
    verdict = verdict_of(field)
    meaning = (field.description or "") + (f" Unit: {verdict.unit}." if verdict.unit else "")
    default = "" if subsection(field) or field.is_required() else f"`{json.dumps(field.default, default=str)}`"
    is_section = subsection(field) is not None and verdict.kind == "detail"
    status = "see its table" if is_section else _status(verdict)
    return f"| `{path}` | {default} | {status} | {meaning} |".replace("\n", " ")


def _status(verdict: Verdict) -> str:
    stages = "" if verdict.stages == ALL_STAGES else f" at stage {', '.join(map(str, verdict.stages))}"
    return {
        "supported": f"works{stages}",
        "check": f"works{stages}",
        "ignored": f"no effect: {verdict.why}",
        "unsupported": f"refused: {verdict.why}",
        "detail": "goes with its section",
    }[verdict.kind]


if __name__ == "__main__":
    sys.stdout.write(render())
