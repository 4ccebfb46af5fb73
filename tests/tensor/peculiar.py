"""Extra sizes that some models need to be tiny, and inputs other than tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ALIKE = {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_VISION = {"image_size": 32, "patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8}
_NOTE_WINDOW = {
    f"swa_{name}": size
    for name, size in {
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 24,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    }.items()
}  # fmt: skip
_AUDIO = {"num_blocks": 2, "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64}

# Attributes of configs, by their names without "Config".
MORE: dict[str, dict[str, Any]] = {
    "CodeGen": {"rotary_dim": 8},
    "CohereCompassText": {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [4, 2, 2]}}},
    "DeepseekOcr2Text": {"mlp_layer_types": ["dense", *["sparse"] * 3]} | _ALIKE,
    "DeepseekOcr2VisionEncoder": {},
    "Dots3NoteText": _NOTE_WINDOW,
    "Dots3NoteVision": {"pyramid_num_routed": [-1, -1, 4, 4], "adapter_in_dim": 64, "adapter_out_dim": 64}
    | {"patch_size": 8},
    "Ernie4_5_VLMoeText": {"moe_intermediate_size": [32, 32], "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
    "Ernie4_5_VLMoeVision": {"depth": 2, "num_heads": 4, "patch_size": 8},
    "Esmc": _ALIKE,
    "FalconH1": {"mamba_d_ssm": 128},
    "GPTJ": {"rotary_dim": 8},
    "Gemma3nText": {"num_kv_shared_layers": 0, "num_hidden_layers": 5, "laurel_rank": 16},
    "Gemma4Vision": {"pooling_kernel_size": 2, "patch_size": 8, "position_embedding_size": 16} | _ALIKE,
    "Glm5NextText": {"index_kpool": 2, "qk_rope_head_dim": 0, "qk_head_dim": 16},
    "HiggsAudioV2": {"audio_token_id": 60, "audio_bos_token_id": 61, "audio_delay_token_id": 62}
    | {"codebook_size": 64, "audio_stream_bos_id": 64, "audio_stream_eos_id": 65, "num_codebooks": 2},
    "HYV4VLText": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "Inkling2LoopText": {"unpadded_vocab_size": 64},
    "Inkling2Text": {"unpadded_vocab_size": 64},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "Llama4": {"boi_token_index": 58, "eoi_token_index": 59, "image_token_index": 60},
    "Llama4Vision": _VISION
    | {"projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64}
    | {"intermediate_size": 256},
    "LongcatFlash": {"zero_expert_num": 2, "num_layers": 2, "head_dim": 8, "moe_topk": 2},
    "MiniMaxM3VLText": {"dense_intermediate_size": 32, "shared_intermediate_size": 32, "rotary_dim": 8},
    "MuseGlimmer": {"out_hidden_size": 64, "projector_hidden_size": 64, "image_token_id": 60, "video_token_id": 61},
    "MuseGlimmerAssistant": {"target_layer_ids": [0, 1], "mask_token_id": 5, "block_size": 4},
    "MuseGlimmerVision": _VISION,
    "MuseSpark": {"out_hidden_size": 64, "projector_hidden_size": 64, "image_token_id": 60, "video_token_id": 61}
    | {"audio_token_id": 62},
    "MuseSparkAudio": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "out_hidden_size": 64},
    "MuseSparkText": {"moe_hidden_size": 32},
    "MuseSparkVision": _VISION,
    "PaddleOCRText": {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}},
    "Phi4Multimodal": {"sliding_window": None},
    "Phi4MultimodalAudio": _AUDIO | {"image_size": 32},
    "Phi4MultimodalVision": {"image_size": 32, "patch_size": 8, "crop_size": 32},
    "Qwen3OmniMoeTalkerCodePredictor": {"num_code_groups": 4},
    "Qwen3OmniMoeTalkerText": {"shared_expert_intermediate_size": 32},
    "Qwen4ExpText": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4}
    | {"indexer_compress_ratio": 2},
    "T5Gemma2Decoder": {"dropout_rate": 0.0},
    "T5Gemma2Text": {"dropout_rate": 0.0},
}

# Other classes if the class with a loss needs more inputs than tokens; and configs that are part of others'.
CLASSES = {
    "Qwen3OmniMoeTalkerCodePredictor": "Qwen3OmniMoeTalkerCodePredictorModel",
    "T5GemmaModule": "T5GemmaForConditionalGeneration",
}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8))


def _patches(width: int, **more: Any) -> dict[str, Any]:
    """Patches of two images, 4 x 4 each."""
    return {"grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]), **more, **{"pixel_values": _random(32, width)}}


def _positions() -> Tensor:
    return (
        torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2).repeat(2, 1, 1)
    )


_PIXELS = 3 * 8 * 8
INPUTS: dict[str, dict[str, Any]] = {
    "DeepseekOcr2VisionEncoder": {"inputs_embeds": _random(2, 12, 64), "num_patches": 6},
    "Dots3NoteVision": _patches(_PIXELS),
    "Ernie4_5_VLMoeVision": {"hidden_states": _random(32, _PIXELS), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])},
    "Gemma4Vision": {"pixel_values": _random(2, 16, _PIXELS), "pixel_position_ids": _positions()},
    "Llama4Vision": {"pixel_values": _random(2, 3, 32, 32)},
    "MuseGlimmerAssistant": {"noise_embeds": _random(2, 4, 64), "context_hidden_states": _random(2, 6, 128)},
    "MuseGlimmerVision": _patches(_PIXELS * 2),
    "Qwen3OmniMoeTalkerCodePredictor": {"inputs_embeds": _random(2, 4, 64)},
    "Qwen3OmniMoeTalkerText": {"inputs_embeds": _random(2, 6, 64)},
    "VoxtralRealtimeText": {"t_cond": _random(1, 1, 64), "input_ids": None},
    "T5Gemma2Decoder": {"encoder_hidden_states": _random(2, 7, 64), "input_ids": None},
    "HiggsAudioV2": {"labels": None, "input_ids": None},
}
