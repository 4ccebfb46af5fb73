"""Inputs of the frameworks based on Trainer: a tiny Llama, its tokenizer, and rows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.trl.material import language_model, sentences, tokenizer

ROWS = 32
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"


def write_language_model(folder: Path) -> Path:
    """A Llama of about 30 thousand parameters with a byte-level tokenizer."""
    words = tokenizer()
    words.chat_template = CHAT
    language_model().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_instructions(file: Path) -> Path:
    """Questions and answers in the columns of the alpaca format."""
    rows = [
        {"instruction": f"Where does {text.split(' lives')[0].lower()} live?", "input": "", "output": text}
        for text in sentences(ROWS)
    ]
    file.write_text(json.dumps(rows))
    return file
