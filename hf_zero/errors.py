"""Errors of calls that are wrong in themselves; DeepSpeed asserts there, and callers catch AssertionError."""

from __future__ import annotations


class WrongArgument(ValueError, AssertionError):
    """A call with an argument that it cannot take."""


class WrongMoment(RuntimeError, AssertionError):
    """A call that must not be made now."""
