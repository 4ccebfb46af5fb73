"""Tiny models of many architectures, with batches whose loss is the mean over rows, so that ranks can split them.

No dropout, no layer drop, no random masks, no auxiliary losses: the same batch always gives the same loss, and the mean
of the ranks' losses is the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

from tests.support.models import Batch
from tests.support.reference import LossFunction, model_loss

VOCABULARY = 97
IMAGE_TOKEN = 95
VISION_START, VISION_END = 93, 94
LENGTH = 12
IMAGE, PATCH = 12, 4  # image and patch size in pixels
PATCHES = (IMAGE // PATCH) ** 2
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {"vocab_size": VOCABULARY, **SPECIAL}
# Sizes that no world size divides evenly.
NARROW: dict[str, Any] = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6}
LLAMA = {**TEXT, **NARROW, "num_key_value_heads": 2, "intermediate_size": 70, "max_position_embeddings": 64}
# torch's grouped matrix product requires rows of a multiple of 16 bytes.
PACKED = {**LLAMA, "intermediate_size": 44}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MakeBatch = Callable[[int, torch.Generator], Batch]


@dataclass(frozen=True)
class Architecture:
    """A tiny model and its batches."""

    kind: str
    model_class: str
    config: Callable[[], Any]
    batch: MakeBatch
    loss: LossFunction = model_loss

    def build(self, seed: int = 0) -> Any:
        """The model in fp32; the same seed gives the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return getattr(tf, self.model_class)(self.config())

    def batches(self, num_batches: int, rows: int, seed: int = 5) -> list[Batch]:
        """Different batches of `rows` rows; the first dimension of every tensor can be split with the rows."""
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(rows, generator) for _ in range(num_batches)]


def share(batch: Batch, rank: int, world: int) -> Batch:
    """The rank's equal part of a batch."""
    return {key: value.chunk(world)[rank] for key, value in batch.items()}


# --- batches -----------------------------------------------------------------------------------------------------


def _tokens(rows: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 5, (rows, length), generator=generator)


def causal(rows: int, generator: torch.Generator) -> Batch:
    """Tokens for causal language modelling."""
    tokens = _tokens(rows, generator)
    return {"input_ids": tokens, "labels": tokens}


def labelled_tokens(rows: int, generator: torch.Generator) -> Batch:
    """Tokens with a label at each position."""
    return {"input_ids": _tokens(rows, generator), "labels": _tokens(rows, generator)}


def sequences(rows: int, generator: torch.Generator) -> Batch:
    """Tokens for sequence-to-sequence models, with shorter labels."""
    return {"input_ids": _tokens(rows, generator), "labels": _tokens(rows, generator, 7)}


def classified_tokens(rows: int, generator: torch.Generator) -> Batch:
    """Rows of tokens with one class label each."""
    return {"input_ids": _tokens(rows, generator), "labels": torch.randint(3, (rows,), generator=generator)}


def _pixels(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)


def images(rows: int, generator: torch.Generator) -> Batch:
    """Images with one class label each."""
    return {"pixel_values": _pixels(rows, generator), "labels": torch.randint(3, (rows,), generator=generator)}


def captions(rows: int, generator: torch.Generator) -> Batch:
    """Matching images and texts."""
    return {"pixel_values": _pixels(rows, generator), "input_ids": _tokens(rows, generator)}


def _with_image_tokens(rows: int, generator: torch.Generator, before: list[int], number: int) -> Batch:
    tokens = _tokens(rows, generator)
    place = torch.tensor([*before, *[IMAGE_TOKEN] * number]).repeat(rows, 1)
    tokens = torch.cat([tokens[:, :2], place, tokens[:, 2:]], dim=1)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE_TOKEN, -100)}


def picture_stories(rows: int, generator: torch.Generator) -> Batch:
    """Texts with one image each."""
    return {**_with_image_tokens(rows, generator, [], PATCHES), "pixel_values": _pixels(rows, generator)}


def patch_stories(rows: int, generator: torch.Generator) -> Batch:
    """Texts with one image each, as patches and grid for Qwen2-VL; four patches make one token."""
    side = 4
    patches = torch.randn(rows * side * side, 3 * 2 * PATCH * PATCH, generator=generator)
    grid = torch.tensor([[1, side, side]]).repeat(rows, 1)
    text = _with_image_tokens(rows, generator, [VISION_START], side * side // 4)
    types = (text["input_ids"] == IMAGE_TOKEN).to(torch.int32)
    return {**text, "mm_token_type_ids": types, "pixel_values": patches, "image_grid_thw": grid}


def spectrograms(rows: int, generator: torch.Generator) -> Batch:
    """Audio as 8 bands over 32 frames, and its transcript."""
    return {"input_features": torch.randn(rows, 8, 32, generator=generator), "labels": _tokens(rows, generator, 6)}


def waves(rows: int, generator: torch.Generator) -> Batch:
    """Audio as samples, and its transcript."""
    samples = torch.randn(rows, 200, generator=generator)
    return {"input_values": samples, "labels": _tokens(rows, generator, 5)}


def pair_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss over matching pairs only, because CLIP's own loss compares every text with every image of the batch."""
    loss: torch.Tensor = nn.functional.softplus(-model(**batch).logits_per_text.diagonal()).mean()
    return loss


# --- configs -----------------------------------------------------------------------------------------------------


def _llama(**more: Any) -> Any:
    return tf.LlamaConfig(**{**LLAMA, "tie_word_embeddings": False, **more})


def _qwen3() -> Any:
    return tf.Qwen3Config(**LLAMA, head_dim=6, tie_word_embeddings=True)


def _gemma3() -> Any:
    return tf.Gemma3TextConfig(
        **LLAMA, head_dim=6, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )


def _gpt2() -> Any:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return tf.GPT2Config(**TEXT, n_embd=36, n_layer=2, n_head=6, n_positions=64, **drops)


def _gpt_neox() -> Any:
    return tf.GPTNeoXConfig(**TEXT, **NARROW, intermediate_size=70, max_position_embeddings=64)


def _opt() -> Any:
    sizes = {"ffn_dim": 70, "max_position_embeddings": 64, "word_embed_proj_dim": 20, "do_layer_norm_before": False}
    return tf.OPTConfig(**TEXT, **NARROW, **sizes, dropout=0.0, attention_dropout=0.0, layerdrop=0.0)


def _mixtral() -> Any:
    return tf.MixtralConfig(**PACKED, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0)


def _qwen3_moe() -> Any:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
    # The first layer is dense, so that units differ.
    return tf.Qwen3MoeConfig(**LLAMA, head_dim=6, mlp_only_layers=[0], tie_word_embeddings=True, **experts)


def _deepseek_v3() -> Any:
    latent = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    sizes = {**LLAMA, "num_key_value_heads": 6, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
    return tf.DeepseekV3Config(**sizes, **latent, **experts)


def _t5() -> Any:
    sizes = {"d_model": 36, "d_kv": 6, "d_ff": 70, "num_layers": 2, "num_heads": 6}
    return tf.T5Config(
        vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, decoder_start_token_id=0, relative_attention_num_buckets=8
    )


def _bart() -> Any:
    sizes = {"d_model": 36, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 70, "decoder_ffn_dim": 70}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "max_position_embeddings": 64}
    return tf.BartConfig(**TEXT, **sizes, **heads, dropout=0.0, decoder_start_token_id=2, forced_eos_token_id=2)


def _bert_like(kind: str, **more: Any) -> Any:
    config = getattr(tf, kind)
    return config(**TEXT, **NARROW, **NO_DROPOUT, intermediate_size=70, max_position_embeddings=64, **more)


def _vit() -> Any:
    return tf.ViTConfig(**NARROW, **NO_DROPOUT, intermediate_size=70, image_size=IMAGE, patch_size=PATCH, num_labels=3)


def _clip_vision() -> dict[str, Any]:
    sizes = {"hidden_size": 20, "intermediate_size": 34, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**sizes, "image_size": IMAGE, "patch_size": PATCH, "projection_dim": 14}


def _clip() -> Any:
    sizes = {"hidden_size": 20, "intermediate_size": 34, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**TEXT, **sizes, "max_position_embeddings": 16, "projection_dim": 14}
    return tf.CLIPConfig(text_config=text, vision_config=_clip_vision(), projection_dim=14, logit_scale_init_value=0.0)


def _llava() -> Any:
    vision = {**_clip_vision(), "model_type": "clip_vision_model"}
    text = {**LLAMA, "model_type": "llama"}
    return tf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        image_seq_length=PATCHES,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 24, "hidden_size": 36, "num_heads": 3, "patch_size": PATCH, "mlp_ratio": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0}
    text = {**LLAMA, "rope_parameters": rope, "tie_word_embeddings": True}
    tokens = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return tf.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)


def _whisper() -> Any:
    sizes = {"d_model": 36, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 70, "decoder_ffn_dim": 70}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "num_mel_bands": 8}
    lengths = {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8}
    return tf.WhisperConfig(
        **TEXT, **sizes, **heads, **lengths, dropout=0.0, decoder_start_token_id=3, suppress_tokens=None
    )


def _wav2vec2() -> Any:
    convolutions = {"conv_dim": (12, 12, 12), "conv_stride": (3, 2, 2), "conv_kernel": (5, 3, 3)}
    positions = {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 3, "num_feat_extract_layers": 3}
    names = ("hidden", "activation", "attention", "feat_proj", "final")
    drops: dict[str, Any] = {f"{name}_dropout": 0.0 for name in names}
    more = {"layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean", "intermediate_size": 70}
    return tf.Wav2Vec2Config(**TEXT, **NARROW, **convolutions, **positions, **drops, **more)


def _mamba() -> Any:
    return tf.MambaConfig(**TEXT, hidden_size=28, num_hidden_layers=2, state_size=4, expand=2, conv_kernel=3)


def _mamba2() -> Any:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 8, "num_heads": 6, "head_dim": 8, "n_groups": 2}
    return tf.Mamba2Config(**TEXT, **sizes, chunk_size=4, conv_kernel=3, tie_word_embeddings=False)


def _jamba() -> Any:
    mamba = {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_dt_rank": 5}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return tf.JambaConfig(**PACKED, **mamba, **layers, num_experts=3, num_experts_per_tok=2)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("dense", "LlamaForCausalLM", _llama, causal),
    "llama-tied": Architecture("dense", "LlamaForCausalLM", lambda: _llama(tie_word_embeddings=True), causal),
    "qwen3": Architecture("dense", "Qwen3ForCausalLM", _qwen3, causal),
    "gemma3": Architecture("dense", "Gemma3ForCausalLM", _gemma3, causal),
    "gpt2": Architecture("dense", "GPT2LMHeadModel", _gpt2, causal),
    "gpt-neox": Architecture("dense", "GPTNeoXForCausalLM", _gpt_neox, causal),
    "opt": Architecture("dense", "OPTForCausalLM", _opt, causal),
    "mixtral": Architecture("experts", "MixtralForCausalLM", _mixtral, causal),
    "qwen3-moe": Architecture("experts", "Qwen3MoeForCausalLM", _qwen3_moe, causal),
    "deepseek-v3": Architecture("experts", "DeepseekV3ForCausalLM", _deepseek_v3, causal),
    "t5": Architecture("encoder-decoder", "T5ForConditionalGeneration", _t5, sequences),
    "bart": Architecture("encoder-decoder", "BartForConditionalGeneration", _bart, sequences),
    "bert": Architecture("encoder", "BertForMaskedLM", lambda: _bert_like("BertConfig"), labelled_tokens),
    "roberta": Architecture(
        "encoder",
        "RobertaForSequenceClassification",
        lambda: _bert_like("RobertaConfig", num_labels=3),
        classified_tokens,
    ),
    "albert": Architecture(
        "encoder",
        "AlbertForMaskedLM",
        lambda: _bert_like("AlbertConfig", embedding_size=20),
        labelled_tokens,
    ),
    "vit": Architecture("vision", "ViTForImageClassification", _vit, images),
    "clip": Architecture("vision-language", "CLIPModel", _clip, captions, pair_loss),
    "llava": Architecture("vision-language", "LlavaForConditionalGeneration", _llava, picture_stories),
    "qwen2-vl": Architecture("vision-language", "Qwen2VLForConditionalGeneration", _qwen2_vl, patch_stories),
    "whisper": Architecture("audio", "WhisperForConditionalGeneration", _whisper, spectrograms),
    "wav2vec2": Architecture("audio", "Wav2Vec2ForCTC", _wav2vec2, waves),
    "mamba": Architecture("state-space", "MambaForCausalLM", _mamba, causal),
    "mamba2": Architecture("state-space", "Mamba2ForCausalLM", _mamba2, causal),
    "jamba": Architecture("state-space", "JambaForCausalLM", _jamba, causal),
}
