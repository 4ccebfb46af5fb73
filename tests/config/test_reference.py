"""docs/config.md matches the schema."""

from __future__ import annotations

import re
from pathlib import Path

from hf_zero.config.reference import render
from hf_zero.config.schema.fields import verdict_of
from hf_zero.config.schema.root import HfZero
from hf_zero.config.schema.whole import whole_schema

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_schema_renders() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m hf_zero.config.reference > docs/config.md"


def test_every_top_level_key_stands_in_it_with_its_status() -> None:
    rows = {line.split("`")[1]: line for line in render().splitlines() if line.startswith("| `")}
    for name, field in whole_schema().model_fields.items():
        assert name in rows
        if verdict_of(field).kind == "unsupported":
            assert f"refused: {verdict_of(field).why}" in rows[name]


def test_every_setting_of_our_own_stands_among_the_differences() -> None:
    page = PAGE.with_name("differences.md").read_text(encoding="utf-8")
    assert HfZero.model_fields
    for name, field in HfZero.model_fields.items():
        if verdict_of(field).kind == "detail":  # a section
            assert f'"{name}": {{' in page
        elif field.default is None:  # a choice of words
            assert f'"{name}": "' in page
        elif type(field.default) in (int, str):
            assert re.search(rf'"{name}": ["\d]', page)
        else:
            assert f'"{name}": {str(not field.default).lower()}' in page
