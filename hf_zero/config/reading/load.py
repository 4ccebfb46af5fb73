"""Any form a config may arrive in (dict, path, JSON text, base64) becomes one plain dict."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path

from hf_zero.config.errors import ConfigError, Problem
from hf_zero.config.reading.hjson_text import parse_hjson
from hf_zero.config.reading.jsonc import Document, SyntaxProblem, parse
from hf_zero.config.sources import ConfigDict, dotted

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
