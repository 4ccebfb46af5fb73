"""Text for causal language modelling: finds it, trains a tokenizer on it, and packs it into equal blocks of tokens."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Folders of a Python installation that are not the standard library itself, or contain little prose: third-party
# packages, the test suite (60% of the bytes, deliberately odd input), character tables and generated documentation.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)


def standard_library_files(root: str | Path | None = None) -> list[str]:
    """Sorted Python sources of the running interpreter's standard library, without `EXCLUDED_FOLDERS`."""
    base = Path(root or sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(base):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    files = sorted(path for path in found if os.path.getsize(path) > 0)
    if not files:
        raise ValueError(f"no Python sources under {base}: pass your own text files with --train_files")
    return files


def expand_globs(patterns: Iterable[str]) -> list[str]:
    """Returns the existing files that match paths and globs, sorted and without duplicates; `**` is recursive."""
    files: set[str] = set()
    for pattern in patterns:
        matches = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
        if not matches:
            raise ValueError(f"--train_files {pattern!r} matches no file: check the path, or quote the glob")
        files.update(matches)
    return sorted(files)


def load_documents(dataset_name: str | None, config_name: str | None, files: list[str]) -> DatasetDict:
    """Loads a Hub dataset by name, or local files with one row per file. The result always has a `train` split."""
    if dataset_name is not None:
        loaded: DatasetDict = load_dataset(dataset_name, config_name)
        return loaded
    loaded = load_dataset(
        "text", data_files={"train": files}, sample_by="document", encoding="utf-8", encoding_errors="replace"
    )
    return loaded


def text_column(documents: Dataset) -> str:
    return "text" if "text" in documents.column_names else documents.column_names[0]


def iterate_text(documents: Dataset, batch_size: int = 64) -> Iterator[list[str]]:
    column = text_column(documents)
    for batch in documents.select_columns([column]).iter(batch_size):
        yield batch[column]


def train_tokenizer(texts: Iterable[list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte has a token, so no text is ever out of vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tokenizer_folder(documents: Dataset, vocab_size: int, cache_dir: str | Path) -> Path:
    """Cache folder of the tokenizer for exactly these documents and this vocabulary size."""
    digest = hashlib.sha256(f"byte-level-bpe {vocab_size}".encode())
    for batch in iterate_text(documents):
        for text in batch:
            digest.update(hashlib.sha256(text.encode()).digest())
    return Path(cache_dir) / f"bpe-{vocab_size}-{digest.hexdigest()[:16]}"


def cached_tokenizer(documents: Dataset, vocab_size: int, cache_dir: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of these documents from the cache, or trains and caches it."""
    folder = tokenizer_folder(documents, vocab_size, cache_dir)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written to a temporary folder and renamed, so that an interrupted run leaves no partial tokenizer behind.
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            train_tokenizer(iterate_text(documents), vocab_size).save_pretrained(os.path.join(scratch, "tokenizer"))
            try:
                os.rename(os.path.join(scratch, "tokenizer"), folder)
            except OSError:
                if not folder.is_dir():  # otherwise another machine with the same file system was first: use its result
                    raise
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    return tokenizer


def tokenize(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, column: str) -> dict[str, Any]:
    ids = tokenizer(batch[column], add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return {"input_ids": [[*document, tokenizer.eos_token_id] for document in ids]}


def pack(batch: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Concatenates documents and splits them into blocks; an incomplete last block is dropped."""
    line = [token for document in batch["input_ids"] for token in document]
    blocks = [line[start : start + block_size] for start in range(0, len(line) - block_size + 1, block_size)]
    return {"input_ids": blocks, "labels": blocks}  # the model itself shifts the labels by one


def token_blocks(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, num_proc: int | None = None
) -> Dataset:
    """Blocks of exactly `block_size` tokens; `datasets` caches both passes on disk for the next run."""
    column = text_column(documents)
    tokens = documents.map(
        tokenize,
        batched=True,
        num_proc=num_proc,
        remove_columns=documents.column_names,
        fn_kwargs={"tokenizer": tokenizer, "column": column},
        desc="Tokenizing",
    )
    return tokens.map(
        pack, batched=True, num_proc=num_proc, fn_kwargs={"block_size": block_size}, desc="Packing into blocks"
    )


def hold_out(blocks: Dataset, fraction: float) -> DatasetDict:
    """Splits the blocks into train and validation. The tail is held out, so at most one document is in both."""
    num_held_out = max(1, round(len(blocks) * fraction))
    if num_held_out >= len(blocks):
        raise ValueError(
            f"--validation_fraction {fraction} of {len(blocks)} blocks leaves nothing to train on: "
            "use more text, a smaller --block_size or a smaller fraction"
        )
    cut = len(blocks) - num_held_out
    return DatasetDict(train=blocks.select(range(cut)), validation=blocks.select(range(cut, len(blocks))))
