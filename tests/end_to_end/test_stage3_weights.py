"""Stage 3 weights: layers called by themselves, saving, loading, resized vocabularies, ties."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForCTC,
    CLIPConfig,
    CLIPModel,
    LlamaForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.integrations import HfDeepSpeedConfig

from hf_zero.integration.patches.trl import around_hash_module
from tests.end_to_end.stage3 import (
    arguments,
    assert_same_tensors,
    assert_same_training,
    assert_trains_as_plain,
    auto_config,
    ds_config,
    engine_of,
    plain,
    rank_batches,
    train_engine,
    trainer_of,
    whole,
)
from tests.support.models import VOCABULARY, Batch, tiny_llama, tiny_llama_config
from tests.support.ranks import run_ranks

WEIGHT_FILES = ("*.safetensors", "*model*.bin")


def weight_files(folder: Path) -> list[Path]:
    """Files that look like saved weights."""
    return sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))


# --- layers called by themselves ---------------------------------------------------------------------------------


def run_embedding_alone(rank: int) -> list[Tensor]:
    model = tiny_llama()
    engine = engine_of(model)
    ids = torch.arange(5 * (rank + 1)).view(1, -1)
    embedding = engine.module.get_input_embeddings()
    inside = embedding(ids).detach().clone()
    with torch.no_grad():
        quiet = embedding(ids).clone()
    head = engine.module.get_output_embeddings()
    return [inside, quiet, head(inside).detach().clone()]


def test_a_layer_can_be_called_by_itself() -> None:
    """ "RuntimeError: 'weight' must be 2-D": prompt tuning and vision-language models call the embedding directly,
    outside the engine's forward, where the partitioned weight was an empty vector."""
    model = tiny_llama()
    for rank, (inside, quiet, logits) in enumerate(run_ranks(run_embedding_alone, 2)):
        expected = model.get_input_embeddings()(torch.arange(5 * (rank + 1)).view(1, -1))
        assert torch.equal(inside, expected) and torch.equal(quiet, expected)
        torch.testing.assert_close(logits, model.lm_head(expected))


def embedded_loss(model: Any, batch: Batch) -> Tensor:
    """Like soft prompts: embeds outside the model, and passes vectors."""
    inner = getattr(model, "module", model)
    vectors = inner.get_input_embeddings()(batch["input_ids"])
    loss: Tensor = model(inputs_embeds=vectors, labels=batch["labels"]).loss
    return loss


def test_a_layer_called_by_itself_is_trained() -> None:
    """The same problem in training: the embedding's gradient came from a use that the engine did not see."""
    assert_trains_as_plain(tiny_llama, partial(rank_batches, 4), embedded_loss)


# --- saving ------------------------------------------------------------------------------------------------------


def run_trainer_saves(rank: int, folder: str, gather: bool, tied: bool) -> dict[str, Tensor]:
    training = arguments(folder, auto_config(stage3_gather_16bit_weights_on_model_save=gather))
    trainer = trainer_of(tiny_llama(tied=tied), training)
    trainer.train()
    trainer.save_model()
    return whole(trainer.model)


@pytest.mark.parametrize("tied", [False, True])
def test_trainer_saves_whole_weights(tied: bool, tmp_path: Path) -> None:
    """Training succeeded, but the saved model was a few kilobytes of tensors of shape [0], or its tied head was lost.
    Every tensor must have its shape and the trained value, and the names of an ordinary save."""
    weights = run_ranks(run_trainer_saves, 2, str(tmp_path / "out"), True, tied, init=False)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    tiny_llama(tied=tied).save_pretrained(tmp_path / "plain")
    assert saved.keys() == load_file(tmp_path / "plain" / "model.safetensors").keys()
    for trained in weights:
        for name, value in saved.items():
            assert torch.equal(value, trained[name]), name
    assert not torch.equal(saved["model.norm.weight"], torch.ones(36)), "not trained"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same_tensors(dict(model.named_parameters()), weights[0])


def test_without_gathering_no_useless_file_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With stage3_gather_16bit_weights_on_model_save off, a "model" of empty tensors was silently written. Now there is
    no such file, a message says how to get the weights, and that way gives exactly the trained ones."""
    out = tmp_path / "out"
    weights = run_ranks(run_trainer_saves, 2, str(out), False, False, init=False)
    assert not weight_files(out)
    said = capfd.readouterr()
    assert "zero_to_fp32" in said.out + said.err
    recovered = get_fp32_state_dict_from_zero_checkpoint(str(out))
    for name, value in weights[0].items():
        assert torch.equal(recovered[name], value), name


def run_save_pretrained(rank: int, folder: str, only_rank_0: bool) -> dict[str, Tensor] | str:
    model = tiny_llama()
    engine = engine_of(model)
    train_engine(engine, [step[rank] for step in rank_batches(2)])
    trained = whole(model)
    if only_rank_0 and rank == 1:
        return trained
    try:
        engine.module.save_pretrained(folder, is_main_process=rank == 0)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return trained


@pytest.mark.parametrize("only_rank_0", [False, True])
def test_save_pretrained_is_right_or_refused(only_rank_0: bool, tmp_path: Path) -> None:
    """`model.save_pretrained` wrote the empty placeholders of the shards. Now either the file is correct, or an error
    names the correct way, and there is no file; a call on rank 0 alone must not wait for the others either."""
    answers = run_ranks(run_save_pretrained, 2, str(tmp_path), only_rank_0, timeout_s=60)
    if isinstance(answers[0], str):
        assert not weight_files(tmp_path), f"refused, but wrote {weight_files(tmp_path)}"
        assert "GatheredParameters" in answers[0] or "save_model" in answers[0], answers[0]
    else:
        assert_same_tensors(load_file(tmp_path / "model.safetensors"), answers[0])


def run_save_gathered(rank: int, folder: str) -> dict[str, Tensor]:
    model = tiny_llama(tied=True)
    engine = engine_of(model)
    train_engine(engine, [step[rank] for step in rank_batches(2)])
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if rank == 0:
            model.save_pretrained(folder)
    return whole(model)


def test_save_pretrained_under_gathered_parameters(tmp_path: Path) -> None:
    """The documented manual way: gather, then save on rank 0; a tied head stays tied."""
    weights = run_ranks(run_save_gathered, 2, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_tensors(dict(model.named_parameters()), weights[1])


def run_consolidate(rank: int) -> tuple[Any, dict[str, Tensor], bool]:
    model = tiny_llama(tied=True)
    engine = engine_of(model)  # the config does not request whole weights: Trainer does with adapters, OpenRLHF always
    state = engine._zero3_consolidated_16bit_state_dict()
    shares = state is not None and state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    return (None if state is None else dict(state)), whole(model), shares


def test_the_consolidated_state_dict_is_on_rank_0_and_keeps_ties() -> None:
    """Accelerate's get_state_dict reads this: a duplicated tied head is saved twice or rejected by safetensors."""
    (first, weights, shares), (second, _, _) = run_ranks(run_consolidate, 2)
    assert second is None and shares
    assert first.keys() == tiny_llama(tied=True).state_dict().keys()
    assert_same_tensors({name: first[name] for name in weights}, weights)


# --- loading -----------------------------------------------------------------------------------------------------


def run_load(rank: int, folder: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    alive = HfDeepSpeedConfig(ds_config())
    torch.manual_seed(rank)  # random values differ between ranks: rank 0's count
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    loaded = whole(model)
    engine_of(model)
    assert_same_tensors(whole(model), loaded)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    del alive
    return loaded, buffers, {key: sorted(value) for key, value in info.items() if key.endswith("_keys")}


@pytest.mark.parametrize("shard", ["100GB", "30KB"])
def test_every_rank_loads_every_weight(shard: str, tmp_path: Path) -> None:
    """After an upgrade, loading at stage 3 silently left weights at random values on all ranks. Buffers (rotary
    frequencies) were zeros or uninitialised memory on ranks other than 0."""
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    for loaded, buffers, info in run_ranks(run_load, 2, str(tmp_path), {}):
        for name, value in model.named_parameters():
            assert torch.equal(loaded[name], value), name
        assert_same_tensors(buffers, dict(model.named_buffers()))
        assert not any(info.values()), info


def test_weights_of_other_sizes_are_initialised_where_they_may_be(tmp_path: Path) -> None:
    """`from_pretrained(..., ignore_mismatched_sizes=True)`, for a head with other labels, was refused at stage 3. And
    without it another size went unnoticed, when all partitioned parameters had the shape [0]."""
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    options = {"ignore_mismatched_sizes": True, "vocab_size": VOCABULARY + 7}
    first, second = run_ranks(run_load, 2, str(tmp_path), options)
    assert_same_tensors(first[0], second[0])
    for name, value in model.named_parameters():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert first[0][name].shape == (VOCABULARY + 7, 36) and 0.018 < first[0][name].std() < 0.022
        else:
            assert torch.equal(first[0][name], value), name
    with pytest.raises(AssertionError, match="size mismatch for model.embed_tokens.weight"):
        run_ranks(run_load, 2, str(tmp_path), {"vocab_size": VOCABULARY + 7})


def test_missing_keys_are_noticed_and_initialised(tmp_path: Path) -> None:
    """A file without some weights gave NaN or uninitialised memory instead, different on each rank."""
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    content = load_file(tmp_path / "model.safetensors")
    gone = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    kept = {name: value for name, value in content.items() if name not in gone}
    strange = {"model.layers.7.mlp.up_proj.weight": torch.ones(2)}
    save_file({**kept, **strange}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    first, second = run_ranks(run_load, 2, str(tmp_path), {})
    # transformers itself reports no unexpected keys in this case, regardless of the file.
    assert first[2]["unexpected_keys"] == second[2]["unexpected_keys"] == sorted(strange)
    assert first[2]["missing_keys"] == second[2]["missing_keys"] == sorted(gone)
    for name, value in kept.items():
        assert torch.equal(first[0][name], value), name
    for name in gone:
        assert torch.equal(first[0][name], second[0][name]), f"{name} differs between ranks"
    assert torch.equal(first[0]["model.norm.weight"], torch.ones(36))
    for name in gone[:2]:
        assert first[0][name].std().item() == pytest.approx(model.config.initializer_range, rel=0.2), name


# --- weights under a parametrization, digests --------------------------------------------------------------------


def tiny_wav2vec2_config() -> Wav2Vec2Config:
    """Its positions come from a weight-normed convolution."""
    convolution = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embeddings": 6}
    shape = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    return Wav2Vec2Config(**convolution, **shape, num_conv_pos_embedding_groups=3, vocab_size=11)


def run_make_and_load_normed(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    alive = HfDeepSpeedConfig(ds_config())
    torch.manual_seed(5)
    made, loaded = Wav2Vec2ForCTC(tiny_wav2vec2_config()), Wav2Vec2ForCTC.from_pretrained(folder)
    del alive
    return whole(made), whole(loaded)


def test_weights_behind_a_parametrization_are_made_and_loaded(tmp_path: Path) -> None:
    """transformers reads `conv.weight` before it initialises it, but only gathers parameters of `conv` itself. So it
    read a weight whose norm and direction were partitioned, and no Wav2Vec2 could be created or loaded."""
    torch.manual_seed(5)
    plain_model = Wav2Vec2ForCTC(tiny_wav2vec2_config())
    plain_model.save_pretrained(tmp_path)
    expected = plain_model.state_dict()
    for made, loaded in run_ranks(run_make_and_load_normed, 2, str(tmp_path)):
        assert loaded.keys() == made.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(loaded[name], value), name
            assert made[name].shape == value.shape and (made[name].std() > 0) == (value.std() > 0), name


def run_make_normed_from_config(rank: int) -> dict[str, Tensor]:
    alive = HfDeepSpeedConfig(ds_config())
    made = AutoModelForCTC.from_config(tiny_wav2vec2_config())
    del alive
    return whole(made)


def test_what_a_model_sets_behind_a_parametrization_stays() -> None:
    """Wav2Vec2 clears the bias of its positional convolution. `from_config` drew it at stage 3 like torch does for any
    convolution, after the model's own initialisation instead of before."""
    expected = AutoModelForCTC.from_config(tiny_wav2vec2_config()).state_dict()
    for made in run_ranks(run_make_normed_from_config, 2):
        assert made.keys() == expected.keys()
        for name, value in expected.items():
            assert made[name].std() > 0 if value.std() > 0 else torch.equal(made[name], value), name


def tiny_clip_config() -> CLIPConfig:
    """A text and a vision model in one."""
    shape = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**shape, "vocab_size": 11, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPConfig(text_config=text, vision_config={**shape, "image_size": 8, "patch_size": 4}, projection_dim=6)


def run_make_composed(rank: int) -> dict[str, Tensor]:
    alive = HfDeepSpeedConfig(ds_config())
    torch.manual_seed(5)
    made = CLIPModel(tiny_clip_config())
    del alive
    sharded = [name for name, parameter in made.named_parameters() if hasattr(parameter, "ds_id")]
    assert any("text_model" in name for name in sharded) and any("vision_model" in name for name in sharded)
    return {name: value for name, value in whole(made).items() if name in sharded}


def test_a_model_that_is_made_of_others_is_initialised_once() -> None:
    """Its parts are partitioned once they have been created. Upstream marks modules as initialised on rank 0, which
    writes their values; every other rank initialised them again as parts of the whole model, and raised an error for
    writing into shards while rank 0 waited for it."""
    expected = CLIPModel(tiny_clip_config()).state_dict()
    for made in run_ranks(run_make_composed, 2):
        for name, value in made.items():
            assert value.shape == expected[name].shape and (value.std() > 0) == (expected[name].std() > 0), name


def digest(module: Any) -> str:
    """A digest as in TRL."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(name.encode() + tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def run_digest(rank: int) -> str:
    return around_hash_module(digest, engine_of(tiny_llama()).module)


def test_a_digest_is_of_whole_weights() -> None:
    """TRL computes the key of a reference's log-probabilities from a model that has been partitioned since it was
    loaded: DPO with precompute_ref_log_probs failed there."""
    assert run_ranks(run_digest, 2) == [digest(tiny_llama())] * 2


# --- resizing ----------------------------------------------------------------------------------------------------


def run_resize(rank: int, folder: str, size: int, multiple: int | None) -> Any:
    alive = HfDeepSpeedConfig(ds_config())
    torch.manual_seed(rank)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    shapes = [tuple(layer.weight.shape) for layer in (model.model.embed_tokens, model.lm_head)]
    engine = engine_of(model)  # new rows are random on each rank; here rank 0's win
    start = whole(model)
    losses, norms = train_engine(engine, [step[rank] for step in rank_batches(3, limit=100)])
    still_tied = model.lm_head.weight is model.model.embed_tokens.weight
    del alive
    return shapes, model.config.vocab_size, (tied, still_tied), start, (losses, norms, whole(model))


@pytest.mark.parametrize(
    ("tied", "size", "multiple", "rows"),
    [
        (False, 150, None, 150),
        (True, 101, None, 101),
        pytest.param(True, 150, None, 150, marks=pytest.mark.slow),
        pytest.param(False, 101, None, 101, marks=pytest.mark.slow),
        pytest.param(False, 132, 64, 192, marks=pytest.mark.slow),
        pytest.param(True, 132, 64, 192, marks=pytest.mark.slow),
    ],
)
def test_resize_token_embeddings(tied: bool, size: int, multiple: int | None, rows: int, tmp_path: Path) -> None:
    """The size was read from an empty placeholder: the vocabulary became 0, or the copy only changed one shard, which
    was worst for an untied head. Kept rows, ties and the config must be as in one process, and the model must train."""
    original = tiny_llama(tied=tied)
    original.save_pretrained(tmp_path)
    answers = run_ranks(run_resize, 2, str(tmp_path), size, multiple)
    kept = min(rows, VOCABULARY)
    for shapes, vocabulary, ties, start, _ in answers:
        assert shapes == [(rows, 36), (rows, 36)] and vocabulary == rows and ties == (tied, tied)
        for name, value in original.named_parameters():
            assert torch.equal(start[name][:kept], value[:kept]), name
            assert torch.equal(start[name], answers[0][3][name]), f"{name} differs between ranks"
    new_rows = answers[0][3]["model.embed_tokens.weight"][kept:]
    assert not new_rows.isnan().any() and (not len(new_rows) or 0 < float(new_rows.std()) < 0.1)
    config = tiny_llama_config(tied=tied)
    config.vocab_size = rows
    model = LlamaForCausalLM(config)
    model.load_state_dict(answers[0][3], strict=not tied)
    assert_same_training([answer[4] for answer in answers], plain(model, rank_batches(3, limit=100)))
