"""DeepSpeed's names on our classes: what they read or call, and what to use instead of unsupported ones.

Our classes look them up in `__getattr__`, so that the classes only define what they need themselves. A value that a
program assigns to such a name takes precedence, as with any attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

VERSION = "0.19.8+hf.zero"
"""The DeepSpeed version whose interface we provide; its local part identifies hf_zero."""

GIT_HASH = GIT_BRANCH = "hf_zero"
"""There is no commit hash, because this is not built from DeepSpeed's repository."""


def announcement() -> str:
    """Return the log line in which tools look for DeepSpeed's version."""
    return f"DeepSpeed info: version={VERSION}, git-hash={GIT_HASH}, git-branch={GIT_BRANCH}"


NamesOf = Callable[[], "Surface"]
"""Returns the tables, which are imported at the first access to such a name."""


class Surface:
    """Tables of names.

    Attributes:
        values: attributes, computed from the object on each access.
        methods: functions that take the object as the first argument.
        refused: name -> what to use instead.
        parts: name -> the object's attribute that provides the name.
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
            refused: names separated by blanks -> what to use instead.
            parts: attribute of the object -> names separated by blanks that it provides.
        """
        self._owner = owner
        self.values = values
        self.methods = methods
        self.refused = {name: instead for names, instead in refused.items() for name in names.split()}
        self.parts = {name: part for part, names in (parts or {}).items() for name in names.split()}

    def __contains__(self, name: str) -> bool:
        return name in self.values or name in self.methods or name in self.parts

    def get(self, thing: Any, name: str) -> Any:
        """Return the value of `name` on `thing`; only for names in the tables."""
        if name in self.parts:
            return getattr(getattr(thing, self.parts[name]), name)
        if name in self.values:
            return self.values[name](thing)
        method = self.methods[name]
        return update_wrapper(partial(method, thing), method)

    def missing(self, name: str) -> AttributeError | None:
        """Return the error for an unsupported name of DeepSpeed; None for any other name."""
        if name not in self.refused:
            return None
        return AttributeError(
            f"{self._owner}.{name} is not supported by hf_zero: {self.refused[name]} (docs/deepspeed_names.md)",
            name=name,
        )
