"""Settings that projects around Hugging Face ship or generate, by repository and file."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

AUTO_BATCH: Config = {
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
AUTO_COMMON: Config = {
    **AUTO_BATCH,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
FP16_AUTO: Config = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BF16_AUTO: Config = {"enabled": "auto"}
CPU: Config = {"device": "cpu", "pin_memory": True}
NONE: Config = {"device": "none", "pin_memory": True}
ADAMW: Config = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP: Config = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
DECAY: Config = {
    "type": "WarmupDecayLR",
    "params": {**WARMUP["params"], "total_num_steps": "auto"},
}
STAGE_2: Config = {
    "stage": 2,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
}
STAGE_2_BUCKETS: Config = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3: Config = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def axolotl(zero: Config, **more: Any) -> Config:
    """Its files differ in their zero_optimization section."""
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "fp16": {**FP16_AUTO, "auto_cast": False, "initial_scale_power": 32},
        **AUTO_BATCH,
        "gradient_clipping": "auto",
        "wall_clock_breakdown": False,
        **more,
    }


def llama_factory(zero: Config, **more: Any) -> Config:
    """Every section with "auto", and zero_allow_untested_optimizer."""
    precision = {"fp16": FP16_AUTO, "bf16": BF16_AUTO}
    return {**AUTO_BATCH, "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, **precision} | {
        "zero_optimization": zero,
        **more,
    }


LLAMA_FACTORY_2: Config = {
    **STAGE_2_BUCKETS,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
    "round_robin_gradients": True,
}


def ms_swift(zero: Config, **more: Any) -> Config:
    """Every section with "auto", and an unset communication dtype."""
    return {"fp16": FP16_AUTO, "bf16": BF16_AUTO, "zero_optimization": zero, **AUTO_COMMON, **more}


MS_SWIFT_2: Config = {**STAGE_2_BUCKETS, "allgather_bucket_size": 2e8}
MS_SWIFT_3: Config = {
    **STAGE_3,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
}


def llava(zero: Config, **more: Any) -> Config:
    """The config of LLaVA's scripts and of many vision models after it."""
    batch = {key: AUTO_BATCH[key] for key in ("train_micro_batch_size_per_gpu", "train_batch_size")}
    steps = {"gradient_accumulation_steps": "auto"}
    return {"fp16": FP16_AUTO, "bf16": BF16_AUTO, **batch, **steps, "zero_optimization": zero, **more}


def open_rlhf_train(stage: int, **zero: Any) -> Config:
    """get_train_ds_config: plain numbers, with every flag written out."""
    return {
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "sub_group_size": "auto",
            "stage3_max_live_parameters": "auto",
            "stage3_max_reuse_distance": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": "auto",
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "reduce_scatter": True,
            **zero,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 4,
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 1},
        "sequence_parallel_size": 1,
    }


def open_rlhf_eval(stage: int, offload: bool) -> Config:
    """get_eval_ds_config."""
    return {
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": stage,
            "stage3_max_live_parameters": "auto",
            "stage3_max_reuse_distance": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "offload_param": {"device": "cpu" if offload else "none", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "tensor_parallel": {"autotp_size": 0},
        "train_micro_batch_size_per_gpu": 2,
    }


def deepspeed_chat(stage: int, offload: bool) -> Config:
    """The dict of DeepSpeed-Chat, which several RLHF trainers have copied."""
    device = "cpu" if offload else "none"
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "logs/ds_tensorboard_logs/", "job_name": "step1_tensorboard"},
    }


def internvl(zero: Config) -> Config:
    """An AdamW section with "auto", and wall_clock_breakdown."""
    optimizer = {"type": "AdamW", "params": {**ADAMW["params"]}}
    batch = {**AUTO_BATCH, "gradient_clipping": "auto"}
    precision = {
        "fp16": {**FP16_AUTO, "auto_cast": True},
        "bf16": BF16_AUTO,
    }
    return {"zero_optimization": zero, **precision, "optimizer": optimizer, **batch, "steps_per_print": 1e5} | {
        "wall_clock_breakdown": True
    }


FILES: dict[str, Config] = {
    "axolotl/zero1.json": axolotl({"stage": 1, "overlap_comm": True}),
    "axolotl/zero1_torch_compile.json": axolotl(
        {"stage": 1, "overlap_comm": True}, compile={"disable": False, "backend": "inductor"}
    ),
    "axolotl/zero2.json": axolotl({"stage": 2, "offload_optimizer": {"device": "cpu"}} | {
        "contiguous_gradients": True, "overlap_comm": True,
    }),
    "axolotl/zero2_torch_compile.json": axolotl(
        {"stage": 2, "contiguous_gradients": True, "overlap_comm": True}, compile={"disable": False}
    ),
    "axolotl/zero3.json": axolotl({
        **STAGE_3, "sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    }),
    "axolotl/zero3_bf16.json": axolotl({
        **STAGE_3, "sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    }),
    "axolotl/zero3_bf16_cpuoffload_all.json": axolotl({
        **STAGE_3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 0,
    }),
    "axolotl/zero3_bf16_cpuoffload_params.json": axolotl({**STAGE_3, "offload_param": CPU, "sub_group_size": 0}),
    "LLaMA-Factory/ds_z0_config.json": llama_factory({**LLAMA_FACTORY_2, "stage": 0}),
    "LLaMA-Factory/ds_z2_config.json": llama_factory(LLAMA_FACTORY_2),
    "LLaMA-Factory/ds_z2_offload_config.json": llama_factory({**LLAMA_FACTORY_2, "offload_optimizer": CPU}),
    "LLaMA-Factory/ds_z2_autotp_config.json": llama_factory(
        LLAMA_FACTORY_2, tensor_parallel={"autotp_size": 1}
    ),
    "LLaMA-Factory/ds_z3_config.json": llama_factory({**STAGE_3, "overlap_comm": False}),
    "LLaMA-Factory/ds_z3_offload_config.json": llama_factory({
        **STAGE_3, "overlap_comm": False, "offload_optimizer": CPU, "offload_param": CPU,
    }),
    "ms-swift/zero0.json": ms_swift({**MS_SWIFT_2, "stage": 0}),
    "ms-swift/zero1.json": ms_swift({**MS_SWIFT_2, "stage": 1, "offload_optimizer": NONE}),
    "ms-swift/zero2.json": ms_swift({**MS_SWIFT_2, "offload_optimizer": NONE}),
    "ms-swift/zero2_offload.json": ms_swift({**MS_SWIFT_2, "offload_optimizer": CPU}),
    "ms-swift/zero3.json": ms_swift({**MS_SWIFT_3, "offload_optimizer": NONE, "offload_param": NONE}),
    "ms-swift/zero3_offload.json": ms_swift({**MS_SWIFT_3, "offload_optimizer": CPU, "offload_param": CPU}),
    "LLaVA/zero2.json": llava(STAGE_2),
    "LLaVA/zero3.json": llava(STAGE_3),
    "LLaVA/zero3_offload.json": llava(
        {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU}, gradient_clipping="auto", optimizer=ADAMW,
        scheduler=WARMUP, steps_per_print=1e5, wall_clock_breakdown=False,
    ),
    "Qwen2-VL-Finetune/zero2.json": llava({**STAGE_2, "sub_group_size": 1e9, "reduce_scatter": True}),
    "Qwen2-VL-Finetune/zero2_offload.json": llava({
        **STAGE_2_BUCKETS, "offload_optimizer": CPU, "offload_param": CPU,
    }, gradient_clipping="auto", zero_force_ds_cpu_optimizer=False, steps_per_print=2000),
    "Qwen2-VL-Finetune/zero3.json": llava(STAGE_3, gradient_clipping="auto"),
    "Qwen2-VL-Finetune/zero3_offload.json": llava(
        {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU}, zero_force_ds_cpu_optimizer=False
    ),
    "LMFlow/ds_config_zero0_no_offload.json": {
        "fp16": FP16_AUTO, "bf16": BF16_AUTO, "zero_optimization": {"stage": 0}, **AUTO_COMMON,
    },
    "LMFlow/ds_config_zero2.json": {
        "fp16": FP16_AUTO, "bf16": BF16_AUTO, "zero_optimization": {**STAGE_2_BUCKETS, "offload_optimizer": CPU},
        **AUTO_COMMON,
    },
    "LMFlow/ds_config_zero2_no_offload.json": {
        "fp16": FP16_AUTO, "bf16": BF16_AUTO, "zero_optimization": STAGE_2_BUCKETS, **AUTO_COMMON,
    },
    "LMFlow/ds_config_zero3.json": {
        "fp16": FP16_AUTO, "bf16": BF16_AUTO, "optimizer": ADAMW, "scheduler": WARMUP, **AUTO_COMMON,
        "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "LMFlow/ds_config_zero3_for_eval.json": {
        "fp16": {"enabled": False}, "bf16": {"enabled": True}, "steps_per_print": 2000, "train_batch_size": 1,
        "zero_optimization": {**STAGE_3, "offload_param": CPU}, "wall_clock_breakdown": False,
    },
    "LMFlow/ds_config_multimodal.json": {
        "fp16": {**FP16_AUTO, "enabled": True}, "zero_optimization": STAGE_2_BUCKETS, **AUTO_BATCH,
        "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
        "comms_logger": {"enabled": False}, "dump_state": False, "memory_breakdown": False,
    },
    "FastChat/deepspeed_config_s2.json": {
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True,
        },
        "fp16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    },
    "FastChat/deepspeed_config_s3.json": {
        "fp16": {**FP16_AUTO, "initial_scale_power": 16}, "scheduler": DECAY, **AUTO_COMMON,
        "zero_optimization": {
            **STAGE_3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "OpenRLHF/get_train_ds_config stage 2": open_rlhf_train(2),
    "OpenRLHF/get_train_ds_config stage 3": open_rlhf_train(3, offload_param={"device": "cpu"}),
    "OpenRLHF/get_train_ds_config stage 3, overlap": open_rlhf_train(
        3, overlap_comm=True, contiguous_gradients=True, zero_hpz_partition_size=0
    ),
    "OpenRLHF/get_eval_ds_config stage 3": open_rlhf_eval(3, offload=True),
    "OpenRLHF/get_eval_ds_config stage 0": open_rlhf_eval(0, offload=False),
    "open-instruct/stage2_no_offloading.conf": {
        "bf16": BF16_AUTO, "zero_optimization": STAGE_2_BUCKETS, "optimizer": ADAMW, "scheduler": DECAY, **AUTO_COMMON,
    },
    "open-instruct/stage3_no_offloading.conf": {
        "bf16": BF16_AUTO, "optimizer": ADAMW, "scheduler": DECAY, "zero_optimization": STAGE_3, **AUTO_COMMON,
        "steps_per_print": 1e5,
    },
    "open-instruct/stage3_offloading_accelerate.conf": {
        "bf16": BF16_AUTO, "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
        **AUTO_COMMON, "steps_per_print": 1e5,
    },
    "open-instruct/get_train_ds_config": {
        **open_rlhf_train(3), "steps_per_print": 100, "train_batch_size": 4, "checkpoint": {"load_universal": False},
    },
    "open-instruct/get_eval_ds_config": open_rlhf_eval(3, offload=False),
    "DeepSpeed-Chat/get_train_ds_config stage 2": deepspeed_chat(2, offload=True),
    "DeepSpeed-Chat/get_train_ds_config stage 3": deepspeed_chat(3, offload=False),
    "InternVL/zero_stage1_config.json": internvl({
        "stage": 1, "allgather_partitions": True, "allgather_bucket_size": 1e9, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": 1e9, "contiguous_gradients": True,
    }),
    "InternVL/zero_stage3_config.json": internvl({**STAGE_3, "reduce_bucket_size": 1e9}),
    "stanford_alpaca/default_offload_opt_param.json": {
        "bf16": BF16_AUTO, "optimizer": ADAMW, "scheduler": DECAY, **AUTO_COMMON, "steps_per_print": 5,
        "zero_optimization": {
            **STAGE_3, "offload_optimizer": CPU, "offload_param": CPU,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    },
    "MiniCPM/ds_config_zero3_offload.json": {
        "fp16": FP16_AUTO, "bf16": BF16_AUTO, "optimizer": ADAMW, **AUTO_COMMON, "steps_per_print": 100,
        "zero_optimization": {
            **{key.removeprefix("stage3_"): value for key, value in STAGE_3.items()},
            "offload_optimizer": CPU, "offload_param": CPU,
        },
    },
    "Chinese-LLaMA-Alpaca/ds_zero2_no_offload.json": {
        "fp16": {**FP16_AUTO, "loss_scale_window": 100}, **AUTO_COMMON,
        "zero_optimization": {**STAGE_2_BUCKETS, "allgather_bucket_size": 1e8, "reduce_bucket_size": 1e8},
    },
}  # fmt: skip
