"""The two Accelerate examples with every launcher: each trains, with the same result for the same number of ranks."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from config_support import DEFAULT, newest, parameter_groups
from topics import NUM_WORDS, TOPICS, WINDOW, Samples, load_topics, new_model, spread, windows
from transformers import AutoModelForSequenceClassification

from tests.examples.conftest import EXAMPLES
from tests.support.launch import Finished, a_port, accelerate, alone_is_not_distributed, launch
from tests.support.ranks import run_ranks

NLP, CONFIG = EXAMPLES / "nlp_accelerate.py", EXAMPLES / "config_support.py"
SMALL = ("--cpu", "--limit", "96", "--epochs", "1", "--batch_size", "8")
TIMEOUT_S = 250

Run = Callable[[Path, Sequence[object]], Finished]


def by_accelerate(script: Path, words: Sequence[object]) -> Finished:
    flags = ["--use_hf_zero", "--cpu", "--num_processes", 2, "--gradient_clipping", 1.0]
    flags += ["--deepspeed_config_file", DEFAULT] if script == CONFIG else ["--zero_stage", 2]
    if script == CONFIG:
        flags = [flag for flag in flags if flag not in ("--gradient_clipping", 1.0)]
    return launch(script, words, launcher=accelerate(*flags), timeout_s=TIMEOUT_S)


def by_torchrun(script: Path, words: Sequence[object]) -> Finished:
    return launch(script, words, processes=2, timeout_s=TIMEOUT_S)


def by_hf_zero(script: Path, words: Sequence[object]) -> Finished:
    launcher = ["-m", "hf_zero", "launch", "--num_gpus", 2, "--master_port", a_port()]
    return launch(script, words, launcher=launcher, timeout_s=TIMEOUT_S)


def by_plain_python(script: Path, words: Sequence[object]) -> Finished:
    return launch(script, words, timeout_s=TIMEOUT_S)


def run_as_main(rank: int, script: Path, words: list[str]) -> str:
    """Returns the output."""
    alone_is_not_distributed()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *words]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue()


def by_a_fork(script: Path, words: Sequence[object], world: int = 1) -> Finished:
    """Like plain Python, without the time for imports."""
    said = run_ranks(run_as_main, world, script, list(map(str, words)), init=False, timeout_s=TIMEOUT_S)
    return Finished(0, said[0], 0.0, 0)


def by_two_forks(script: Path, words: Sequence[object]) -> Finished:
    """Like torchrun."""
    return by_a_fork(script, words, world=2)


def result(done: Finished) -> tuple[str, list[str]]:
    """The last line, and the messages of the epochs without their seconds."""
    done.check()
    last = re.search(r"accuracy [\d.]+ on held-out files; guessing reaches [\d.]+", done.output)
    assert last, done.output
    return last.group(), re.findall(r"epoch \d+: loss [\d.]+", done.output)


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d\.\d+", line)]


@pytest.mark.parametrize(
    ("script", "run"),
    [
        pytest.param(NLP, by_two_forks, id="nlp-forks"),
        pytest.param(NLP, by_accelerate, id="nlp-accelerate", marks=pytest.mark.slow),
        pytest.param(NLP, by_plain_python, id="nlp-python", marks=pytest.mark.slow),
        pytest.param(CONFIG, by_a_fork, id="config-fork"),
        pytest.param(CONFIG, by_plain_python, id="config-python", marks=pytest.mark.slow),
    ],
)
def test_the_example_trains(script: Path, run: Run, tmp_path: Path) -> None:
    more = ["--output_dir", tmp_path / "model"] if script == NLP else ["--checkpoints", tmp_path / "checkpoints"]
    line, epochs = result(run(script, [*SMALL, *more]))
    assert len(epochs) == 1 and all(0 <= number <= 1 for number in numbers(line))
    if script == NLP:
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
        assert saved.num_labels == len(TOPICS)
        assert all(bool(parameter.isfinite().all()) for parameter in saved.parameters())
    else:
        assert newest(tmp_path / "checkpoints") == (tmp_path / "checkpoints" / "epoch-1", 1)


@pytest.mark.slow
@pytest.mark.parametrize("script", [NLP, CONFIG], ids=["nlp", "config"])
def test_every_launcher_gives_the_same_result(script: Path) -> None:
    results = {run.__name__: result(run(script, SMALL)) for run in (by_accelerate, by_torchrun, by_hf_zero)}
    assert len(set(map(str, results.values()))) == 1, results


@pytest.mark.slow
def test_in_a_minute_it_knows_the_topics_better_than_guessing() -> None:
    reached, guessed = numbers(result(by_accelerate(NLP, ["--cpu"]))[0])
    assert reached > 2 * guessed


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    words = [*SMALL, "--checkpoints", tmp_path]
    result(by_torchrun(CONFIG, words))
    done = by_plain_python(CONFIG, [*words, "--epochs", 2, "--resume"])
    assert "goes on after epoch 1" in done.output
    assert len(result(done)[1]) == 1


def test_held_out_samples_come_from_files_of_their_own() -> None:
    trained_on, held_out = load_topics(limit=200)
    assert len(trained_on) == len(held_out) == 200
    for part in (trained_on, held_out):
        assert {int(sample["labels"]) for sample in part} == set(range(len(TOPICS)))
        assert all(sample["input_ids"].shape == (WINDOW + 1,) for sample in part)
        assert 1 / len(TOPICS) <= part.commonest() < 0.5
    seen = {tuple(sample.words.tolist()) for sample in trained_on.samples}
    assert not any(tuple(sample.words.tolist()) in seen for sample in held_out.samples)


def test_windows_are_full_and_words_have_one_number_everywhere() -> None:
    first, second = windows("Alpha beta, " * WINDOW, topic=4)
    assert first.topic == 4 and torch.equal(first.words, second.words)
    assert int(first.words[0]) == 1 and len(first.words.unique()) == 3
    assert int(first.words.max()) < NUM_WORDS
    assert windows("too short", topic=0) == []


def test_spreading_keeps_ends_apart() -> None:
    samples = [windows(f"word{letter} " * WINDOW, topic=0)[0] for letter in "abcdef"]
    assert spread(samples, 3) == [samples[0], samples[2], samples[4]]
    assert spread(samples, None) == samples
    assert len(Samples(samples)) == 6


def test_every_parameter_is_in_one_group_and_biases_do_not_decay() -> None:
    model = new_model(width=16, layers=1)
    decaying, others = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(parameter)].endswith("weight") for parameter in decaying["params"])
