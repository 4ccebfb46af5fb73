"""Plans of models with images, spectrograms and waveforms are also traced; none falls back to a formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.architectures import ARCHITECTURES
from hf_zero.planning.model import build_model, config_of, load_model, sample_inputs, trace

pytestmark = pytest.mark.lengthy


@pytest.mark.parametrize("name", ["t5", "vit", "wav2vec2", "whisper"])
def test_what_is_not_a_plain_language_model_is_traced(name: str, tmp_path: Path) -> None:
    """They were given tokens, which they cannot use, and a formula's activations: 15 times too many for waveforms."""
    size = ARCHITECTURES[name]
    size.config().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), size.precision)
    found = {}
    for way in (False, True):
        torch.manual_seed(0)  # some drop layers at random
        found[way] = trace(model, micro_batch=2, length=size.length, checkpointing=way)
    assert not any(each.note for each in found.values()), found[True].note
    assert found[True].peak < found[False].peak


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_inputs_are_those_of_a_forward(name: str, tmp_path: Path) -> None:
    size = ARCHITECTURES[name]
    size.config().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build_model(config_of(str(tmp_path)))
    inputs = sample_inputs(model, 3, size.length, torch.device("meta"))
    assert model.main_input_name in inputs and all(len(each) == 3 for each in inputs.values() if torch.is_tensor(each))
