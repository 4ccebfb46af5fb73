"""Corpus discovery, tokenizer and block packing of the language-model example."""

from __future__ import annotations

from pathlib import Path

import clm_data
import pytest
from clm_data import (
    END_OF_TEXT,
    cached_tokenizer,
    expand_globs,
    hold_out,
    load_documents,
    pack,
    standard_library_files,
    token_blocks,
    tokenizer_folder,
    train_tokenizer,
)
from datasets import Dataset


def documents_of(folder: Path) -> Dataset:
    return load_documents(None, None, expand_globs([str(folder / "*.py")]))["train"]


def test_standard_library_is_found_without_tests_and_packages() -> None:
    files = [Path(path) for path in standard_library_files()]
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py", "tarfile.py"} <= names
    assert not {"test", "site-packages", "encodings", "idle_test"} & {part for path in files for part in path.parts}
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert [str(path) for path in files] == sorted(map(str, files))


def test_empty_files_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "full.py").write_text("x = 1\n")
    assert standard_library_files(tmp_path) == [str(tmp_path / "full.py")]


def test_no_sources_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no Python sources .* --train_files"):
        standard_library_files(tmp_path)


def test_globs_and_paths_mix_and_repeat_nothing(text_folder: Path) -> None:
    one = str(text_folder / "part03.py")
    files = expand_globs([one, str(text_folder / "part0[0-3].py"), str(text_folder.parent / "**" / "part11.py")])
    assert [Path(path).name for path in files] == ["part00.py", "part01.py", "part02.py", "part03.py", "part11.py"]


def test_glob_without_match_is_named(text_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\*\.txt' matches no file"):
        expand_globs([str(text_folder / "*.py"), str(text_folder / "nothing*.txt")])


def test_undecodable_bytes_do_not_stop_loading(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert load_documents(None, None, [str(tmp_path / "latin.txt")])["train"][0]["text"] == "caf\ufffd"


def test_a_file_is_one_document(text_folder: Path) -> None:
    documents = documents_of(text_folder)
    assert len(documents) == 12
    assert documents[4]["text"] == (text_folder / "part04.py").read_text()


def test_pack_by_hand() -> None:
    packed = pack({"input_ids": [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 0]]}, block_size=4)
    assert packed["input_ids"] == [[1, 2, 3, 0], [4, 0, 5, 6]]
    assert packed["labels"] == packed["input_ids"]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (7, 0), (8, 1), (15, 1), (16, 2)])
def test_pack_keeps_whole_blocks_only(num_tokens: int, num_blocks: int) -> None:
    assert len(pack({"input_ids": [list(range(num_tokens))]}, block_size=8)["input_ids"]) == num_blocks


def test_blocks_hold_the_text_in_order(text_folder: Path) -> None:
    documents = documents_of(text_folder)
    tokenizer = train_tokenizer([documents["text"]], vocab_size=320)
    blocks = token_blocks(documents, tokenizer, block_size=32)
    assert {len(block) for block in blocks["input_ids"]} == {32}
    text = str(tokenizer.decode([token for block in blocks["input_ids"] for token in block]))
    whole = "".join(document + END_OF_TEXT for document in documents["text"])
    assert whole.startswith(text)
    assert len(tokenizer(whole[len(text) :], add_special_tokens=False)["input_ids"]) < 32


def test_tokenizer_round_trips_any_text(text_folder: Path) -> None:
    tokenizer = train_tokenizer([documents_of(text_folder)["text"]], vocab_size=300)
    text = "\tif x:\n        return 'Grüße, 世界' # \x00\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 300
    assert tokenizer.eos_token == END_OF_TEXT


def test_tokenizer_is_trained_once(text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_of(text_folder)
    first = cached_tokenizer(documents, 320, tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(clm_data, "train_tokenizer", refuse)
    again = cached_tokenizer(documents, 320, tmp_path / "cache")
    assert again.get_vocab() == first.get_vocab()
    assert again("def f(x):")["input_ids"] == first("def f(x):")["input_ids"]
    with pytest.raises(AssertionError, match="trained again"):
        cached_tokenizer(documents, 330, tmp_path / "cache")


def test_tokenizer_cache_knows_the_text(text_folder: Path, tmp_path: Path) -> None:
    before = tokenizer_folder(documents_of(text_folder), 320, tmp_path)
    (text_folder / "part00.py").write_text("changed = True\n")
    assert tokenizer_folder(documents_of(text_folder), 320, tmp_path) != before


def test_interrupted_training_leaves_no_tokenizer(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(clm_data, "train_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached_tokenizer(documents_of(text_folder), 320, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_hold_out_takes_the_tail() -> None:
    splits = hold_out(Dataset.from_dict({"input_ids": [[k] for k in range(50)]}), 0.1)
    assert [row[0] for row in splits["validation"]["input_ids"]] == [45, 46, 47, 48, 49]
    assert len(splits["train"]) == 45


def test_hold_out_never_takes_everything() -> None:
    with pytest.raises(ValueError, match="of 1 blocks leaves nothing to train on"):
        hold_out(Dataset.from_dict({"input_ids": [[1]]}), 0.1)
