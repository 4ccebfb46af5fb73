"""Ten kinds of small models whose memory `bench.planning --architectures` measures: from configs, without the Hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_WIDTHS = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
_DECODER = {**_WIDTHS, "vocab_size": 8192, "max_position_embeddings": 512, "use_cache": False}


@dataclass(frozen=True)
class Architecture:
    """A model and the length of its samples.

    Attributes:
        kind: transformers' config class.
        name: the model's class name.
        length: tokens per text, samples per waveform.
    """

    kind: str
    name: str
    values: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    length: int = 160
    precision: str = "fp32"  # many processors have no bf16

    def config(self) -> Any:
        import transformers

        return transformers.AutoConfig.for_model(self.kind, architectures=[self.name], **self.values)


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", {**_DECODER, "num_key_value_heads": 2}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_DECODER, "num_key_value_heads": 2, "head_dim": 64}),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8192}),
    "bloom": Architecture(
        "bloom", "BloomForCausalLM", {"hidden_size": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8192}
    ),
    "mixtral": Architecture(
        "mixtral", "MixtralForCausalLM", {**_DECODER, "intermediate_size": 512, "num_key_value_heads": 2}
    ),
    "bert": Architecture("bert", "BertForMaskedLM", {**_WIDTHS, "vocab_size": 8192}),
    "t5": Architecture(
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 8192}
        | {"decoder_start_token_id": 0},
    ),
    "vit": Architecture("vit", "ViTForImageClassification", {**_WIDTHS, "image_size": 224, "patch_size": 16}),
    "wav2vec2": Architecture(
        "wav2vec2", "Wav2Vec2ForSequenceClassification", {**_WIDTHS, "apply_spec_augment": False}, length=40_000
    ),
    "whisper": Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": 256,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 1024,
            "decoder_ffn_dim": 1024,
            "vocab_size": 8192,
            "max_source_positions": 500,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        batch=2,
        length=128,
    ),
}
