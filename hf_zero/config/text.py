"""Parses a config from text: the path of a file, JSON, base64 of JSON, or Hjson.

JSON may have comments and trailing commas. The place of every key is recorded, and repeated keys are errors. DeepSpeed
reads its files as Hjson, which allows unquoted keys and text, and line ends instead of commas. We use the same Hjson
parser, which does not record places, so keys are located in the text afterwards.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hf_zero.config.errors import ConfigError, Problem
from hf_zero.config.sources import MAX_DEPTH, ConfigDict, TextPlace, dotted

FORMS = "give a dict, the path of a JSON file, JSON text, or urlsafe-base64 of JSON text"
WORDS = "Expected a string path to an existing deepspeed config, or a dictionary"  # DeepSpeed's

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
# Quoted text is matched first, because it may contain something that looks like a comment.
_QUOTED_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'''.*?'''|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)


def from_text_or_path(source: str | os.PathLike[str]) -> ConfigDict:
    name = os.fspath(source)
    if not isinstance(name, str):
        raise ConfigError(Problem("config", name, "a path must be text", FORMS))
    if _exists(name):
        return _from_file(Path(name))
    if isinstance(source, os.PathLike):
        raise _unreadable(name, "there is no such file", WORDS)
    if name.lstrip("\ufeff \t\r\n").startswith(("{", "[", "//", "/*", "#")):
        return _from_text(name, "the config text")
    decoded = _unbase64(name)
    if decoded is not None:
        return _from_text(decoded, "the decoded base64 text")
    if not name.strip():
        raise ConfigError(Problem("config", name, "the config is empty", FORMS))
    raise _unreadable(name, "there is no such file, and it is neither JSON text nor base64 of it", WORDS)


def _exists(name: str) -> bool:
    try:
        return os.path.exists(name)
    except ValueError:  # it contains a NUL character, so it is not a path
        return False


def _from_file(path: Path) -> ConfigDict:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise _unreadable(str(path), "it is a directory") from None
    except OSError as error:
        raise _unreadable(str(path), f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _unreadable(str(path), f"it is not UTF-8 text (byte {error.start})") from error
    return _from_text(text, str(path), file=str(path))


def _unreadable(name: str, why: str, words: str = "") -> ConfigError:
    fix = f"check the path (relative paths start at {os.getcwd()}); or {FORMS}"
    return ConfigError(Problem("config", name, why, fix, words=words))


def _unbase64(text: str) -> str | None:
    padded = text.strip() + "=" * (-len(text.strip()) % 4)
    try:
        decoded = base64.b64decode(padded, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if "{" in decoded else None


def _from_text(text: str, name: str, file: str = "") -> ConfigDict:
    try:
        document = _parsed(text.removeprefix("\ufeff"))
    except SyntaxProblem as error:
        place = error.place
        where, line = f"{name}:{place.line}:{place.column}", text.split("\n")[place.line - 1].strip()
        raise ConfigError(Problem(where, line, f"{place}: {error.what}", error.fix)) from None
    value = document.value
    if not isinstance(value, dict):
        raise ConfigError(Problem(name, value, "a config is one JSON object", 'begin it with { and "key": value pairs'))
    config = ConfigDict(value)
    config.name = file
    config.places = {dotted(path): place for path, place in document.places.items()}
    return config


def _parsed(text: str) -> Document:
    """Parse JSON or, if that fails, Hjson. If both fail, raise the error of JSON."""
    try:
        return parse(text)
    except SyntaxProblem as error:
        try:
            document = None if error.is_final else parse_hjson(text)
        except ImportError:
            error.fix += "; or install hjson, which reads keys without quotes (pip install hjson)"
            raise error from None
        if document is None or not document.value:
            raise
        return document


# JSON


@dataclass(frozen=True, slots=True)
class Document:
    """The parsed value, and the place of each key by path, for example ("zero_optimization", "stage")."""

    value: object
    places: dict[tuple[str | int, ...], TextPlace]


class SyntaxProblem(ValueError):
    """The text is not JSON; the error has the place, the problem and the fix."""

    def __init__(self, place: TextPlace, what: str, fix: str, *, is_final: bool = True) -> None:
        super().__init__(f"{place}: {what}")
        self.place, self.what, self.fix = place, what, fix
        self.is_final = is_final  # whether it is also an error in Hjson


def place_in(text: str, at: int) -> TextPlace:
    """Return the place of an offset."""
    return TextPlace(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))


def repeated_key(path: tuple[str | int, ...], place: TextPlace, first: TextPlace) -> SyntaxProblem:
    """Return the error for a repeated key, because parsers disagree about which value to use."""
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
        self.places: dict[tuple[str | int, ...], TextPlace] = {}

    def place(self, at: int | None = None) -> TextPlace:
        return place_in(self.text, self.at if at is None else at)

    def fail(self, what: str, fix: str, at: int | None = None) -> NoReturn:
        """Raise the error for text that is not JSON, here or at an offset. It may still be Hjson."""
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
        unquoted, unfinished = f"a key must be in double quotes, not {self.near()}", "the object is never closed"
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
    # Beyond 300 digits a float is precise enough, and Python refuses to parse very long ints.
    whole = len(digits) < 300 and not any(mark in digits for mark in ".eE")
    return int(digits) if whole else float(digits)


# Hjson


def parse_hjson(text: str) -> Document | None:
    """Parse Hjson; return None if the text is not Hjson.

    Raises:
        ImportError: the parser is not installed.
        SyntaxProblem: an object has a repeated key.
    """
    import hjson  # imported here, because nearly every config is JSON

    try:
        value = hjson.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, IndexError, RecursionError):  # HjsonDecodeError is a ValueError; truncated text raises others
        return None
    if any(_is_doubtful(word) for word in _texts(value)):
        return None
    locator = _Locator(text)
    return Document(_plain(value, (), locator), locator.places)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, _Pairs):
        for _, inner in value:
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _is_doubtful(text: str) -> bool:
    """Whether unquoted text, which extends to the end of its line, includes something probably meant as JSON."""
    return '":' in text or text.endswith((",", "}", "]")) or text in ("None", "nan", "inf")


class _Pairs(list[tuple[str, Any]]):
    """An object as its key-value pairs, so that repeated keys can be detected."""


def _plain(value: object, path: tuple[str | int, ...], locator: _Locator) -> object:
    if len(path) > MAX_DEPTH:
        raise SyntaxProblem(TextPlace(1, 1), f"nested more than {MAX_DEPTH} levels deep", "flatten it")
    if isinstance(value, _Pairs):
        result: dict[str, object] = {}
        for key, inner in value:
            where = (*path, key)
            place = locator.next(where)
            if key in result:
                raise repeated_key(where, place, locator.places[where])
            locator.places[where] = place
            result[key] = _plain(inner, where, locator)
        return result
    if isinstance(value, list):
        return [_plain(entry, (*path, index), locator) for index, entry in enumerate(value)]
    return value


class _Locator:
    """Locates keys in the text. Must be called in text order: it searches for each key after the previous one."""

    def __init__(self, text: str) -> None:
        self._text = "".join(_without_comments(text))
        self._at = 0
        self.places: dict[tuple[str | int, ...], TextPlace] = {}

    def next(self, path: tuple[str | int, ...]) -> TextPlace:
        key = re.escape(str(path[-1]))
        match = re.compile(rf"(?:^|[\s{{,])(?P<key>[\"']?{key}[\"']?)\s*:").search(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return place_in(self._text, self._at if match is None else match.start("key"))


def _without_comments(text: str) -> Iterator[str]:
    """Yield the text with comments replaced by blanks, so that positions do not change."""
    end = 0
    for match in _QUOTED_OR_COMMENT.finditer(text):
        yield text[end : match.start()]
        token = match.group()
        yield token if token[0] in "\"'" else re.sub(r"[^\n]", " ", token)
        end = match.end()
    yield text[end:]
