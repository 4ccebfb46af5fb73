"""Every form of a config, and the errors if it cannot be read."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from hf_zero.config import ConfigError, load_config, resolve
from hf_zero.config.sources import TextPlace
from hf_zero.config.text import parse

WANTED = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "steps": [1, 2]}

COMMENTED = """
// leading remark
{
    "train_batch_size": 8,  # a shell-style remark
    /* a block
       over two lines */
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,},
    "steps": [1, 2,],
}
"""


def test_every_form_gives_the_same_dict(tmp_path: Path) -> None:
    text = json.dumps(WANTED)
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (WANTED, str(path), path, text, encoded, encoded.rstrip("="), COMMENTED, "\ufeff" + text):
        assert load_config(source) == WANTED, source


def test_file_may_have_comments_trailing_commas_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(COMMENTED, encoding="utf-8-sig")
    assert load_config(path) == WANTED


def test_marks_inside_text_are_not_comments() -> None:
    text = '{"a": "http://x # y /* z */", "b//": ",}"}'
    assert load_config(text) == {"a": "http://x # y /* z */", "b//": ",}"}


def test_a_dict_is_copied() -> None:
    given = {"zero_optimization": {"stage": 1}}
    load_config(given)["zero_optimization"]["stage"] = 2  # type: ignore[index]
    assert given == {"zero_optimization": {"stage": 1}}


def test_places_of_keys_are_known() -> None:
    document = parse('{"a": 1,\n "b": {"c": [ {"d": 2} ]}}')
    assert document.places == {
        ("a",): TextPlace(1, 2),
        ("b",): TextPlace(2, 2),
        ("b", "c"): TextPlace(2, 8),
        ("b", "c", 0, "d"): TextPlace(2, 16),
    }


# text, then parts of the message
MALFORMED = [
    ('{"a": 1, "a": 2}', ["1:10", "key 'a' is given twice, first at line 1, column 2", "keep one"]),
    ('{"z": {"b": 1,\n "b": 1}}', ["2:2", "key 'z.b' is given twice, first at line 1, column 8"]),
    ('{"a": 1 "b": 2}', ["1:9", "a comma or } must follow the value of 'a'", "missing comma"]),
    ('{"a": }', ["1:7", "a value was expected, not '}'"]),
    ('{"a": None}', ["1:7", "write null"]),
    ('{"a": True}', ["1:7", "write true"]),
    ('{"a"="Warn"}', ["1:5", "a colon must follow the key 'a'"]),
    ("{a: 1", ["1:2", "a key must be in double quotes"]),
    ('{"a": 1', ["a comma or } must follow", "not the end of the text"]),
    ('{"a": 1,', ["the object is never closed"]),
    ('{"a": [1, ', ["the list is never closed"]),
    ('{"a": "x\n"}', ["1:7", "unreadable string"]),
    ('{"a": 1} {"b": 2}', ["1:10", "something follows after the end"]),
    ('{"a": 1 /* b}', ["a /* comment is never closed"]),
    ('{"a": 01}', ["1:7", "a value was expected"]),
    ("[1, 2]", ["a config is one JSON object"]),
    ('{\n "steps_per_print": 100 "optimizer": {}\n}', ["2:25", "add the missing comma"]),
    # Shown in guides, but placeholders.
    ('{\n "zero_optimization": {\n  "stage": [0|1|2|3] # one of these\n }\n}', ["3:14", "a comma or ] must follow"]),
    ('{"offload_param": {"pin_memory": [true|false]}}', ["1:35", "a value was expected, not 'true|false"]),
    ("# only a remark", ["a value was expected, not the end of the text"]),
    ('{"a":' * 100, ["nested more than 24 levels deep"]),
]


@pytest.mark.parametrize(("text", "expected"), MALFORMED)
def test_malformed_text_names_place_and_fix(text: str, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as from_file:
        load_config(path)
    assert str(path) in str(from_file.value)
    with pytest.raises(ConfigError) as from_text:
        load_config(text)
    for part in expected:
        assert part in str(from_file.value)
        assert part in str(from_text.value)


WILD_HJSON = """
{
  # DeepSpeed reads its files with a parser that takes all of this
  train_batch_size: 8
  zero_optimization: {
    stage: 2, // one
    reduce_bucket_size: 5e8
    'stage3_max_live_parameters': 7   /* zero_optimization: */
  }
  optimizer: {type: "AdamW"
    params: {lr: 1e-3}}
  steps_per_print: 100 # no comma
  "log_level": warning
}
"""


def test_unquoted_keys_and_line_ends_for_commas(tmp_path: Path) -> None:
    """DeepSpeed reads its files with an Hjson parser; hf_zero failed with "a key must be in double quotes"."""
    pytest.importorskip("hjson")
    path = tmp_path / "ds.hjson"
    path.write_text(WILD_HJSON)
    config = load_config(path)
    assert (
        load_config(WILD_HJSON)
        == config
        == {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 7},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "steps_per_print": 100,
            "log_level": "warning",
        }
    )
    lines = {key: place.line for key, place in config.places.items()}
    assert lines == {
        "train_batch_size": 4, "zero_optimization": 5, "zero_optimization.stage": 6,
        "zero_optimization.reduce_bucket_size": 7, "zero_optimization.stage3_max_live_parameters": 8, "optimizer": 10,
        "optimizer.type": 10, "optimizer.params": 11, "optimizer.params.lr": 11, "steps_per_print": 12, "log_level": 13,
    }  # fmt: skip
    assert resolve(config, world_size=1).zero.stage == 2


def test_a_key_given_twice_is_an_error_in_hjson_too() -> None:
    pytest.importorskip("hjson")
    with pytest.raises(ConfigError) as caught:
        load_config("{a: 1\n b: {c: 1\n c: 2}}")
    assert ":3:2" in str(caught.value) and "key 'b.c' is given twice, first at line 2" in str(caught.value)


def test_unreadable_sources(tmp_path: Path) -> None:
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    table: list[tuple[object, str]] = [
        ("no/such/ds.json", "there is no such file"),
        (tmp_path / "absent.json", "there is no such file"),
        (tmp_path, "it is a directory"),
        (binary, "not UTF-8 text"),
        ("", "the config is empty"),
        ("a\0b", "there is no such file"),
        (None, "a NoneType is not a config"),
        (7, "a int is not a config"),
        ("bm90IGpzb24=", "there is no such file, and it is neither JSON text nor base64 of it"),
        (base64.urlsafe_b64encode(b"{broken").decode(), "the decoded base64 text"),
    ]
    for source, expected in table:
        with pytest.raises(ConfigError) as caught:
            load_config(source)
        assert expected in str(caught.value), source


def test_keys_without_quotes_where_no_parser_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="install hjson, which reads keys without quotes"):
        load_config(WILD_HJSON)


def test_a_quoted_file_is_never_left_to_the_lenient_parser() -> None:
    """HJSON would parse `8 "b": 2` as a string; a missing comma remains an error with its position."""
    with pytest.raises(ConfigError, match="a comma or } must follow"):
        load_config('{"train_batch_size": 8 "gradient_clipping": 2}')
