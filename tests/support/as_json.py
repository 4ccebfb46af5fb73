"""Nested frozen dataclasses to JSON text and back. Generated scripts contain a copy of this file's code."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, TypeVar

J = TypeVar("J", bound="AsJson")


class AsJson:
    """A frozen dataclass of plain data that its JSON text fully determines."""

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(dataclasses.asdict(self), indent=indent)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[J], text: str) -> J:
        return typing.cast("J", _build(cls, json.loads(text)))


def _build(kind: Any, data: Any) -> Any:
    """Builds an object of the annotated type `kind` from parsed JSON `data`."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], value) for name, value in data.items()})
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        kinds = [inner[0]] * len(data) if inner[1:] == (Ellipsis,) else inner
        return tuple(_build(one, value) for one, value in zip(kinds, data, strict=True))
    return data
