"""The training script: its arguments, the model it builds, and one small run through the real launcher."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_clm import (
    DataArguments,
    ModelArguments,
    checkpoint_to_resume,
    load_blocks,
    load_model,
    load_text,
    load_tokenizer,
    main,
    new_model,
    parse,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_zero
from tests.examples.conftest import EXAMPLES
from tests.support.ranks import run_ranks

SMALL = ["--vocab_size", "512", "--hidden_size", "32", "--num_layers", "2", "--num_heads", "2", "--block_size", "32"]


def test_arguments_of_all_three_kinds(tmp_path: Path) -> None:
    model_args, data_args, training_args = parse(
        ["--do_train", "--use_cpu", "--output_dir", str(tmp_path), "--train_files", "a.txt", "b.txt", *SMALL]
    )
    assert (model_args.hidden_size, model_args.vocab_size) == (32, 512)
    assert (data_args.train_files, data_args.block_size) == (["a.txt", "b.txt"], 32)
    assert training_args.output_dir == str(tmp_path)


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass --do_train, --do_eval or both"):
        parse(["--output_dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 100, "num_heads": 3}, "--hidden_size 100 must be a multiple of twice --num_heads 3"),
        ({"vocab_size": 256}, "--vocab_size 256 is too small"),
    ],
)
def test_impossible_models_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelArguments(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_name": "x", "train_files": ["y"]}, "exclude each other"),
        ({"validation_fraction": 1.0}, "must lie between 0 and 1"),
        ({"block_size": 1}, "must be at least 2"),
    ],
)
def test_impossible_data_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(**arguments)  # type: ignore[arg-type]


def test_new_model_fits_its_tokenizer(text_folder: Path, tmp_path: Path) -> None:
    model_args = ModelArguments(vocab_size=512, hidden_size=32, num_layers=2, num_heads=2)
    data_args = DataArguments(
        train_files=[str(text_folder / "*.py")],
        block_size=32,
        max_train_samples=10,
        max_eval_samples=1,
        tokenizer_cache=str(tmp_path / "cache"),
    )
    documents = load_text(data_args)
    tokenizer = load_tokenizer(model_args, data_args, documents["train"])
    blocks = load_blocks(data_args, documents, tokenizer)
    assert (len(blocks["train"]), len(blocks["validation"])) == (10, 1)
    model = new_model(model_args, tokenizer, data_args.block_size)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor(blocks["train"][:2]["input_ids"])
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(math.log(len(tokenizer)), abs=0.3)


def test_existing_model_gets_room_for_new_tokens(tmp_path: Path, text_folder: Path) -> None:
    model_args = ModelArguments(vocab_size=512, hidden_size=32, num_layers=1, num_heads=2)
    data_args = DataArguments(train_files=[str(text_folder / "*.py")], tokenizer_cache=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(model_args, data_args, load_text(data_args)["train"])
    new_model(model_args, tokenizer, data_args.block_size).save_pretrained(tmp_path / "model")
    num_tokens = len(tokenizer)
    named = ModelArguments(model_name_or_path=str(tmp_path / "model"))
    assert load_model(named, tokenizer).get_input_embeddings().weight.shape == (num_tokens, 32)
    tokenizer.add_tokens(["<one more>"])
    assert load_model(named, tokenizer).get_input_embeddings().weight.shape == (num_tokens + 1, 32)


def test_limited_evaluation_spreads_over_the_held_out_text(text_folder: Path, tmp_path: Path) -> None:
    model_args = ModelArguments(vocab_size=512, hidden_size=32, num_layers=2, num_heads=2)
    settings = {"train_files": [str(text_folder / "*.py")], "block_size": 32, "validation_fraction": 0.5}
    everything = DataArguments(**settings, tokenizer_cache=str(tmp_path))  # type: ignore[arg-type]
    limited = DataArguments(**settings, tokenizer_cache=str(tmp_path), max_eval_samples=3)  # type: ignore[arg-type]
    documents = load_text(everything)
    tokenizer = load_tokenizer(model_args, everything, documents["train"])
    whole = load_blocks(everything, documents, tokenizer)["validation"]["input_ids"][:]
    third = len(whole) / 3
    expected = [whole[0], whole[int(third)], whole[int(2 * third)]]
    assert load_blocks(limited, documents, tokenizer)["validation"]["input_ids"][:] == expected


def test_document_order_is_random_but_fixed(text_folder: Path) -> None:
    data_args = DataArguments(train_files=[str(text_folder / "*.py")])
    order = load_text(data_args)["train"]["text"][:]
    assert order == load_text(data_args)["train"]["text"][:]
    assert order != sorted(order)


def run_main(rank: int, arguments: list[str]) -> None:
    hf_zero.install()
    main(arguments)


def under_the_launcher(arguments: list[str], cache: Path) -> str:
    """Runs the script under torchrun on two ranks; returns its output, or fails with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(EXAMPLES / "train_clm.py"), *arguments]
    settings = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_ZERO": "1"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("is_launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trains_and_evaluates_on_two_ranks(
    is_launched: bool, text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default on ranks that start at once: every launched process imports everything again."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    output = tmp_path / "out"
    arguments = ["--deepspeed", str(tmp_path / "ds.json"), "--bf16", "--use_cpu", "--do_train", "--do_eval"]
    arguments += ["--output_dir", str(output), "--train_files", str(text_folder / "*.py"), *SMALL]
    arguments += ["--max_steps", "30", "--learning_rate", "1e-2", "--per_device_train_batch_size", "4"]
    arguments += ["--logging_steps", "10", "--logging_first_step", "--save_strategy", "no", "--report_to", "none"]
    if is_launched:
        printed = under_the_launcher(arguments, tmp_path / "hf")
    else:
        run_ranks(run_main, 2, arguments, init=False)
        printed = capsys.readouterr().out

    assert printed.count("training on 2 process(es)") == 1  # only the main process logs
    state = json.loads((output / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), abs=0.3)
    assert losses[-1] < losses[0] / 2
    evaluation = json.loads((output / "eval_results.json").read_text())
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))
    assert json.loads((output / "train_results.json").read_text())["train_loss"] > 0

    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype is torch.bfloat16
    ids = tokenizer((text_folder / "part05.py").read_text(), return_tensors="pt")["input_ids"][:, :32]
    assert model(input_ids=ids, labels=ids).loss.item() < losses[0] / 2


def test_resuming_from_the_last_checkpoint_begins_anew_where_there_is_none(tmp_path: Path) -> None:
    def found(output: Path, value: str) -> str | None:
        *_, training_args = parse(
            ["--do_train", "--use_cpu", "--output_dir", str(output), "--resume_from_checkpoint", value]
        )
        return checkpoint_to_resume(training_args)

    assert found(tmp_path / "absent", "last") is None
    (tmp_path / "checkpoint-5").mkdir()  # empty: the job ended while it saved
    assert found(tmp_path, "last") is None
    for step in (7, 40, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/trainer_state.json").touch()
    assert found(tmp_path, "last") == str(tmp_path / "checkpoint-40")
    assert found(tmp_path, "elsewhere") == "elsewhere"
