"""Topic classification on real local text: windows of words from the standard library's packages, and a small model."""

from __future__ import annotations

import re
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

# Topic -> packages of the standard library about it; each has enough files that some can be held out.
TOPICS = {
    "asynchronous": ("asyncio",),
    "mail": ("email",),
    "processes": ("multiprocessing", "concurrent"),
    "testing": ("unittest",),
    "markup": ("xml", "html"),
    "web": ("http", "urllib", "wsgiref"),
}
NUM_WORDS = 4096  # vocabulary size: words are hashed, so no tokenizer is needed
WINDOW = 48  # words per sample
_FIRST_WORD = 2  # 0 is padding; 1 is the classification token before every sample
_WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Sample:
    """Words (1-D, int64) and the index of their topic."""

    words: Tensor
    topic: int


class Samples(Dataset[dict[str, Tensor]]):
    """The model's inputs, in a fixed order."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        return {"input_ids": sample.words, "labels": torch.tensor(sample.topic)}

    def commonest(self) -> float:
        """The share of the most common topic: the accuracy of always guessing it."""
        counts = torch.bincount(torch.tensor([sample.topic for sample in self.samples]))
        return float(counts.max()) / len(self)


def load_topics(limit: int | None = None) -> tuple[Samples, Samples]:
    """Samples for training and samples from held-out files; at most `limit` of each, spread over all topics."""
    library = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[Sample], list[Sample]] = ([], [])
    for topic, packages in enumerate(TOPICS.values()):
        files = sorted(path for package in packages for path in (library / package).rglob("*.py"))
        for number, path in enumerate(file for file in files if "test" not in file.parts):
            parts[number % 4 == 3].extend(windows(path.read_text(encoding="utf-8"), topic))
    return Samples(spread(parts[0], limit)), Samples(spread(parts[1], limit))


def windows(text: str, topic: int) -> list[Sample]:
    """The text's words, hashed and split into windows of equal length; an incomplete last one is dropped."""
    room = NUM_WORDS - _FIRST_WORD
    words = [_FIRST_WORD + zlib.crc32(word.lower().encode()) % room for word in _WORD.findall(text)]
    starts = range(0, len(words) - WINDOW + 1, WINDOW)
    return [Sample(torch.tensor([1, *words[start : start + WINDOW]]), topic) for start in starts]


def spread(samples: list[Sample], limit: int | None) -> list[Sample]:
    """At most `limit` samples, evenly spaced."""
    if limit is None or len(samples) <= limit:
        return samples
    return [samples[number * len(samples) // limit] for number in range(limit)]


def new_model(width: int = 96, layers: int = 2) -> BertForSequenceClassification:
    """A small BERT, created from a config without a download."""
    config = BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=WINDOW + 1,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        num_labels=len(TOPICS),
    )
    return BertForSequenceClassification(config)
