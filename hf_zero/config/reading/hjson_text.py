"""Hjson, in which DeepSpeed reads its files: unquoted keys and text, a line end for a comma.

The parser is the one that DeepSpeed uses. It knows no places, so keys are looked up in the text once it has read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hf_zero.config.reading.jsonc import MAX_DEPTH, Document, Place, SyntaxProblem, repeated_key

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
