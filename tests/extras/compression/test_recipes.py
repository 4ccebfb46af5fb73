"""The recipes in configs/compression fit a model of twelve layers, and the page names each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_zero.config import load_config, resolve_extra
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.export import init_compression

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "compression").glob("*.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_fits_a_bert(path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 12, "num_hidden_layers": 12}
    model = BertForSequenceClassification(BertConfig(vocab_size=96, max_position_embeddings=48, **sizes)).train()
    init_compression(model, load_config(path))
    compressed = compression_of(model)
    assert compressed is not None
    compressed.advance(2000)
    model(input_ids=torch.randint(0, 96, (2, 5)), labels=torch.tensor([0, 1])).loss.backward()
    assert resolve_extra(load_config(path), "compression").is_on


def test_each_is_on_the_page() -> None:
    page = (ROOT / "docs" / "compression.md").read_text(encoding="utf-8")
    assert len(RECIPES) == 6
    assert all(f"`{path.name}`" in page for path in RECIPES)
