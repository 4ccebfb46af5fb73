"""JSON as people write it (comments, trailing commas), with the place of every key and no silent duplicates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NoReturn

MAX_DEPTH = 24  # deeper than any real config; keeps recursion shallow

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\s,\]}\[{:\"#/]+")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_LOOKALIKES = {"True": "true", "False": "false", "None": "null", "nan": "NaN", "inf": "Infinity"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands in the text, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


@dataclass(frozen=True, slots=True)
class Document:
    """The parsed value, and where each of its keys stands (by path, for example ("zero_optimization", "stage"))."""

    value: object
    places: dict[tuple[str | int, ...], Place]


class SyntaxProblem(ValueError):
    """The text is not JSON; says where, what is wrong and what to write instead."""

    def __init__(self, place: Place, what: str, fix: str, *, is_final: bool = True) -> None:
        super().__init__(f"{place}: {what}")
        self.place, self.what, self.fix = place, what, fix
        self.is_final = is_final  # wrong in any other notation as well


def repeated_key(path: tuple[str | int, ...], place: Place, first: Place) -> SyntaxProblem:
    """One object has a key twice: readers would disagree about which one counts."""
    name = ".".join(str(part) for part in path)
    return SyntaxProblem(place, f"key {name!r} is given twice, first at {first}", "keep one of the two")


def parse(text: str) -> Document:
    """Parse the text, or raise SyntaxProblem at the first place that cannot be read."""
    reader = _Reader(text)
    value = reader.value(())
    reader.skip()
    if reader.at < len(text):
        reader.fail("something follows after the end of the config", "keep one {...} object per file")
    return Document(value, reader.places)


class _Reader:
    """A recursive-descent reader; `at` is the offset of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.places: dict[tuple[str | int, ...], Place] = {}

    def place(self, at: int | None = None) -> Place:
        at = self.at if at is None else at
        return Place(self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at))

    def fail(self, what: str, fix: str, at: int | None = None) -> NoReturn:
        raise SyntaxProblem(self.place(at), what, fix, is_final=False)

    def skip(self) -> None:
        match = _BLANK.match(self.text, self.at)
        assert match is not None  # the pattern matches the empty string
        self.at = match.end()
        if self.text.startswith("/*", self.at):
            self.fail("a /* comment is never closed", "close it with */")

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def value(self, path: tuple[str | int, ...]) -> object:
        first = self.peek()
        if len(path) > MAX_DEPTH:
            raise SyntaxProblem(
                self.place(), f"nested more than {MAX_DEPTH} levels deep", "flatten it; no setting needs that"
            )
        if first == "{":
            return self.mapping(path)
        if first == "[":
            return self.sequence(path)
        if first == '"':
            return self.string()
        return self.scalar()

    def mapping(self, path: tuple[str | int, ...]) -> dict[str, object]:
        result: dict[str, object] = {}
        self.at += 1
        while self.peek() != "}":
            start = self.at
            key = self.key()
            where = (*path, key)
            if key in result:
                raise repeated_key(where, self.place(start), self.places[where])
            self.places[where] = self.place(start)
            self.colon(key)
            result[key] = self.value(where)
            self.separator("}", f"the value of {key!r}")
        self.at += 1
        return result

    def key(self) -> str:
        if self.peek() == '"':
            return self.string()
        unquoted, unfinished = f"a key must stand in double quotes, not {self.near()}", "the object is never closed"
        self.fail(unquoted if self.peek() else unfinished, 'write "key": value pairs and close the object with }')

    def colon(self, key: str) -> None:
        if self.peek() != ":":
            self.fail(f"a colon must follow the key {key!r}, not {self.near()}", f'write "{key}": value')
        self.at += 1

    def sequence(self, path: tuple[str | int, ...]) -> list[object]:
        result: list[object] = []
        self.at += 1
        while self.peek() != "]":
            if not self.peek():
                self.fail("the list is never closed", "close it with ]")
            result.append(self.value((*path, len(result))))
            self.separator("]", "a list entry")
        self.at += 1
        return result

    def separator(self, closing: str, after: str) -> None:
        following = self.peek()
        if following == ",":
            self.at += 1
        elif following != closing:
            self.fail(f"a comma or {closing} must follow {after}, not {self.near()}", "add the missing comma")

    def string(self) -> str:
        start = self.at
        try:
            text, self.at = _DECODER.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            fix = "close it with a double quote on the same line; write a backslash as \\\\"
            self.fail(f"unreadable string: {error.msg}", fix, start)
        return str(text)

    def scalar(self) -> object:
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            return _to_number(number.group())
        word = _WORD.match(self.text, self.at)
        if word and word.group() in _WORDS:
            self.at = word.end()
            return _WORDS[word.group()]
        right = _LOOKALIKES.get(word.group()) if word else None
        fix = f"write {right}" if right else "write a number, true, false, null, or text in double quotes"
        self.fail(f"a value was expected, not {self.near()}", fix)

    def near(self) -> str:
        rest = self.text[self.at : self.at + 20].split("\n")[0].strip()
        return repr(rest) if rest else "the end of the text"


def _to_number(digits: str) -> int | float:
    # Past 300 digits a float keeps all that matters (the size), and Python refuses to read very long ints.
    whole = len(digits) < 300 and not any(mark in digits for mark in ".eE")
    return int(digits) if whole else float(digits)
