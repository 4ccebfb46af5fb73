"""Settings from guides and examples: each resolves, or is rejected with a clear reason."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import resolve
from tests.config.building import error_of, paths_of
from tests.config.wild import ADAMW, CPU, FP16_AUTO, LLAMA_FACTORY_2, STAGE_3, WARMUP

NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
FP16_ON = {**FP16_AUTO, "enabled": True}
FILLED_SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-4, "warmup_num_steps": 1, "total_num_steps": 60},
}
STAGE_2 = LLAMA_FACTORY_2
# A whole file in the style of the Trainer guides: every section present, unused ones empty.
EVERYTHING = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "optimizer": {**ADAMW, "type": "Adam"},
    "scheduler": WARMUP,
    "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **STAGE_2,
        "sub_group_size": 1e12,
        "elastic_checkpoint": False,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "ignore_unused_parameters": True,
    },
    "autotuning": {},
    "flops_profiler": {},
    "activation_checkpointing": {},
    "sparse_attention": {},
    "data_efficiency": {},
    "compression_training": {},
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "Lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}},
    "stage 2 of the guides, in fp16": {
        "fp16": FP16_ON,
        "zero_optimization": STAGE_2,
        "scheduler": FILLED_SCHEDULE,
    },
    "stage 3 of the guides": {"bf16": {"enabled": True}, "zero_optimization": STAGE_3},
    "fp16 with auto_cast": {"fp16": {"enabled": True, "auto_cast": True}},
    "amp": {"amp": {"enabled": True, "opt_level": "O1"}},
    "bf16 beside fp16 off": {
        "fp16": {**FP16_ON, "enabled": False, "auto_cast": False, "consecutive_hysteresis": False},
        "bf16": {"enabled": True},
    },
    "communication dtype": {"communication_data_type": "fp32"},
    "AdamW, all auto": {"optimizer": ADAMW},
    "Adam with numbers": {
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
    },
    "WarmupLR with numbers": {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        }
    },
    "activation checkpointing": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    },
    "profiler off": {
        "flops_profiler": {
            "enabled": False,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        }
    },
    "checkpoint options": {
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        }
    },
    "accumulation dtype": {"data_types": {"grad_accum_dtype": "fp32"}},
    "stage 2 of the guides, in bf16": {
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 5e-4, "weight_decay": 0.0, "torch_adam": True, "adam_w_mode": True},
        },
        "scheduler": FILLED_SCHEDULE,
        "zero_optimization": {**STAGE_2, "allgather_bucket_size": 2e8, "reduce_bucket_size": 768 * 768},
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "wall_clock_breakdown": False,
    },
    "every section": EVERYTHING,
    "what accelerate builds without a file": {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    },
    "stage 2 with CPU offload": {"zero_optimization": {**STAGE_2, "offload_optimizer": CPU}},
    "parameters offloaded at stage 2": {"zero_optimization": {**STAGE_2, "offload_param": CPU}},
    "ZeRO++": {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 8,
            "zero_quantized_gradients": True,
            "contiguous_gradients": True,
            "overlap_comm": True,
        }
    },
    "stage 3 with NVMe, aio in the wrong place": {
        "zero_optimization": {
            **STAGE_3,
            "offload_optimizer": {**NVME, "buffer_count": 4, "fast_init": False},
            "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
            "aio": AIO,
        }
    },
}

# config, key paths that the message must name
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ZenFlow": (
        {"zero_optimization": {**STAGE_2, "offload_optimizer": CPU, "zenflow": {"topk_ratio": 0.05}}},
        ["zero_optimization.zenflow"],
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    config = {"train_batch_size": 8, **ACCEPTED[name]}
    resolved = resolve(config, world_size=1)
    assert resolved.batch.train_batch_size == 8
    assert resolved.raw is config


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    config, paths = REFUSED[name]
    error = error_of({"train_batch_size": 8, **config})
    assert paths_of(error) == paths and "docs/features.md" in str(error)
