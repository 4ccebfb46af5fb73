"""Names of DeepSpeed beside a class of ours: what they read or call, and what to use instead of those we lack.

The class asks in its `__getattr__`, so that it has only what it needs itself. Whatever a program assigns under such a
name wins, as with any attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

VERSION = "0.19.8+hf.zero"
"""The DeepSpeed version whose interface we answer with; the local part tells that it is hf_zero."""

GIT_HASH = GIT_BRANCH = "hf_zero"
"""Not built from DeepSpeed's repository: no commit of it would be true."""


def announcement() -> str:
    """The log line by which tools recognise DeepSpeed's version."""
    return f"DeepSpeed info: version={VERSION}, git-hash={GIT_HASH}, git-branch={GIT_BRANCH}"


NamesOf = Callable[[], "Surface"]
"""Gives the tables; they are imported when the first such name is asked for."""


class Surface:
    """Tables of names.

    Attributes:
        values: read as attributes; each is computed from the object when it is asked for.
        methods: functions that take the object first.
        refused: name -> what to use instead.
        parts: name -> attribute under which the object has the part that answers it.
    """

    def __init__(
        self,
        owner: str,
        values: Mapping[str, Callable[[Any], Any]],
        methods: Mapping[str, Callable[..., Any]],
        refused: Mapping[str, str],
        parts: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            refused: names, separated by blanks -> what to use instead of them.
            parts: attribute of the object -> names, separated by blanks, that this part of it answers.
        """
        self._owner = owner
        self.values = values
        self.methods = methods
        self.refused = {name: instead for names, instead in refused.items() for name in names.split()}
        self.parts = {name: part for part, names in (parts or {}).items() for name in names.split()}

    def __contains__(self, name: str) -> bool:
        return name in self.values or name in self.methods or name in self.parts

    def get(self, thing: Any, name: str) -> Any:
        """The value of `name` on `thing`; only for names that are in here."""
        if name in self.parts:
            return getattr(getattr(thing, self.parts[name]), name)
        if name in self.values:
            return self.values[name](thing)
        method = self.methods[name]
        return update_wrapper(partial(method, thing), method)

    def missing(self, name: str) -> AttributeError | None:
        """The error for a name of DeepSpeed that is not supported; None for any other."""
        if name not in self.refused:
            return None
        return AttributeError(
            f"{self._owner}.{name} is not supported by hf_zero: {self.refused[name]} (docs/deepspeed_names.md)",
            name=name,
        )
