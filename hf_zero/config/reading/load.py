"""Any form a config may arrive in (dict, path, JSON text, base64) becomes one plain dict.

DeepSpeed reads its files as Hjson: unquoted keys and text, a line end for a comma. The parser is the one that it uses,
and knows no places, so keys are looked up in the text once it has read them.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_zero.config.errors import ConfigError, Problem
from hf_zero.config.reading.jsonc import MAX_DEPTH, Document, Place, SyntaxProblem, parse, repeated_key
from hf_zero.config.sources import ConfigDict, dotted

# Text in quotes is kept, for it may hold what looks like a comment.
_QUOTED_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'''.*?'''|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)


def parse_hjson(text: str) -> Document | None:
    """The document, or None where the text is no Hjson either.

    Raises:
        ImportError: the parser is not installed.
        SyntaxProblem: for a key that is given twice in one object.
    """
    import hjson  # only here: nearly every config is JSON

    try:
        value = hjson.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, IndexError, RecursionError):  # its own error is a ValueError; some texts end too early for it
        return None
    if any(_is_doubtful(word) for word in _texts(value)):
        return None
    places = _Places(text)
    return Document(_plain(value, (), places), places.found)


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
    """Unquoted text runs to the end of its line: what it swallows on the way was rather meant as JSON."""
    return '":' in text or text.endswith((",", "}", "]")) or text in ("None", "nan", "inf")


class _Pairs(list[tuple[str, Any]]):
    """An object as its key-value pairs, so that a repeated key can be told."""


def _plain(value: object, path: tuple[str | int, ...], places: _Places) -> object:
    if len(path) > MAX_DEPTH:
        raise SyntaxProblem(Place(1, 1), f"nested more than {MAX_DEPTH} levels deep", "flatten it")
    if isinstance(value, _Pairs):
        result: dict[str, object] = {}
        for key, inner in value:
            where = (*path, key)
            place = places.next(where)
            if key in result:
                raise repeated_key(where, place, places.found[where])
            places.found[where] = place
            result[key] = _plain(inner, where, places)
        return result
    if isinstance(value, list):
        return [_plain(entry, (*path, index), places) for index, entry in enumerate(value)]
    return value


class _Places:
    """Where keys stand: asked in the order of the text, each is looked for behind the one before."""

    def __init__(self, text: str) -> None:
        self._text = "".join(_without_comments(text))
        self._at = 0
        self.found: dict[tuple[str | int, ...], Place] = {}

    def next(self, path: tuple[str | int, ...]) -> Place:
        key = re.escape(str(path[-1]))
        match = re.compile(rf"(?:^|[\s{{,])(?P<key>[\"']?{key}[\"']?)\s*:").search(self._text, self._at)
        if match is not None:
            self._at = match.end()
        start = self._at if match is None else match.start("key")
        return Place(self._text.count("\n", 0, start) + 1, start - self._text.rfind("\n", 0, start))


def _without_comments(text: str) -> Iterator[str]:
    """The text with blanks for comments, so that every character stays where it is."""
    end = 0
    for match in _QUOTED_OR_COMMENT.finditer(text):
        yield text[end : match.start()]
        found = match.group()
        yield found if found[0] in "\"'" else re.sub(r"[^\n]", " ", found)
        end = match.end()
    yield text[end:]


_FORMS = "give a dict, the path of a JSON file, JSON text, or urlsafe-base64 of JSON text"


def load_config(source: object) -> ConfigDict:
    """The config as a dict of its own (a dict given is copied), or ConfigError saying what to mend.

    What comes back remembers the file and line of each key.
    """
    if isinstance(source, Mapping):
        return _copied(source)
    if isinstance(source, (str, os.PathLike)):
        return _from_text_or_path(source)
    raise ConfigError(Problem("config", source, f"a {type(source).__name__} is not a config", _FORMS))


def _copied(source: Mapping[object, object]) -> ConfigDict:
    try:
        if isinstance(source, ConfigDict):
            return copy.deepcopy(source)
        return ConfigDict(copy.deepcopy(dict(source)))  # keys are checked when the config is resolved
    except Exception as error:
        rule = f"the dict cannot be copied: {error}"
        raise ConfigError(Problem("config", source, rule, "use plain values")) from error


def _from_text_or_path(source: str | os.PathLike[str]) -> ConfigDict:
    name = os.fspath(source)
    if not isinstance(name, str):
        raise ConfigError(Problem("config", name, "a path must be text", _FORMS))
    if _exists(name):
        return _from_file(Path(name))
    if isinstance(source, os.PathLike):
        raise _unreadable(name, "there is no such file")
    if name.lstrip("\ufeff \t\r\n").startswith(("{", "[", "//", "/*", "#")):
        return _from_text(name, "the config text")
    decoded = _unbase64(name)
    if decoded is not None:
        return _from_text(decoded, "the decoded base64 text")
    if not name.strip():
        raise ConfigError(Problem("config", name, "the config is empty", _FORMS))
    raise _unreadable(name, "there is no such file, and it is neither JSON text nor base64 of it")


def _exists(name: str) -> bool:
    try:
        return os.path.exists(name)
    except ValueError:  # a NUL inside: certainly no path
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


def _unreadable(name: str, why: str) -> ConfigError:
    where = os.getcwd()
    return ConfigError(Problem("config", name, why, f"check the path (relative paths start at {where}); or {_FORMS}"))


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
        where, line = f"{name}:{place.line}:{place.column}", _line(text, place.line)
        raise ConfigError(Problem(where, line, f"{place}: {error.what}", error.fix)) from None
    value = document.value
    if not isinstance(value, dict):
        raise ConfigError(Problem(name, value, "a config is one JSON object", 'begin it with { and "key": value pairs'))
    config = ConfigDict(value)
    config.name = file
    config.places = {dotted(path): place for path, place in document.places.items()}
    return config


def _parsed(text: str) -> Document:
    """JSON as a rule; what is none may be Hjson. Where it is neither, the complaint is that of JSON."""
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


def _line(text: str, number: int) -> str:
    return text.split("\n")[number - 1].strip()
