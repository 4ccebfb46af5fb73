"""Attributes that DeepSpeed's objects store, and ours compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class View(Generic[T]):
    """A property that a program may replace on an object by assigning to it, as it could DeepSpeed's attribute."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, thing: None, owner: type) -> View[T]: ...
    @overload
    def __get__(self, thing: object, owner: type | None = None) -> T: ...
    def __get__(self, thing: object, owner: type | None = None) -> View[T] | T:
        return self if thing is None else self.function(thing)
